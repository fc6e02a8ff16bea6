"""Comparison of Hessians block by block, each relative to its own largest entry, and the report's rows.

A *cell* (i, label) holds the entries of products H v that lie in parameter i, over the directions v of one label: a parameter, in
whole matrices and along directions on each parameter, or a group of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hessiankit.curvature.dense import hessian_of
from hessiankit.curvature.evaluation import Evaluation
from hessiankit.support.errors import HessiankitError
from hessiankit.verify.probes import Direction, normal
from hessiankit.verify.problem import Problem

Route: TypeAlias = Callable[[Problem, Tensor], Tensor]
"""A problem and directions (k, P) -> products (k, P)."""

HESSIANKIT = "hessiankit"
"""The name of the result under test."""

ULPS = 16.0
"""Size of the perturbation of the parameters, in units of the last place: roundings change, the Hessian does not."""

PERTURBATIONS, SAFETY = 2, 32.0
"""A block counts as zero up to this many times its largest change under rounding, of two perturbations."""

FLOOR = 45.0
"""Below FLOOR * eps times the largest entry of the whole (1e-14 in float64) a block may be a remainder of rounding."""

RESOLVED = 1e-2
"""A route resolves a block where its own error estimate stays below this share of the block's largest entry."""


# The rows of a report -----------------------------------------------------------------------------------------------------

FORMULAS = "vec_r"
"""The reference of rows that compare the formulas of the chapters with the fast path."""

DIFFERENCES = "differences of the loss"
"""The reference of the row that compares torch's gradient with the loss that it is the gradient of."""

MODULE = "the module"
"""The reference of rows that compare loss and gradient with those of the user's own call."""

ANALYTIC = "analytic"
"""The beginning of the names of rows about the user's own closed form."""

ZERO = "0 (exact)"
ROUNDING = "0 to rounding"

SAME_CALL = {
    "loss": "loss of the same call",
    "slope": "torch's gradient, along a generic direction",
    "gradient": "gradient of hessian_operator",
    "operator": "products of hessian_operator",
    "diagonal": "hessian_diagonal",
    ANALYTIC: "your closed form (analytic)",
    "wide twin": "the same block at widths above 16, four heads, W_O, gelu",
}
"""Rows other than of block pairs, by the beginning of their names: "gradient: W" is of the parameter W."""


@dataclass(frozen=True)
class CheckRow:
    """One comparison with one healthy reference: of a block pair, or of loss, gradient, operator or diagonal of the same call.

    Attributes:
        name: The block pair, "row parameter x column parameter"; or "loss", "slope" (torch's gradient, against differences of the
            loss), "gradient: parameter", "operator: parameter" (products of ``hessian_operator`` along directions on it),
            "diagonal: parameter" (``hessian_diagonal``), "analytic: row x column" (the user's own closed form), "wide twin:
            parameter" (of a block of the same structure at larger widths).
        reference: The reference.
        max_rel_error: Largest difference, relative to the largest entry of the block pair.
        passed: Whether the error lies within the tolerance plus the reference's estimate of its own error.
        seconds: Time of the reference for all block pairs together.
        method: The dtype of the comparison; for exact arithmetic see ``CheckReport.exact``.
        zero: ``ZERO`` where both sides are exactly 0; ``ROUNDING`` where the row passed, but the block has no relative error: the
            closed form is 0 up to rounding of the whole Hessian, and so is the reference, or it is within its own error.
            ``max_rel_error`` then is 0.
        note: Change that would make a wrong block of a user's closed form right, and the entry that differs most.
    """

    name: str
    reference: str
    max_rel_error: float
    passed: bool
    seconds: float
    method: str = "float64"
    zero: str = ""
    note: str = ""

    @property
    def shown(self) -> str:
        """The error as it is printed: a number, or that the block is 0."""
        return self.zero or f"{self.max_rel_error:.1e}{'' if self.passed else ' FAIL'}"

    @property
    def of_same_call(self) -> bool:
        """Whether the row is about loss, gradient, operator, diagonal or a user's closed form instead of hessiankit's blocks."""
        return self.name.partition(":")[0] in SAME_CALL


# Comparison ---------------------------------------------------------------------------------------------------------------


