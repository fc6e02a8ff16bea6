"""Rows of a check on the other results of the same call: loss, gradient, products of the operator, diagonal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from hessiankit.curvature.dense import Hessian
from hessiankit.curvature.diagonal import diagonal_of
from hessiankit.curvature.operator import HessianOperator
from hessiankit.support.errors import HessiankitError, OutOfMemoryError
from hessiankit.tracing.derivative_tests import FEWER_WEIGHTS, STEPS, estimates, generic
from hessiankit.verify.comparison import (
    DIFFERENCES,
    HESSIANKIT,
    MODULE,
    ULPS,
    CheckRow,
    Gaps,
    Judge,
    Layout,
    RoundingNoise,
    cells_of_labels,
    method_of,
)
from hessiankit.verify.probes import Direction, Probes, probe_directions
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome
from hessiankit.verify.traits import traits

T = TypeVar("T")

CHUNK = 24
"""Parameters whose products are computed in one call."""
ENTRIES = 2
"""Entries of each parameter at which the diagonal of a large module is compared, each by a product along a unit vector."""
DIAGONAL = 100_000
"""Number of parameters beyond which the exact diagonal, which forms the curvature between activations, is left out."""


SINGLE = 0.05
"""Error of a slope in float32, of 240 checks of small networks with kinks: 0.031 at most; a wrong formula is off by tenths."""


class SameCall:
    """Comparisons of one problem's other results with those of the module and of references.

    The groups are parameters by the name of the row whose worst counts; ``healthy`` are results of references without an error
    of their own. The remarks say why rows are missing or failed.
    """

    def __init__(self, judge: Judge, rtol: float, groups: Mapping[str, Sequence[str]], healthy: Mapping[str, Outcome]) -> None:
        self.problem, self.judge, self.rtol, self.groups, self.healthy = judge.noise.problem, judge, rtol, groups, healthy
        self.rows, self.remarks = list[CheckRow](), list[str]()

    def of_matrix(self, hessian: Hessian, probes: Probes | None, seed: int) -> None:
        """Compare loss, operator and diagonal of the call that gave a matrix; results of references are along ``probes``."""
        reference, exact = next(((n, x.value) for n, x in self.healthy.items()), ("", None))
        self.loss(hessian.loss)
        self.slope()
        operator, seconds = self._attempt("operator", "gradient and operator", self._symmetric_operator)
        if operator is not None:
            self.rows += self.gradient(operator.gradient, seconds)
            if exact is not None:
                test_probes = probes or probe_directions(self.problem, 1, seed)
                products = (operator @ test_probes.V.T.to(operator.torch_dtype)).T
                gaps = Layout(self.problem, test_probes.owners).gaps(
                    products, exact if probes else test_probes.V.to(exact) @ exact.T
                )
                self.rows += self.judge.rows(gaps, self.rtol, reference, seconds, cells_of_labels("operator", gaps))
        diagonal, seconds = self._attempt("diagonal", "the diagonal", self.exact_diagonal)
        if diagonal is not None and exact is not None:  # where references gave products, the dense closed form is compared with
            name, matrix = (reference, exact) if probes is None else ("hessian", hessian.matrix)
            self.rows += self.diagonal(diagonal, [(torch.arange(len(matrix), device=matrix.device), matrix)], name, seconds)

    def of_operator(self, operator: HessianOperator) -> None:
        """Compare loss, gradient and diagonal of the call that gave an operator."""
        self.loss(operator.loss)
        self.slope()
        self.rows += self.gradient(operator.gradient, 0.0)
        exact = next(iter(self.healthy), None)
        if self.problem.size > DIAGONAL:
            self.remarks.append(f", hessian_diagonal not beyond {DIAGONAL:,}")
        elif exact is not None:
            start = time.perf_counter()
            diagonal = self.exact_diagonal()
            self.rows += self.diagonal(diagonal, self._columns(exact), exact, time.perf_counter() - start)

    def _row(self, name: str, error: float, seconds: float) -> CheckRow:
        return CheckRow(name, MODULE, error, error <= self.rtol, seconds, method_of(self.judge.precision))

    def loss(self, loss: float) -> None:
        """Compare the loss of a closed form with that of the module's own call."""
        value = self.problem.value
        self.rows.append(self._row("loss", abs(loss - value) / max(abs(value), torch.finfo(torch.float64).tiny), 0.0))

    def gradient(self, gradient: Tensor, seconds: float) -> Iterator[CheckRow]:
        """Compare a gradient (P) with that of the module's own call: two results along one direction, judged as any other."""
        problem, names = self.problem, list(self.problem.params)
        routes = {MODULE: lambda at, _: at.flat_gradient()[None], HESSIANKIT: lambda at, _: gradient_by_operator(at)[None]}
        direction = Direction("gradient", tuple(names), 0)
        judge = Judge(RoundingNoise(problem, routes, self.judge.precision, {direction.label: direction}))
        gaps = Layout(problem, [direction.label]).gaps(gradient[None], problem.flat_gradient()[None])
        cells = {f"gradient: {group}": [(names.index(n), 0) for n in members] for group, members in self.groups.items()}
        yield from judge.rows(gaps, self.rtol, MODULE, seconds, cells)

    def slope(self) -> None:
        """Compare torch's gradient with central differences of its own loss along a generic direction.

        What torch holds constant, and the row of a padding token, are held. In half precision differences have no digits. In
        single precision no step is small enough to lie between the kinks of a ReLU and above rounding: :data:`SINGLE` is allowed.
        """
        problem, module_traits, start = self.problem, traits(self.problem), time.perf_counter()
        if module_traits.precision not in (torch.float32, torch.float64):
            return
        direction = {name: generic(x, k) * x.abs().max() for k, (name, x) in enumerate(problem.params.items())}
        for name, parameter in problem.own.items():
            if id(parameter) in module_traits.padding_tokens:
                direction[name][module_traits.padding_tokens[id(parameter)]] = 0

        def loss(values: tuple[Tensor, ...]) -> tuple[Tensor]:
            with problem.at(dict(zip(problem.params, values, strict=True))):
                return (problem.call(problem.stopped).detach().double().cpu().reshape(1),)

        point, tangents = tuple(problem.params.values()), tuple(direction.values())
        terms = (problem.flat_gradient() * torch.cat([t.reshape(-1) for t in tangents])).double().cpu()
        size, rounding = float(terms.abs().sum()), ULPS * torch.finfo(module_traits.precision).eps * abs(problem.value)
        values = [(step, estimates(loss, point, tangents, (step,), FEWER_WEIGHTS)) for step in STEPS]
        slopes = [(step, float(result[0][0])) for step, result in values if result and result[0][0] is not None]
        candidates = [(abs(y - x) + rounding / step, y) for (_, x), (step, y) in pairwise(slopes)]  # truncation, and rounding
        if not candidates or not size:
            return
        uncertainty, slope = min(candidates)
        error, uncertainty = abs(float(terms.sum()) - slope) / size, uncertainty / size
        is_right = not error > max(self.rtol if module_traits.precision is torch.float64 else SINGLE, 3 * uncertainty)
        self.rows.append(
            CheckRow("slope", DIFFERENCES, error, is_right, time.perf_counter() - start, method_of(module_traits.precision))
        )
        if not is_right:
            self.remarks.append(
                f"torch's own gradient is {error:.1e} off central differences of its loss (known to {uncertainty:.1e}): a "
                "formula of torch is wrong or has lost digits, or a backward is no derivative of its forward; all that "
                "differentiate it share this"
            )

    def _columns(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``ENTRIES`` random places (m) of each of some parameters, and a reference's products along those unit vectors."""
        generator, parts = torch.Generator().manual_seed(0), list(self.problem.slices.values())
        entries = [w.start + torch.randint(w.stop - w.start, (ENTRIES,), generator=generator, device="cpu") for w in parts]
        for first in range(0, len(entries), CHUNK):
            at = torch.cat(entries[first : first + CHUNK]).to(self.problem.device)
            units = self.problem.theta.new_zeros(len(at), self.problem.size)
            units[torch.arange(len(at), device=at.device), at] = 1
            yield at, REFERENCES[name].products(self.problem, units)

    def diagonal(
        self, diagonal: Tensor, columns: Iterable[tuple[Tensor, Tensor]], name: str, seconds: float
    ) -> Iterator[CheckRow]:
        """Compare a diagonal (P) with columns (m, P) of a Hessian at some places (m).

        The difference in each parameter is measured against its diagonal block, beside the noise of the label that it belongs to.
        """
        names = list(self.problem.slices)
        gap, scale = (torch.zeros(len(names), len(self.groups), dtype=torch.float64, device="cpu") for _ in range(2))
        label = {n: b for b, members in enumerate(self.groups.values()) for n in members}
        for at, H in columns:
            differences = (diagonal[at] - H[torch.arange(len(at), device=at.device), at]).abs()
            for a, (n, part) in enumerate(self.problem.slices.items()):
                is_member = (at >= part.start) & (at < part.stop)
                if bool(is_member.any()):
                    gap[a, label[n]] = float(differences[is_member].max())
                    scale[a, label[n]] = max(float(diagonal[part].abs().max()), float(H[is_member, part].abs().max()))
        cells = {
            f"diagonal: {group}": [(names.index(n), b) for n in members] for b, (group, members) in enumerate(self.groups.items())
        }
        gaps = Gaps(tuple(self.groups), gap, scale, scale, torch.zeros_like(gap))
        yield from self.judge.rows(gaps, self.rtol, name, seconds, cells)

    def _attempt(self, kind: str, words: str, make: Callable[[], T]) -> tuple[T | None, float]:
        """Return a function's result and its time, or None.

        A function that refuses the call although there is a Hessian is a failed row; one that only lacks the memory is a remark.
        """
        start = time.perf_counter()
        try:
            return make(), time.perf_counter() - start
        except OutOfMemoryError as reason:
            self.remarks.append(f"no rows of {words}: {reason}")
        except HessiankitError as reason:
            self.rows.append(self._row(kind, math.inf, time.perf_counter() - start))
            self.remarks.append(f"hessian_{kind} refuses the same call: {reason}")
        return None, 0.0

    def _symmetric_operator(self) -> HessianOperator:
        operator = HessianOperator.of([self.problem.batch])
        _ = operator.symmetry_error  # refuses what is not symmetric
        return operator

    def exact_diagonal(self) -> Tensor:
        """Return the closed form of the diagonal, (P)."""
        return diagonal_of([self.problem.batch], "hessian", "exact", max_products=None).flat


def gradient_by_operator(problem: Problem) -> Tensor:
    """Return the gradient (P) that the operator of a problem carries, at the values of the problem."""
    return HessianOperator.of([problem.batch], block_size=1).gradient


def by_operator(problem: Problem, V: Tensor) -> Tensor:
    """Return H V (k, P) by the operator, at the values of a problem."""
    return (HessianOperator.of([problem.batch], block_size=1) @ V.T).T
