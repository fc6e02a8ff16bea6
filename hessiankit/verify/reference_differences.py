"""Central differences of the gradient, with a step for every direction and an error estimate for every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hessiankit.verify.in_place import placed
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_base import FAILURES, Product, Progress, Reference, Unsupported
from hessiankit.verify.traits import traits

WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""f'(x) = sum_k WEIGHTS[k - 1] (f(x + k h) - f(x - k h)) / h + O(h^8)."""

FIRST_STEP = {torch.float32: 2.0**-3, torch.float64: 2.0**-5}
HALVINGS = {torch.float32: 9, torch.float64: 19}
GOOD_ENOUGH = {torch.float32: 1e-6, torch.float64: 1e-12}
UNRESOLVED = 1e-3
SAFETY = 4.0


class CentralDifferences(Reference):
    """H v = (g(theta + h v) - g(theta - h v)) / 2h to eighth order, at the best of a ladder of steps.

    g is the module's own gradient, of the user's call, with the user's parameters moved in place.

    For each direction (scaled to unit length) the step is halved; half of the points are used again. The difference of
    two consecutive steps estimates the error of the smaller one, block by block: truncation falls 256 times a halving,
    rounding doubles, and the step between them is kept. Typical: 1e-12 relative in float64, 1e-5 in float32.

    A kink of the gradient (a ReLU whose pre-activation changes sign within the stencil, which reaches 4 h) makes that
    difference large and growing; the step is then halved until the stencil fits between the kinks. Where it never does,
    because a pre-activation is zero, the estimate stays large and says so.
    """

    name = "central-differences"
    independent_group = "differences"
    summary = "eighth-order central differences of the gradient"
    many_calls = True

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        precision = traits(problem).precision
        if precision not in HALVINGS:
            raise Unsupported(self.name, f"the module computes in {precision}, too coarse for differences")
        lengths = V.norm(dim=1, keepdim=True)
        units = V / torch.where(lengths > 0, lengths, 1)
        values, errors, steps, lost = [], [], [], 0
        try:
            with problem.at():
                noise = gradient_noise(problem, partial(_gradients, problem), precision)
                for unit in units:
                    ladder = _Ladder(problem, unit[None], precision, noise)
                    ladder.descend()
                    values.append(ladder.best)
                    errors.append(ladder.error_per_entry())
                    steps += ladder.steps_at_kinks
                    lost += ladder.unresolved
                    progress(len(values), len(V))
        except FAILURES as error:
            raise self.unsupported(error) from error
        if not values:
            return torch.zeros_like(V), torch.zeros_like(V), ""
        notes = []
        if steps:
            notes.append(f"kinks near the point: {len(steps)} of {len(V)} directions needed steps down to {min(steps):.0e}")
        if lost:
            notes.append(f"a kink at the point itself: along {lost} of {len(V)} directions the gradient has no derivative")
        return torch.cat(values) * lengths, torch.cat(errors) * lengths, "; ".join(notes)

    @contextmanager
    def along(self, problem: Problem) -> Iterator[Product]:
        """Return products along one direction after the other: two steps of the ladder, further ones where they differ."""
        precision = traits(problem).precision
        if precision not in HALVINGS:
            raise Unsupported(self.name, f"the module computes in {precision}, too coarse for differences")
        try:
            with problem.at():
                yield lambda direction: _two_steps(problem, direction, 1e3 * GOOD_ENOUGH[precision])
        except FAILURES as error:
            raise self.unsupported(error) from error


SHARE = 2.0**-8
"""First step of a product by parameter, as a share of the length of the parameters that move."""