def perturbed(problem: Problem, eps: float, generator: torch.Generator) -> Problem:
    """Return the problem at parameters moved by ``ULPS`` units in the last place."""
    return problem.near({n: x * (1 + ULPS * eps * normal(x.shape, generator, x)) for n, x in problem.params.items()})


def closed_form(problem: Problem, V: Tensor) -> Tensor:
    """Return H V by the closed form, at the values of a problem."""
    matrix = hessian_of(Evaluation([problem.batch], None, None)).matrix
    return V.to(matrix) @ matrix


@dataclass(eq=False)
class RoundingNoise:
    """The size of rounding errors in each cell.

    A block that vanishes identically (the bias of the keys, say) is computed as eps times the terms that cancel. Where the
    parameters move by a few units in the last place, such a remainder changes wholly, a true entry by a few eps of itself,
    however small it is. So the largest change, times a safety, separates the two, without any scale from outside the block.
    """

    problem: Problem
    routes: Mapping[str, Route]  # whose products are compared; each leaves a remainder of its own
    precision: torch.dtype  # the lowest floating type that the module computes in
    directions: Mapping[str, Direction] | None = None  # a direction of each label; None: on each parameter
    _columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def eps(self) -> float:
        """The machine epsilon of the precision."""
        return float(torch.finfo(self.precision).eps)

    def floor(self, labels: Sequence[str]) -> Tensor:
        """Return the noise of the derivative of parameter i's gradient along a label, (n, labels).

        It is symmetric where the labels are the parameters.
        """
        new_labels = [label for label in labels if label not in self._columns]
        chunk = len(new_labels) if self.directions is None else 1  # of a large model one vector at a time
        for first in range(0, len(new_labels), chunk or 1):
            self._measure(new_labels[first : first + chunk])
        columns = torch.stack([self._columns[label] for label in labels], 1)
        is_symmetric = tuple(labels) == tuple(self.problem.params)
        return torch.maximum(columns, columns.T) if is_symmetric else columns

    def _measure(self, labels: Sequence[str]) -> None:
        """Measure the noise along some labels: every route once at each point."""
        directions = [
            self.directions[label] if self.directions is not None else Direction(label, (label,), 1) for label in labels
        ]
        V, generator = torch.stack([direction.vector(self.problem) for direction in directions]), torch.Generator().manual_seed(0)
        points = [self.problem, *(perturbed(self.problem, self.eps, generator) for _ in range(PERTURBATIONS))]
        change = self.problem.theta.new_zeros(len(self.problem.params), len(labels))
        for route in self.routes.values():
            with suppress(HessiankitError):  # without this route's remainder the comparison is stricter
                products, *variants = (route(point, V) for point in points)
                for variant in variants:
                    change = torch.maximum(change, self.problem.largest(variant - products).to(change))
        self._columns |= {label: SAFETY * change[:, at] for at, label in enumerate(labels)}


@dataclass(frozen=True)
class Worst:
    """The largest disagreement over all cells."""

    error: float  # relative to the largest entry of its cell
    share: float  # the largest difference anywhere, relative to the largest entry of the whole
    pair: tuple[str, str] | None  # (i, j) of the error: the derivative of parameter i's gradient along j

    def __str__(self) -> str:
        place = f", block {self.pair[0]} x {self.pair[1]}" if self.pair else ""
        return f"{self.share:.2g} of the largest entry{place}"


NO_COMPARISON = Worst(math.nan, math.nan, None)


class Gaps(NamedTuple):
    """Two results side by side, cell by cell: (n, labels) each."""

    labels: tuple[str, ...]
    gap: Tensor  # largest difference
    first: Tensor  # largest entry of the one
    second: Tensor  # and of the other
    slack: Tensor  # the two routes' own estimates of their errors, added up

    @property
    def scale(self) -> Tensor:
        """The largest entry of either."""
        return torch.maximum(self.first, self.second)

    @property
    def relative_slack(self) -> Tensor:
        """The routes' own errors, relative to the cell's scale."""
        return self.slack / self.scale.clamp_min(torch.finfo(self.slack.dtype).tiny)


def joined(parts: Sequence[Gaps]) -> Gaps:
    """Return the gaps of several directions, each column the largest of those with its label."""
    columns: dict[str, list[Tensor]] = {}
    for gaps in parts:
        for at, label in enumerate(gaps.labels):
            columns.setdefault(label, []).append(torch.stack([numbers[:, at] for numbers in gaps[1:]]))
    maxima = torch.stack([torch.stack(group).amax(0) for group in columns.values()], 2)  # (4, n, labels)
    return Gaps(tuple(columns), *maxima)


