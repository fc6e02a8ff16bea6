"""Exact identities of gradient and Hessian that the structure of a module implies, and whether they hold."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, Table, table
from hessiankit.verify.in_place import converted, placed
from hessiankit.verify.problem import Problem, cast
from hessiankit.verify.symmetries import Motion, Symmetry, generic_point, symmetries
from hessiankit.verify.traits import traits


@dataclass(frozen=True)
class IdentityRow:
    """One identity.

    Attributes:
        family: "linear maps", "logits", "norm scale", "row mean" or "no effect".
        name: The parameters A that move, and after ``|`` those, C, that move against them.
        statement: The identity; g is the gradient of the parameters in question.
        max_rel_error: Largest violation, relative to the size of the terms that must cancel in its block.
        passed: Whether the error lies within the tolerance.
    """

    family: str
    name: str
    statement: str
    max_rel_error: float
    passed: bool


@dataclass(frozen=True, repr=False)
class IdentityReport(Printed, WithDict):
    """Result of :func:`identities`. True when every identity holds; also where none applies, see ``rows``.

    Attributes:
        rows: One for each structure of the module that implies an identity.
        rtol: The tolerance.
        seconds: Time taken, the Hessian's own not included.
    """

    rows: tuple[IdentityRow, ...] = ()
    rtol: float = 1e-10
    seconds: float = 0.0

    _derived = ("passed", "verdict")

    @property
    def passed(self) -> bool:
        """Whether every identity holds."""
        return all(row.passed for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def max_rel_error(self) -> float:
        """The largest error of all rows; 0 where there is none."""
        return max((row.max_rel_error for row in self.rows), default=0.0)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if not self.rows:
            return "no identity applies to this module"
        failures = [row for row in self.rows if not row.passed]
        if failures:
            worst = max(failures, key=lambda row: row.max_rel_error)
            place = f"{worst.family} of {worst.name}: {worst.max_rel_error:.1e}"
            return f"FAILED: {len(failures)} of {len(self.rows)} identities; the worst is {place} (tolerance {self.rtol:.0e})"
        return f"PASSED: {len(self.rows)} identities hold to {self.max_rel_error:.1e} (tolerance {self.rtol:.0e})"

    def table_of_rows(self) -> Table:
        """Return one row an identity: family, parameters, statement, error."""
        return table(
            ("identity", "parameters", "statement", "error"),
            ((r.family, r.name, r.statement, f"{r.max_rel_error:.1e}{'' if r.passed else ' FAIL'}") for r in self.rows),
            left=3,
            names=[name for row in self.rows for name in re.split(r", | \| ", row.name)],
            prose=("parameters", "statement"),
            drop=("statement",),
            rank=[row.max_rel_error if row.passed else math.inf for row in self.rows],
            ranked="largest error",
        )

    def _headline(self) -> str:
        return self.verdict

    def _parts(self) -> Iterator[Piece]:
        yield self.table_of_rows()
        yield self.verdict


TERM_ROUNDING = 5000.0
"""A block whose terms all lie below TERM_ROUNDING * eps of the largest of the whole (1e-12 in float64) is not compared."""

STEPS = (0.2, -0.37)
"""Distances along a symmetry at which the loss is compared: from the parameters, and from a point near them."""


def identities(problem: Problem, H: Tensor, *, rtol: float) -> IdentityReport:
    """Check a problem's gradient and a Hessian of it (P, P), however computed, against the exact symmetries of the loss.

    Where the loss does not change along theta -> exp(t B) theta, one and two derivatives in t and theta give, exactly,

        g^T B theta = 0    and    H (B theta) + B^T g = 0.

    The symmetries are those that the gradient shows at generic points (:mod:`hessiankit.verify.symmetries`). Each is confirmed on
    values of the loss, at the parameters and at a random point near them, and then tested with a random B and, where it is one of
    them, with Euler's B = I.

        linear maps  columns A that only linear maps C read: (A G, G^-1 C). Any G per head for W_V and W_O; G diagonal across a
                     ReLU, a gate or a norm's gain. B = I is Euler's <W_1, g> = <W_2, g>, <W_V, g> = <W_O, g>, and <gamma, g> =
                     <W_Q, g> + <W_K, g> + <W_V, g> (for the homogeneous parts of The Sharpness Disparity Principle, arXiv
                     2502.19002, Section 4; not in the paper)
        logits       queries A and keys C of a head that meet only each other: (A G, C G^-T), so <W_Q, g> = <W_K, g>; D diagonal
                     between the gains of a query and a key norm
        norm scale   weights w into a norm with eps = 0: <w, g> = 0, H w = -g on w, 0 on all other parameters
                     (for the QKV norms of HybridNorm, arXiv 2503.04598, Theorem A.3; not in the paper)
        row mean     rows that only LayerNorms or a softmax read: u (x) 1 is orthogonal to g and in the kernel of H, as is
                     b_2 -> b_2 + c 1 before a LayerNorm
        no effect    biases such as the keys', with neither rotary positions nor a key norm: g = 0, zero rows and columns of H

    They are necessary, not sufficient: a wrong second derivative of the softmax, say, leaves the gauge of Q K^T. None are looked
    for where the module computes in a lower precision than that of its parameters, or stops a gradient (``detach``).

    >>> from torch import nn
    >>> from hessiankit import hessian
    >>> _ = torch.manual_seed(0)
    >>> mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    >>> x, y = torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    >>> report = identities(Problem(mlp, x, y), hessian(mlp, x, y).matrix, rtol=1e-10)
    >>> bool(report), [(row.family, row.name) for row in report.rows]
    (True, [('linear maps', '0.weight, 0.bias | 2.weight')])
    """
    start = time.perf_counter()
    module_traits = traits(problem)
    if module_traits.precision != problem.dtype or module_traits.stopped_by:
        return IdentityReport((), rtol, time.perf_counter() - start)
    invariances = _confirmed_in_double(problem, torch.Generator().manual_seed(0))
    g = problem.flat_gradient()
    errors = _errors(problem, H, g, [motion for symmetry in invariances for motion in symmetry.motions])
    rows, at = [], 0
    for symmetry in invariances:
        error = float(errors[at : at + len(symmetry.motions)].amax())  # NaN where one is
        at += len(symmetry.motions)
        rows.append(IdentityRow(symmetry.family, symmetry.name, symmetry.statement, error, error <= rtol))
    return IdentityReport(tuple(rows), rtol, time.perf_counter() - start)


def _confirmed_in_double(problem: Problem, rng: torch.Generator) -> list[Symmetry]:
    """Return the symmetries of a problem in float64; none where the module cannot be evaluated in it."""
    with converted((problem.module, problem.loss), torch.float64):
        inputs, target = (cast(x, torch.float64) for x in (problem.inputs, problem.target))
        params = {name: value.double() for name, value in problem.params.items()}
        double = Problem(problem.module, inputs, target, problem.loss, params)
        try:
            return confirmed(double, symmetries(double, rng), rng)
        except RuntimeError:
            return []


def confirmed(problem: Problem, candidates: Sequence[Symmetry], rng: torch.Generator) -> list[Symmetry]:
    """Keep the symmetries along which the loss is constant in float64, at the parameters and at a generic point near them."""

    def loss(point: Mapping[str, Tensor]) -> float:
        with placed((problem.own[name], value) for name, value in point.items()):
            return float(problem.call().detach())

    points = (problem.params, generic_point(problem.params, rng))
    with problem.at():
        values = [loss(point) for point in points]
        return [
            symmetry
            for symmetry in candidates
            if all(
                abs(loss(symmetry.motions[0].moved(point, t)) - value) <= 1e-12 * abs(value)
                for point, value, t in zip(points, values, STEPS, strict=True)
            )
        ]


def _errors(problem: Problem, H: Tensor, g: Tensor, motions: Sequence[Motion]) -> Tensor:
    """Return the largest violation of both identities for each motion, relative to the terms that must cancel."""
    if not motions:
        return H.new_zeros(0)
    eps = torch.finfo(problem.dtype).eps
    theta, gradient = ({n: x.double() for n, x in values.items()} for values in (problem.params, problem.unflatten(g)))
    g = g.to(H)  # a Hessian has float32 where the gradient is of half precision
    X = torch.stack([_flat(theta, m.velocity(theta)) for m in motions], 1).to(H)  # (P, motions)
    transposes = torch.stack([_flat(theta, m.transposed(gradient)) for m in motions], 1).to(H)
    sized = torch.cat([X, problem.theta[:, None].to(H)], 1).abs()
    residuals, terms, largest, slope = [], [], H.new_zeros(()), H.new_zeros(())
    for rows in problem.slices.values():
        part = H[rows].abs()  # a copy, so block by block
        products = part @ sized
        residuals.append((H[rows] @ X + transposes[rows]).abs().amax(0))
        terms.append(torch.maximum(products[:, :-1], transposes[rows].abs()).amax(0))
        largest = torch.maximum(largest, part.amax())
        slope = torch.maximum(slope, products[:, -1].amax())  # the size of the terms of the gradient, also where it vanishes
    floor = TERM_ROUNDING * eps * torch.maximum(largest * X.abs().amax(0), transposes.abs().amax(0))
    blocks = [_relative(r, t, floor) for r, t in zip(residuals, terms, strict=True)]
    flat = TERM_ROUNDING * eps * torch.maximum(slope, g.abs().amax()) * X.abs().sum(0)
    return torch.stack([_relative((g @ X).abs(), g.abs() @ X.abs(), flat), *blocks]).amax(0)


def _relative(difference: Tensor, scale: Tensor, floor: Tensor) -> Tensor:
    is_zero = (scale <= floor) & (difference <= floor)
    return torch.where(is_zero, 0.0, difference / scale.clamp_min(torch.finfo(scale.dtype).tiny))


def _flat(theta: dict[str, Tensor], parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([(parts[n] if n in parts else torch.zeros_like(x)).reshape(-1) for n, x in theta.items()])
