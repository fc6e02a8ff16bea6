"""Rows of a check: the closed forms of one call, compared with every healthy reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hessiankit.curvature.dense import Hessian
from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.support.errors import HessiankitError, OutOfMemoryError
from hessiankit.tracing.derivative_tests import central_differences, generic
from hessiankit.verify.check_report import MODULE, ROUNDING, ZERO, CheckRow
from hessiankit.verify.comparison import FLOOR, SAFETY, BlockMaxima, RoundingNoise, perturbed
from hessiankit.verify.health import Health
from hessiankit.verify.probes import Probes, probe_directions, products_along
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import Outcome, Unsupported


def loss_row(loss: float, problem: Problem, rtol: float, method: str) -> CheckRow:
    """Compare the loss of a closed form with that of the module's own call."""
    error = abs(loss - problem.value) / max(abs(problem.value), torch.finfo(torch.float64).tiny)
    return CheckRow("loss", MODULE, error, error <= rtol, 0.0, method)


def gradient_errors(
    own: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    precision: torch.dtype,
    rtol: float,
    noise: Callable[[], Mapping[str, float]],
) -> dict[str, float]:
    """Return how far two gradients differ in each parameter, relative to its largest entry.

    It is 0 where one vanishes but for rounding; that noise (see ``RoundingNoise``) is measured only then.
    """
    sizes = {n: max(float(own[n].abs().max()), float(mine[n].abs().max())) for n in own}
    floor = FLOOR * torch.finfo(precision).eps * max(sizes.values())
    measured: Mapping[str, float] | None = None
    errors = {}
    for n, size in sizes.items():
        gap = float((mine[n] - own[n]).abs().max())
        errors[n] = gap / size if size else gap
        if errors[n] > rtol and size <= floor:
            measured = measured or noise()
            errors[n] = 0.0 if gap <= measured[n] else errors[n]
    return errors