class Layout:
    """Maxima of products (k, P) over cells.

    Args:
        problem: Gives the parameters and their slices.
        owners: The label of each direction; None: the directions are all unit vectors, each owned by its parameter.
    """

    def __init__(self, problem: Problem, owners: Sequence[str] | None = None) -> None:
        self.problem = problem
        owners = owners or [name for name, x in problem.params.items() for _ in range(x.numel())]
        self.labels = tuple(dict.fromkeys(owners))
        places = ([k for k, owner in enumerate(owners) if owner == label] for label in self.labels)
        self._rows = [torch.tensor(rows, device=problem.device) for rows in places]

    def largest(self, products: Tensor) -> Tensor:
        """Return the largest absolute entry of every cell, (n, labels)."""
        return self._over(self.problem.largest(products))

    def gaps(self, a: Tensor, b: Tensor, *errors: Tensor | None) -> Gaps:
        """Return two results side by side, with the largest of their own errors in every cell, (n, labels)."""
        first, second = self.largest(a), self.largest(b)
        slack = sum((error for error in errors if error is not None), torch.zeros_like(first))
        return Gaps(self.labels, self.largest(a - b), first, second, slack)

    def asymmetry(self, products: Tensor, error: Tensor | None, V: Tensor | None) -> Gaps:
        """Return H beside its transpose; ``error`` (n, labels) is the largest of its own in each cell.

        Whole matrices are compared entry by entry. Along directions ``V``, each on one parameter, there are only the bilinear
        forms v_k^T H v_l, which are compared with |(H v_l)_i|, the length of the product restricted to v_k's parameter i (v_k has
        length one).
        """
        slack = torch.zeros_like(self.largest(products)) if error is None else error
        if V is None:
            scale, gap = self.largest(products), self.largest(products - products.T)
        else:
            forms = V.to(products) @ products.T  # (k, k), entry v_k^T H v_l
            gaps = (forms - forms.T).abs()
            gap = self._over(torch.stack([gaps[rows].amax(0) for rows in self._rows]))
            scale = self._over(torch.stack([products[:, part].norm(dim=1) for part in self.problem.slices.values()]))
            sizes = torch.tensor([x.numel() for x in self.problem.params.values()], device="cpu").to(products)
            slack = slack * sizes.sqrt()[:, None]  # |error_i| <= sqrt(n_i) times its largest entry
        return Gaps(self.labels, gap, scale, scale.T, slack + slack.T)

    def _over(self, per_direction: Tensor) -> Tensor:
        return torch.stack([per_direction[:, rows].amax(1) for rows in self._rows], dim=1)


