"""Attempts to violate the bounds of ``hessiankit.bounds``: problems at every scale, ascents, and a referee in 80 digits.

Problem k of a campaign is drawn from ``seed + k`` alone, and so is all that is done to it: a violation found at problem seed s
comes back with ``attack(1, seed=s)``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hessiankit.curvature.dense import Hessian
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.files import WithDict
from hessiankit.support.progress import Tell
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.theory.bounding.a_priori import a_priori
from hessiankit.theory.bounding.bounds import BOUNDS, Bound, UndefinedBound
from hessiankit.theory.bounding.certified import frobenius_upper, gershgorin_upper, schatten_upper, verified_upper
from papers.curvature_gap.high_precision import norm_from_below
from papers.curvature_gap.loss_surface import loss_surface_bound
from papers.curvature_gap.problems import BoundProblem, draw_problem


@dataclass(frozen=True)
class Attempt:
    """One norm beside one bound.

    Attributes:
        bound: The name of the bound.
        true: The norm.
        limit: The bound.
        block: Rows and columns in the Hessian, and the right singular vector; None if the norm is not of a block.
    """

    bound: str
    true: float
    limit: float
    block: tuple[slice, slice, Tensor] | None = None

    @property
    def ratio(self) -> float:
        """true / limit, at most 1 unless the bound is violated."""
        return self.true / self.limit if self.limit else (float("inf") if self.true else 0.0)


@dataclass(frozen=True)
class Found:
    """The largest ratio of a bound, and the problem that has it."""

    ratio: float
    seed: int
    problem: str


@dataclass(frozen=True)
class Violation:
    """A bound that was exceeded.

    Attributes:
        bound: Its name.
        seed: Of the problem.
        problem: In words.
        ratio: true / bound in float64.
        refereed: The same in 80 digits; None if the norm is not of a block of the Hessian.
    """

    bound: str
    seed: int
    problem: str
    ratio: float
    refereed: float | None


@dataclass(repr=False)
class AttackReport(Printed, WithDict):
    """What a campaign found.

    Attributes:
        seed: The first problem's.
        asked: Problems asked for.
        problems: Problems tried.
        attempts: Norms compared with bounds.
        climbed: Steps of ascents.
        undefined: Problems of which a Hessian or a bound is not defined, such as rows of variance 0 with eps = 0.
        refereed: Excesses in float64 that were decided in 80 digits.
        largest: Bound -> its largest ratio; what the referee lowered counts as lowered.
        violations: Those that remain.
        seconds: Time.
        interrupted: Whether the campaign was cut short.
    """

    seed: int
    asked: int
    problems: int = 0
    attempts: int = 0
    climbed: int = 0
    undefined: int = 0
    refereed: int = 0
    largest: dict[str, Found] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def __bool__(self) -> bool:
        return not self.violations

    def _headline(self) -> str:
        found = f"VIOLATED: {len(self.violations)} times" if self.violations else "no bound is violated"
        done = f"{self.problems} of {self.asked} problems, interrupted" if self.interrupted else f"{self.problems} problems"
        return f"{found}; largest norm / bound of {done} ({self.attempts} comparisons, {self.climbed} steps of ascents)"

    def _parts(self) -> Iterator[Piece]:
        rows = [(name, f"{f.ratio:.10g}", str(f.seed), f.problem) for name, f in sorted(self.largest.items())]
        yield self._headline()
        yield table(("bound", "norm / bound", "seed", "problem"), rows, prose=("problem",), drop=("problem",))
        yield (f"{self.undefined} problems without a defined Hessian or bound; {self.refereed} excesses decided in 80 digits")
        yield from (
            f"VIOLATED: {v.bound} by {v.ratio:.6g} (80 digits: {v.refereed}), attack 1 --seed {v.seed}" for v in self.violations
        )


EXCESS, FLOOR = 1e-9, 1e-12
"""What a ratio may exceed 1 by, in float64, without a referee; and below what share of the Hessian a block is rounding."""
STEPS, ASCENTS, REGIONS, SURFACES = 8, 1 / 10, 1 / 4, 1 / 4
"""Steps of an ascent, and the shares of the problems that are climbed, tried over a ball, and tried along a segment."""
CERTIFIED: dict[str, Callable[[Tensor], float | None]] = {
    "certified, cholesky": verified_upper,
    "certified, schatten": schatten_upper,
    "certified, gershgorin": gershgorin_upper,
    "certified, frobenius": frobenius_upper,
}


def valid_bounds() -> dict[str, Bound]:
    """Return the bounds in ``BOUNDS`` that say something of a loss, not of its float64 Hessian."""
    return {name: one for name, one in BOUNDS.items() if not one.of_matrix}


def attack(n: int, *, seed: int = 0, steps: int = STEPS, tell: Tell | None = None) -> AttackReport:
    """Try to violate every valid bound, on n problems; an interrupt keeps what is found.

    Args:
        n: Problems.
        seed: Of the first problem; the k-th has ``seed + k``.
        steps: Steps of an ascent.
        tell: Called with (what, problems done, problems in all).

    Raises:
        InputError: If n is below 1.
    """
    if n < 1:
        raise InputError(f"attack: {n} problems; expected 1 or more")
    report, start = AttackReport(seed, n), time.perf_counter()
    try:
        for k in range(n):
            _try(report, seed + k, steps)
            report.problems += 1
            if tell is not None:
                tell(f"{len(report.violations)} violations", k + 1, n)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.perf_counter() - start
    return report


def ascend(problem: BoundProblem, bound: Callable[[BoundProblem], float], steps: int, seed: int = 0) -> float:
    """Return the largest true / bound of a random ascent over parameters and input, which the problem is left at."""
    draw = torch.Generator().manual_seed(seed)
    moved = [problem.x, *(p.data for p in problem.module.parameters())]
    best, size = _ratio(problem, bound), 0.5
    for _ in range(steps):
        kept = [value.clone() for value in moved]
        for value in moved:
            value.add_(size * value.abs().mean() * torch.randn(value.shape, generator=draw, dtype=value.dtype))
        ratio = _ratio(problem, bound)
        if ratio > best:
            best, size = ratio, min(2 * size, 2.0)
        else:
            size = max(0.7 * size, 1e-3)
            for value, before in zip(moved, kept, strict=True):
                value.copy_(before)
    return best


def _ratio(problem: BoundProblem, bound: Callable[[BoundProblem], float]) -> float:
    """Return true / bound, or 0 where either is not defined."""
    try:
        true, limit = problem.hessian.spectral_norm(), bound(problem)
    except HessiankitError:
        return 0.0
    return true / limit if limit else 0.0


def _try(report: AttackReport, seed: int, steps: int) -> None:
    problem, choose = draw_problem(seed), random.Random(f"attack {seed}")
    rounds: list[Callable[[], Iterator[Attempt]]] = [lambda: _at_the_point(problem)]
    if choose.random() < REGIONS:
        rounds.append(lambda: _over_a_ball(problem, choose))
    if choose.random() < SURFACES and not problem.kinked:
        rounds.append(lambda: _along_a_segment(problem, choose))
    for tried in rounds:
        _judge_all(report, problem, tried)
    if choose.random() < ASCENTS:
        climbed = valid_bounds()[choose.choice(sorted(valid_bounds()))]
        ascend(problem, lambda p: climbed.norms(p.at)[0], steps, seed)
        report.climbed += steps
        _judge_all(report, problem, lambda: _at_the_point(problem))


def _judge_all(report: AttackReport, problem: BoundProblem, tried: Callable[[], Iterator[Attempt]]) -> None:
    """Judge attempts at once, before the problem's parameters move on."""
    try:
        for attempt in tried():
            _judge(report, problem, attempt)
    except HessiankitError:
        report.undefined += 1