@dataclass(frozen=True)
class DenseComparison:
    """The dense closed form and the references of one problem; without ``probes`` the results are whole matrices."""

    problem: Problem
    found: Hessian
    results: Mapping[str, Outcome | Unsupported]
    health: Mapping[str, Health]
    probes: Probes | None
    precision: torch.dtype
    noise: RoundingNoise
    rtol: float

    @property
    def _method(self) -> str:
        return str(self.precision).removeprefix("torch.")

    @cached_property
    def _healthy(self) -> dict[str, Outcome]:
        return {n: x for n, x in self.results.items() if isinstance(x, Outcome) and self.health[n].healthy}

    def _blocks(self, probes: Probes | None) -> BlockMaxima:
        return BlockMaxima(self.problem, probes, self.precision, self.noise)

    def pairs(self) -> Iterator[CheckRow]:
        """Compare the closed form with every healthy reference, block pair by block pair (i, j) with i before j."""
        for name, outcome in self._healthy.items():
            probes = outcome.probes or self.probes
            blocks, whole = self._blocks(probes), probes is None
            mine = self.found.matrix if probes is None else probes.V.to(self.found.matrix) @ self.found.matrix
            difference, scales = blocks.difference(mine, outcome.value.T if whole else outcome.value)
            relative = blocks.relative(difference, scales)
            allowed = torch.full_like(relative, self.rtol)
            own = torch.zeros_like(relative)
            if outcome.error is not None:
                own = blocks.largest(outcome.error.T if whole else outcome.error)
                allowed += own / scales.clamp_min(torch.finfo(scales.dtype).tiny)
            closed, reference = blocks.largest(mine), blocks.largest(outcome.value.T if whole else outcome.value)
            floor = FLOOR * blocks.eps * scales.amax()
            vanishing = (closed <= floor) & (reference <= torch.maximum(own, floor)) & ((relative == 0) | (relative > self.rtol))
            for a, i in enumerate(blocks.names):
                for b, j in enumerate(blocks.names):
                    if b >= a:  # both orders of the pair are compared; the worse one is reported
                        error = max(float(relative[a, b]), float(relative[b, a]))
                        passed = bool(relative[a, b] <= allowed[a, b]) and bool(relative[b, a] <= allowed[b, a])
                        zero = ""
                        if passed and all(bool(vanishing[at]) for at in ((a, b), (b, a))):
                            exact = not any(float(x[at]) for x in (closed, reference) for at in ((a, b), (b, a)))
                            zero, error = (ZERO if exact else ROUNDING), 0.0
                        yield CheckRow(f"{i} x {j}", name, error, passed, outcome.seconds, self._method, zero)

    # Loss, gradient, operator, diagonal -----------------------------------------------------------------------------------

    def same_call(self, seed: int) -> tuple[list[CheckRow], list[str]]:
        """Compare loss, gradient, operator and diagonal of the same call; return the rows, and why some are missing or failed.

        A function that refuses the call although there is a Hessian fails; one that only lacks the memory is left out.
        """
        rows, remarks = [loss_row(self.found.loss, self.problem, self.rtol, self._method)], []

        def compare(kind: str, words: str, make: Callable[[], Any], against: Callable[[Any, float], Iterator[CheckRow]]) -> None:
            start = time.perf_counter()
            try:
                found = make()
            except OutOfMemoryError as reason:
                remarks.append(f"no rows of {words}: {reason}")
            except HessiankitError as reason:
                remarks.append(f"hessian_{kind} refuses the same call: {reason}")
                rows.append(CheckRow(kind, MODULE, math.inf, False, time.perf_counter() - start, self._method))
            else:
                rows.extend(against(found, time.perf_counter() - start))

        def symmetric_operator() -> HessianOperator:
            operator = self._operator(self.problem)
            _ = operator.symmetry_error  # refuses what is not symmetric
            return operator

        def of_operator(operator: HessianOperator, seconds: float) -> Iterator[CheckRow]:
            gradients = list(self._gradient(operator, seconds))
            if not all(row.passed for row in gradients):
                remarks.extend(self._wrong_slope(operator.gradient))
            yield from gradients
            yield from self._products(operator, seed, seconds)

        compare("operator", "gradient and operator", symmetric_operator, of_operator)
        exact = lambda: hessian_diagonal(*self.problem.arguments, **self.problem.options, max_products=None).flat  # noqa: E731
        compare("diagonal", "the diagonal", exact, self._diagonal)
        return rows, remarks

    @staticmethod
    def _operator(problem: Problem) -> HessianOperator:
        return hessian_operator(*problem.arguments, **problem.options)

    def _gradient(self, operator: HessianOperator, seconds: float) -> Iterator[CheckRow]:
        """Compare with the gradient of the module's own call, each parameter against its largest entry."""
        own, mine = (self.problem.unflatten(g) for g in (self.problem.flat_gradient(), operator.gradient))
        for name, error in gradient_errors(own, mine, self.precision, self.rtol, self._gradient_noise).items():
            yield CheckRow(f"gradient: {name}", MODULE, error, error <= self.rtol, seconds, self._method)

    def _wrong_slope(self, mine: Tensor) -> Iterator[str]:
        """Yield a remark if torch's gradient is not the derivative of its own loss, and that of the closed form is."""
        problem, theta = self.problem, self.problem.theta.double()
        along = generic(theta, 0) * theta.abs().max()
        slope, unsure = central_differences(
            lambda at: (torch.tensor([problem.value_at(problem.unflatten(at[0].to(problem.dtype)))], dtype=torch.float64),),
            (theta,),
            (along,),
        )
        if not slope or slope[0] is None or problem.dtype != torch.float64:
            return
        terms = [gradient.double() * along for gradient in (problem.flat_gradient(), mine)]
        torch_s, closed = (float((t.sum() - slope[0]).abs() / t.abs().sum()) for t in terms)
        if torch_s > 10 * max(closed, unsure * float(slope[0].abs() / terms[0].abs().sum())):
            yield (
                f"torch's own gradient is {torch_s:.1e} off central differences of its loss along a generic direction, and that "
                f"of the closed form {closed:.1e}: a formula of torch has lost digits, which all that differentiate it lack"
            )

    def _gradient_noise(self) -> dict[str, float]:
        """The rounding noise of a gradient that vanishes (see ``RoundingNoise``)."""
        problem, generator = self.problem, torch.Generator().manual_seed(0)
        here, change = self._gradients(problem), torch.zeros_like(problem.theta)
        for _ in range(4):
            near = perturbed(problem, torch.finfo(self.precision).eps, generator)
            for before, after in zip(here, self._gradients(near), strict=True):
                change = torch.maximum(change, (after - before).abs())
        return {name: SAFETY * float(change[where].max()) for name, where in problem.slices.items()}

    def _gradients(self, problem: Problem) -> tuple[Tensor, Tensor]:
        with problem.at():
            made = self._operator(problem)
        return problem.flat_gradient(), made.gradient

    def _products(self, operator: HessianOperator, seed: int, seconds: float) -> Iterator[CheckRow]:
        """Compare products along generic directions with one healthy reference that gives every entry or these products."""
        exact = next(((n, x) for n, x in self._healthy.items() if x.error is None), None)
        if exact is None:
            return
        name, outcome = exact
        probes = self.probes or probe_directions(self.problem, 1, seed)
        blocks = self._blocks(probes)
        reference = outcome.value if self.probes is not None else products_along(outcome.value.T, None, probes)
        relative = blocks.relative(*blocks.difference((operator @ probes.V.T.to(operator.torch_dtype)).T, reference))
        for b, j in enumerate(blocks.along):
            error = float(relative[:, b].max())
            yield CheckRow(f"operator: {j}", name, error, error <= self.rtol, seconds, self._method)

    def _diagonal(self, diagonal: Tensor, seconds: float) -> Iterator[CheckRow]:
        """Compare the diagonal with a healthy reference's; with the dense closed form's where references gave products."""
        exact = next(((n, x) for n, x in self._healthy.items() if x.error is None), None)
        if exact is None:
            return
        name, matrix = ("hessian", self.found.matrix) if self.probes is not None else (exact[0], exact[1].value)
        blocks, slices = self._blocks(None), self.problem.slices
        gaps, sizes = (diagonal - matrix.diagonal()).abs(), torch.maximum(diagonal.abs(), matrix.diagonal().abs())
        largest = [torch.maximum(sizes[where].max(), matrix[where, where].abs().max()) for where in slices.values()]
        scales = torch.diag(torch.stack(largest)).clamp_min(torch.finfo(matrix.dtype).tiny)
        difference = torch.diag(torch.stack([gaps[where].max() for where in slices.values()]))
        relative = blocks.relative(difference, scales)
        for a, i in enumerate(slices):
            error = float(relative[a, a])
            yield CheckRow(f"diagonal: {i}", name, error, error <= self.rtol, seconds, self._method)