class Judge:
    """Decides which differences of two results count.

    Differences are measured against the largest entry of their own cell. A block that vanishes identically is computed as what
    rounding leaves of it, of which a relative error has no meaning: a difference counts as zero in a cell below ``FLOOR * eps``
    of the largest entry of the whole, if it is no larger than ``noise`` says that rounding is in this very cell. A small block
    that is wrong is thus not mistaken for one.
    """

    def __init__(self, noise: RoundingNoise) -> None:
        self.noise, self.names, self.precision, self.eps = noise, tuple(noise.problem.params), noise.precision, noise.eps

    @property
    def small(self) -> float:
        """The share of the whole's largest entry below which central differences need not resolve a block."""
        return 1e-4 if self.eps < 1e-12 else 1e-2

    def relative(self, gaps: Gaps, *, admitted: bool = True) -> Tensor:
        """Return differences relative to the scale of each cell, (n, labels).

        It is 0 where the cell cannot be told from zero: below rounding, or small and below the error that the routes admit
        (unless not ``admitted``), with a difference no larger than that. Zero on one side only gives 1.
        """
        floor = FLOOR * self.eps * gaps.scale.amax()
        slack = gaps.slack if admitted else torch.zeros_like(gaps.slack)
        is_within = gaps.gap <= slack + floor
        limit = RESOLVED * self.small * gaps.scale.amax()
        is_unresolved = is_within & (slack > RESOLVED * gaps.scale) & (slack <= limit)
        is_zero = is_within & (gaps.scale <= floor)
        is_doubtful = (is_zero & ~is_unresolved & (gaps.gap > 0)).any(0)
        if bool(is_doubtful.any()):
            is_symmetric = gaps.labels == self.names
            labels = [label for label, doubt in zip(gaps.labels, is_doubtful.tolist(), strict=True) if is_symmetric or doubt]
            noise = torch.zeros_like(gaps.gap)
            noise[:, [gaps.labels.index(label) for label in labels]] = self.noise.floor(labels).to(noise)
            is_zero &= gaps.gap <= slack + noise
        return torch.where(is_zero | is_unresolved, 0.0, gaps.gap / gaps.scale.clamp_min(torch.finfo(gaps.gap.dtype).tiny))

    def within(self, gaps: Gaps, tolerance: float) -> bool:
        """Tell whether each difference lies within the tolerance plus the error estimates of both sides."""
        return bool((self.relative(gaps) <= tolerance + gaps.relative_slack).all())

    def worst(self, gaps: Gaps) -> Worst:
        """Return the largest relative difference, its cell, and the largest difference as a share of the whole."""
        relative = self.relative(gaps)
        if not bool(torch.isfinite(relative).all()):
            return Worst(math.inf, math.inf, self._pair(gaps, int((~torch.isfinite(relative)).flatten().nonzero()[0])))
        scale, at = float(gaps.scale.amax()), int(relative.argmax())
        share = float(gaps.gap.amax()) / scale if scale > 0 else 0.0
        return Worst(float(relative.flatten()[at]), share, self._pair(gaps, at))

    def _pair(self, gaps: Gaps, at: int) -> tuple[str, str]:
        return self.names[at // len(gaps.labels)], gaps.labels[at % len(gaps.labels)]

    def attainable(self, error: Tensor, scale: Tensor) -> float:
        """Return the relative error that a route estimates for itself; cells below ``small`` are measured against ``small``."""
        reference = scale.clamp_min(self.small * float(scale.amax())).clamp_min(torch.finfo(scale.dtype).tiny)
        return float((error / reference).amax())

    def rows(
        self, gaps: Gaps, rtol: float, reference: str, seconds: float, cells: Mapping[str, Sequence[tuple[int, int]]]
    ) -> Iterator[CheckRow]:
        """Yield the rows of a report: the closed form, the first of the two, against a reference, by the cells of each row."""
        relative = self.relative(gaps, admitted=False)
        is_within = relative <= rtol + gaps.relative_slack
        floor = FLOOR * self.eps * gaps.scale.amax()
        is_small = (gaps.first <= floor) & (gaps.second <= torch.maximum(gaps.slack, floor))
        is_zero = is_within & is_small & ((relative == 0) | (relative > rtol))
        for name, members in cells.items():
            at = tuple(torch.tensor(members, device="cpu").T)
            zero = ""
            if bool(is_zero[at].all()):
                zero = ROUNDING if bool(gaps.scale[at].any()) else ZERO
            errors = torch.where(is_zero[at], 0.0, relative[at])
            yield CheckRow(
                name, reference, float(errors.amax()), bool(is_within[at].all()), seconds, method_of(self.precision), zero
            )


def method_of(precision: torch.dtype) -> str:
    """Return how a report names a dtype: float64."""
    return str(precision).removeprefix("torch.")


# Which cells make a row ---------------------------------------------------------------------------------------------------


def cells_of_groups(gaps: Gaps, groups: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the cells of each group of parameters under each label, by the name of their row."""
    return {
        f"{group} x {label}": [(names.index(n), at) for n in members]
        for at, label in enumerate(gaps.labels)
        for group, members in groups.items()
    }


def cells_of_pairs(names: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return both cells of every block pair (i, j) with i before j, by the name of its row."""
    return {f"{i} x {j}": [(a, b), (b, a)] for a, i in enumerate(names) for b, j in enumerate(names) if b >= a}


def cells_of_labels(kind: str, gaps: Gaps) -> dict[str, list[tuple[int, int]]]:
    """Return the cells under each label, by the name of their row, "kind: label"."""
    return {f"{kind}: {label}": [(i, at) for i in range(len(gaps.gap))] for at, label in enumerate(gaps.labels)}
