"""Central differences of the gradient, with a step for every direction and an error estimate for every block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.verify.in_place import placed
from hessiankit.verify.probes import normal
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_base import Progress, Unsupported
from hessiankit.verify.traits import traits

WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""f'(x) = sum_k WEIGHTS[k - 1] (f(x + k h) - f(x - k h)) / h + O(h^8)."""

FIRST_STEP = {torch.float32: 2.0**-3, torch.float64: 2.0**-5}
HALVINGS = {torch.float32: 9, torch.float64: 19}
GOAL = {torch.float32: 1e-6, torch.float64: 1e-12}
LONG = 64
"""Length of all parameters beyond which the first step grows with it."""
UNRESOLVED = 1e-3
SAFETY = 4.0


def central(problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor, str]:
    """Return H v = (g(theta + h v) - g(theta - h v)) / 2h to eighth order, at the best of a ladder of steps.

    g is the module's own gradient, of the user's call, with the user's parameters moved in place. What torch's gradient holds
    constant (``detach``, ``torch.no_grad``) is held at the point.

    For each direction (scaled to unit length) the step is halved; half of the points are used again. The difference of
    two consecutive steps estimates the error of the smaller one, block by block: truncation falls 256 times a halving,
    rounding doubles, and the step between them is kept. Typical: 1e-12 relative in float64, 1e-5 in float32.

    A kink of the gradient (a ReLU whose pre-activation changes sign within the stencil, which reaches 4 h) makes that
    difference large and growing; the step is then halved until the stencil fits between the kinks. Where it never does,
    because a pre-activation is zero, the estimate stays large and says so.
    """
    precision = traits(problem).precision
    if precision not in HALVINGS:
        raise Unsupported("central-differences", f"the module computes in {precision}, too coarse for differences")
    lengths = V.norm(dim=1, keepdim=True)
    products: list[_Product] = []
    with problem.at():
        noise = gradient_noise(problem, precision)
        for unit in V / torch.where(lengths > 0, lengths, 1):
            products.append(_best_step(problem, unit, precision, noise))
            progress(len(products), len(V))
    if not products:
        return V, V, ""
    notes, kinks = [], [product.kink for product in products if product.kink]
    failures = sum(not product.resolved for product in products)
    if kinks:
        notes.append(f"kinks near the point: {len(kinks)} of {len(V)} directions needed steps down to {min(kinks):.0e}")
    if failures:
        notes.append(f"a kink at the point itself: along {failures} of {len(V)} directions the gradient has no derivative")
    values, errors = torch.stack([product.value for product in products]), torch.stack([product.error for product in products])
    return values * lengths, errors * lengths, "; ".join(notes)


class _Product(NamedTuple):
    """A product H v (P), its estimated error (P), the last step at which a kink was seen (0: none), and whether it converged."""

    value: Tensor
    error: Tensor
    kink: float
    resolved: bool


def _best_step(problem: Problem, unit: Tensor, precision: torch.dtype, noise: Tensor) -> _Product:
    """Halve the step along a unit vector until the goal is met or the error grows from rounding; each block keeps its best."""

    def odd_part(reach: float) -> Tensor:
        plus, minus = _gradients(problem, [problem.theta + reach * unit, problem.theta - reach * unit])
        return plus - minus

    tiny, threshold = torch.finfo(unit.dtype).tiny, 10 * torch.finfo(precision).eps ** 0.5
    h = FIRST_STEP[precision] * 2 ** int(math.log2(max(1.0, float(problem.theta.norm()) / LONG)))
    differences = [odd_part(k * h) for k in (1, 2, 3, 4)]
    best, errors = torch.zeros_like(unit), torch.full_like(noise, torch.inf)
    coarse_estimate, increases, has_kink, lowest, previous = combined(differences, h), 0, False, math.inf, math.inf
    for _ in range(HALVINGS[precision]):
        h /= 2
        differences = [odd_part(h), differences[0], odd_part(3 * h), differences[1]]
        fine_estimate = combined(differences, h)
        error = torch.maximum(problem.largest(coarse_estimate - fine_estimate), noise / h)
        for part, better in zip(problem.slices.values(), (error < errors).tolist(), strict=True):
            if better:
                best[part] = fine_estimate[part]
        errors = torch.minimum(errors, error)

        size = problem.largest(fine_estimate)
        relative = float((error / size.clamp_min(1e-4 * float(size.amax())).clamp_min(tiny)).amax())
        rounding = bool((error <= 8 * noise / h).all())
        # Truncation falls 256 times a halving; a large error that hardly falls is a kink.
        has_kink |= relative > previous / 4 and relative > threshold and not rounding
        increases = increases + 1 if relative > lowest else 0
        lowest, previous, coarse_estimate = min(relative, lowest), relative, fine_estimate
        if relative <= GOAL[precision] or rounding or (increases >= 2 and lowest < threshold):
            has_converged = True
            break
    else:
        has_converged = not lowest > UNRESOLVED
    spread = [e.expand(part.stop - part.start) for e, part in zip(errors, problem.slices.values(), strict=True)]
    return _Product(best, SAFETY * torch.cat(spread), h if has_kink and has_converged else 0.0, has_converged)


def gradient_noise(problem: Problem, precision: torch.dtype) -> Tensor:
    """Return the size of the gradient's rounding errors, the largest of every parameter (n).

    Sixth differences over a tiny stretch cancel the smooth part and leave rounding, amplified by sqrt(924); the median of
    three random stretches, which start beside the point, discards one that a kink falls into.

    Source: Moré and Wild, Estimating computational noise, SIAM J. Sci. Comput. 33 (2011).
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    reach = torch.finfo(precision).eps ** 0.4
    samples = []
    for _ in range(3):
        direction = normal((problem.size,), generator, problem.theta)
        direction /= direction.norm()
        gradients = _gradients(problem, [problem.theta + k * reach * direction for k in range(1, 8)])
        for _ in range(6):
            gradients = gradients[1:] - gradients[:-1]
        samples.append(problem.largest(gradients[0]) / 924**0.5)
    return torch.stack(samples).sort(dim=0).values[(len(samples) - 1) // 2]  # the median, which is not deterministic on CUDA


def combined(differences: Sequence[Tensor], h: float) -> Tensor:
    """Return the derivative from the differences f(x + k h) - f(x - k h), k = 1 to 4."""
    return sum((weight * part for weight, part in zip(WEIGHTS, differences, strict=True)), torch.zeros_like(differences[0])) / h


def _gradients(problem: Problem, points: Iterable[Tensor]) -> Tensor:
    """Return the gradients (m, P) at points (P): the module's own parameters are moved, and the module is called as it is."""
    gradients = []
    for point in points:
        with placed((problem.own[n], x.contiguous()) for n, x in problem.unflatten(point).items()):
            gradients.append(torch.cat([g.reshape(-1) for g in problem.gradient(problem.stopped)]))
    return torch.stack(gradients)