def _judge(report: AttackReport, problem: BoundProblem, attempt: Attempt) -> None:
    report.attempts += 1
    words = f"{problem.name}, {problem.regime}, {problem.loss}, L = {len(problem.x)}"
    ratio, exact = attempt.ratio, None
    if ratio > 1 + EXCESS and attempt.block is not None:
        report.refereed += 1
        ratio = exact = replace(attempt, true=norm_from_below(problem, *attempt.block)).ratio
    if ratio > 1 + EXCESS:
        report.violations.append(Violation(attempt.bound, problem.seed, words, attempt.ratio, exact))
    if attempt.bound not in report.largest or ratio > report.largest[attempt.bound].ratio:
        report.largest[attempt.bound] = Found(ratio, problem.seed, words)


def _at_the_point(problem: BoundProblem) -> Iterator[Attempt]:
    """The Hessian and its blocks beside the bounds that hold at one point."""
    H = problem.hessian
    matrix = H.matrix
    whole = slice(0, matrix.shape[0])
    true, vector = _top(matrix)
    for name, certified in CERTIFIED.items():
        limit = certified(matrix)
        if limit is not None:
            yield Attempt(name, true, limit)  # on the float64 matrix alone: nothing to decide in more digits
    for one in valid_bounds().values():
        try:
            limit, pairs = one.norms(problem.at)
        except UndefinedBound:
            continue
        yield Attempt(one.title, true, limit, (whole, whole, vector))
        yield from _worst_block(H, true, f"{one.title}, blocks", pairs)