def _two_steps(problem: Problem, direction: Mapping[str, Tensor], goal: float) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return H v by parameter, and of each an estimate of the error: the difference of two steps, one twice the other.

    Only running sums are kept. Where a kink makes the two differ, both are taken again at a 16th of the length, twice at most.
    """
    length = max(_length(problem.params[n] for n in direction), 0.02 * sum(v.numel() for v in direction.values()) ** 0.5)
    step = SHARE * length / max(_length(direction.values()), 1e-30)
    best: dict[str, Tensor] = {}
    known: dict[str, float] = {}
    for _ in range(3):
        fine = {n: torch.zeros_like(p) for n, p in problem.params.items()}
        coarse = {n: torch.zeros_like(p) for n, p in problem.params.items()}
        for k in (1, 2, 3, 4, 6, 8):
            here, there = WEIGHTS[k - 1] if k <= 4 else 0.0, WEIGHTS[k // 2 - 1] / 2 if k % 2 == 0 else 0.0
            for sign in (1, -1):
                for n, g in zip(fine, _moved_gradient(problem, direction, sign * k * step), strict=True):
                    fine[n].add_(g, alpha=sign * here / step)
                    coarse[n].add_(g, alpha=sign * there / step)
        size = max(float(x.abs().max()) for x in fine.values())
        error = {n: SAFETY * float((fine[n] - coarse[n]).abs().max()) for n in fine}
        for n in fine:
            if n not in known or error[n] < known[n]:
                best[n], known[n] = fine[n], error[n]
        if max(known.values()) <= goal * size:
            break
        step /= 16
    return best, known


def _moved_gradient(problem: Problem, direction: Mapping[str, Tensor], reach: float) -> list[Tensor]:
    with placed((problem.own[n], problem.params[n] + reach * v) for n, v in direction.items()):
        return problem.gradient()


def _length(parts: Iterable[Tensor]) -> float:
    return sum(float(x.double().square().sum()) for x in parts) ** 0.5


class _Ladder:
    """The halving of the step for one chunk of unit directions (m, P), each row and block keeping its best level."""

    def __init__(self, problem: Problem, units: Tensor, precision: torch.dtype, noise: Tensor) -> None:
        self.problem, self.units, self.precision = problem, units, precision
        self.best = torch.zeros_like(units)
        self.error = torch.full((len(units), len(problem.slices)), torch.inf, dtype=units.dtype, device=units.device)
        self.noise = noise
        self.steps_at_kinks: list[float] = []
        self.unresolved = 0

    def descend(self) -> None:
        """Halve the step until every direction has either met the goal or seen its error grow from rounding alone."""
        dtype, goal = self.units.dtype, GOOD_ENOUGH[self.precision]
        h = FIRST_STEP[self.precision]
        active = torch.arange(len(self.units), device=self.units.device)
        odd = {k: self._odd_part(active, k * h) for k in (1, 2, 3, 4)}
        coarse = _combine(odd, h)
        rising = torch.zeros(len(active), dtype=torch.int64, device=active.device)
        rough = torch.zeros(len(active), dtype=torch.bool, device=active.device)
        lowest = torch.full((len(active),), torch.inf, dtype=dtype, device=active.device)
        previous = lowest
        suspicious = 10 * torch.finfo(self.precision).eps ** 0.5
        for _ in range(HALVINGS[self.precision]):
            h /= 2
            odd = {1: self._odd_part(active, h), 2: odd[1], 3: self._odd_part(active, 3 * h), 4: odd[2]}
            fine = _combine(odd, h)
            error = torch.maximum(_per_block(self.problem, coarse - fine), self.noise / h)
            self._keep(active, fine, error)

            size = _per_block(self.problem, fine)
            relative = (error / size.clamp_min(1e-4 * size.amax(1, keepdim=True)).clamp_min(torch.finfo(dtype).tiny)).amax(1)
            rounding = (error <= 8 * self.noise / h).all(1)
            # Truncation falls 256 times a halving; a large error that hardly falls is a kink.
            rough |= (relative > previous / 4) & (relative > suspicious) & ~rounding
            rising = torch.where(relative > lowest, rising + 1, 0)
            lowest = torch.minimum(lowest, relative)
            previous = relative
            done = (relative <= goal) | rounding | ((rising >= 2) & (lowest < suspicious))
            self.steps_at_kinks += [h] * int((rough & done).sum())
            if bool(done.all()):
                return
            active, rising, rough, lowest, previous = (x[~done] for x in (active, rising, rough, lowest, previous))
            odd = {k: part[~done] for k, part in odd.items()}
            coarse = fine[~done]
        self.unresolved = int((lowest > UNRESOLVED).sum())
        self.steps_at_kinks += [h] * int((rough & (lowest <= UNRESOLVED)).sum())

    def error_per_entry(self) -> Tensor:
        """Return the estimated error in the layout of the products (m, P)."""
        columns = [
            self.error[:, i : i + 1].expand(-1, where.stop - where.start) for i, where in enumerate(self.problem.slices.values())
        ]
        return SAFETY * torch.cat(columns, dim=1)

    def _odd_part(self, active: Tensor, reach: float) -> Tensor:
        """Return g(theta + reach v) - g(theta - reach v) for the active directions."""
        step = reach * self.units[active]
        plus, minus = _gradients(self.problem, torch.cat([self.problem.theta + step, self.problem.theta - step])).chunk(2)
        return plus - minus

    def _keep(self, active: Tensor, fine: Tensor, error: Tensor) -> None:
        best, known = self.best[active], self.error[active]
        for i, where in enumerate(self.problem.slices.values()):
            better = error[:, i] < known[:, i]
            best[better, where] = fine[better, where]
        self.best[active] = best
        self.error[active] = torch.minimum(known, error)


def _per_block(problem: Problem, rows: Tensor) -> Tensor:
    """Return the largest absolute entry of every parameter's part of every row, (m, n)."""
    return torch.stack([rows[:, where].abs().amax(1) for where in problem.slices.values()], dim=1)


def gradient_noise(problem: Problem, gradient: Callable[[Tensor], Tensor], precision: torch.dtype) -> Tensor:
    """Return the size of the gradient's rounding errors, the largest of every parameter (n).

    Sixth differences over a tiny stretch cancel the smooth part and leave rounding, amplified by sqrt(924); the median of
    three random stretches, which start beside the point, discards one that a kink falls into.

    Source: Moré and Wild, Estimating computational noise, SIAM J. Sci. Comput. 33 (2011).
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    directions = torch.randn(3, problem.size, generator=generator, dtype=torch.float64).to(problem.theta)
    reach = torch.finfo(precision).eps ** 0.4
    samples = []
    for direction in directions / directions.norm(dim=1, keepdim=True):
        steps = reach * torch.arange(1, 8).to(direction)[:, None]
        gradients = gradient(problem.theta + steps * direction)
        for _ in range(6):
            gradients = gradients[1:] - gradients[:-1]
        samples.append(_per_block(problem, gradients)[0] / 924**0.5)
    return torch.stack(samples).median(dim=0).values


def _combine(odd: dict[int, Tensor], h: float) -> Tensor:
    total = WEIGHTS[0] * odd[1]
    for k in (2, 3, 4):
        total = total + WEIGHTS[k - 1] * odd[k]
    return total / h


def _gradients(problem: Problem, points: Tensor) -> Tensor:
    """Return the gradients (m, P) at points (m, P): the module's own parameters are moved, and the module is called as it is."""
    found = []
    for point in points:
        with placed((problem.own[n], x.contiguous()) for n, x in problem.unflatten(point).items()):
            found.append(torch.cat([g.reshape(-1) for g in problem.gradient()]))
    return torch.stack(found)