def _worst_block(H: Hessian, whole: float, name: str, limits: Mapping[tuple[str, str], float]) -> Iterator[Attempt]:
    """The block that comes nearest to its bound, rounding aside."""
    found: Attempt | None = None
    for i, j in H.pairs():
        limit = limits.get((i, j), limits.get((j, i)))
        if limit is None:
            continue
        block = H.block(i, j)
        size, above = float(block.norm()), limit + FLOOR * whole
        if size == 0 or (found is not None and size < found.ratio * above):
            continue  # not even its Frobenius norm comes as near
        _, s, Vh = torch.linalg.svd(block, full_matrices=False)
        attempt = Attempt(name, float(s[0]), above, (H.slices[i], H.slices[j], Vh[0]))
        found = attempt if found is None or attempt.ratio > found.ratio else found
    if found is not None:
        yield found


def _over_a_ball(problem: BoundProblem, choose: random.Random) -> Iterator[Attempt]:
    """Points of a ball of parameters, on its surface as a rule, beside the bound of the ball."""
    radius = {n: float(p.detach().norm()) * 10 ** choose.uniform(-4, 0) for n, p in problem.module.named_parameters()}
    limit = a_priori(problem.module, problem.x, problem.target, loss=problem.loss, radius=radius).whole
    centre = {name: p.detach().clone() for name, p in problem.module.named_parameters()}
    draw = torch.Generator().manual_seed(problem.seed)
    try:
        for outward in (True, False, False):
            with torch.no_grad():
                for name, p in problem.module.named_parameters():
                    step = centre[name] if outward else torch.randn(p.shape, generator=draw, dtype=p.dtype)
                    p.copy_(centre[name] + radius[name] * step / step.norm().clamp_min(1e-300))
            matrix = problem.hessian.matrix
            true, vector = _top(matrix)
            whole = slice(0, matrix.shape[0])
            yield Attempt("a priori, over a ball", true, limit * (1 + FLOOR), (whole, whole, vector))
    finally:
        with torch.no_grad():
            for name, p in problem.module.named_parameters():
                p.copy_(centre[name])


def _along_a_segment(problem: BoundProblem, choose: random.Random) -> Iterator[Attempt]:
    """The change of the loss by one more sample beside the repaired Theorem 7."""
    draw = torch.Generator().manual_seed(problem.seed)
    size = 10 ** choose.uniform(-4, 0)
    w = {
        name: p.detach() * (1 + size * torch.randn(p.shape, generator=draw, dtype=p.dtype))
        for name, p in problem.module.named_parameters()
    }
    x = torch.stack([problem.x * (1 + 0.3 * torch.randn(problem.x.shape, generator=draw, dtype=problem.x.dtype)), problem.x])
    t = torch.stack([problem.target, problem.target.flip(0)])
    for step in loss_surface_bound(problem.module, x, t, w, loss=problem.loss).steps:
        yield Attempt("loss surface", step.change, step.bound)


def _top(matrix: Tensor) -> tuple[float, Tensor]:
    """Return the norm of a symmetric matrix and the eigenvector that belongs to it."""
    values, vectors = torch.linalg.eigh(matrix)
    k = int(values.abs().argmax())
    return float(values[k].abs()), vectors[:, k]
