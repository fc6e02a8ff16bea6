"""Bounds from a problem's own intermediate values: the curvature of a loss site by site, each with its sign.

With J_v the Jacobian of site v's inputs with respect to the parameters and K_v = lambda_v . D^2 phi_v its contracted second
derivative,

    H = sum_v J_v^T K_v J_v,      K_v = K_v^+ - K_v^-   (both positive semidefinite),

so that -N <= H <= P in the order of quadratic forms, with P = sum_v J_v^T K_v^+ J_v and N = sum_v J_v^T K_v^- J_v, and

    ||H||_2 <= max(lambda_max(P), lambda_max(N)),      ||H_ij||_2 <= (||P_ii|| ||P_jj||)^{1/2} + (||N_ii|| ||N_jj||)^{1/2} .

A product of two moving factors contributes 2 a^T B b, and for every c > 0 that is |c^{1/2} a' + c^{-1/2} b'|^2/2 minus the same
with the other sign; c is chosen so that both sides have the same norm. All from the last sum to the loss is taken
as one site, because the Gauss-Newton part and the last norm's curvature cancel there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import torch
from scipy.sparse import bmat, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from hessiankit.primitives.linear import Linear, MatMul, Multiply
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.loss_trace import loss_trace
from hessiankit.support.errors import InputError
from hessiankit.theory.bounding.certified import largest_eigenvalue, spectral_norm
from hessiankit.tracing.trace import Application, Trace, accumulate

LARGEST = 3000
"""Entries of the inputs of a site whose curvature is neither row by row nor a product: it is written out as a matrix."""


@dataclass(frozen=True)
class SiteRoots:
    """The two roots of one site's share: J^T K J = plus^T plus - minus^T minus, each with a column for each parameter entry.

    ``rounding`` is what float64 may leave of terms that cancel inside the site, and ``reach`` has the root of what the rounding
    of the eigenvectors may leave of each diagonal entry, which is much where a small share meets large eigenvalues.
    """

    name: str
    plus: Tensor
    minus: Tensor
    rounding: float = 0.0
    reach: Tensor | None = None

    def rounding_of(self, rows: slice, columns: slice) -> float:
        """Return a bound on the eigenvectors' rounding in a block: n eps ||K|| ||J_i|| ||J_j||, and ``rounding``."""
        if self.reach is None:
            return self.rounding
        return self.rounding + float(self.reach[rows].norm() * self.reach[columns].norm())

    @cached_property
    def reads(self) -> Tensor:
        """(P,): for each parameter entry, whether the site depends on it."""
        return self.plus.any(0) | self.minus.any(0)


def sites(batch: BatchLoss) -> list[SiteRoots]:
    """Return the sites of a loss, whose shares add up to its Hessian."""
    trace = loss_trace(batch).trace
    adjoints = trace.adjoints()
    steps = [(a, trace.moving_inputs(a), adjoints[a.output]) for a in trace.applications if a.output in adjoints]
    tail = _tail(trace, steps)
    eye = torch.eye(batch.size, dtype=batch.dtype, device=batch.device)
    tangents = {  # of the parameters, (P, *shape) each
        trace.parameters[name]: eye[:, batch.slices[name]].reshape(batch.size, *value.shape)
        for name, value in batch.parameters.items()
    }
    roots: list[SiteRoots] = []
    for a, ids, adjoint in steps[: len(steps) - len(tail)]:
        input_tangents = [None if at is None else tangents[at] for at in ids]
        if not a.primitive.is_linear:
            site = _site(trace, a, input_tangents, adjoint)
            roots += [] if site is None else [site]
        tangents[a.output] = a.primitive.jvp(trace.gather(a), input_tangents)  # type: ignore[arg-type]
    return [*roots, _tail_site(trace, tail, tangents)] if tail else roots


Step = tuple[Application, tuple[int | None, ...], Tensor]
"""An application on the way to the loss, the ids of its moving inputs, and its adjoint."""


def _tail(trace: Trace, steps: list[Step]) -> list[Step]:
    """The applications at the end that read one value of the network, gains and shifts, and no weight matrix."""
    leaves = set(trace.parameters.values())
    tail: list[Step] = []
    for step in reversed(steps):
        read = [at for at in step[1] if at is not None and at not in leaves]
        weights = [at for at in step[1] if at is not None and at in leaves and trace.values[at].ndim > 1]
        if len(read) != 1 or weights:
            break
        tail.insert(0, step)
    return tail


def _site(trace: Trace, a: Application, input_tangents: Sequence[Tensor | None], adjoint: Tensor) -> SiteRoots | None:
    """Return one application as a site, or None if its second derivative is zero here."""
    inputs: Sequence[Any] = trace.gather(a)
    name, primitive = type(a.primitive).__name__, a.primitive
    tangents = {k: tangent for k, tangent in enumerate(input_tangents) if tangent is not None}

    def curved(units: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
        return primitive.curvature(inputs, adjoint, [units.get(k) for k in range(len(inputs))])

    if isinstance(primitive, MatMul | Linear | Multiply) and len(tangents) < 3:
        if len(tangents) == 1:
            return None  # linear in the one factor that moves
        (i, left), (j, right) = tangents.items()
        units = torch.eye(inputs[j].numel(), dtype=adjoint.dtype, device=adjoint.device).reshape(-1, *inputs[j].shape)
        B = _flat(curved({j: units})[i], len(units), inputs[i]).T  # entries of the first x entries of the second
        return _product_site(name, B, _columns(left), _columns(right))
    if len(tangents) == 1:
        ((k, tangent),) = tangents.items()
        x, flags = inputs[k], [m == k for m in range(len(inputs))]
        axes = next((n for n in range(x.ndim, 0, -1) if primitive.separable(inputs, n, flags)), None)
        if axes is not None:  # the most leading axes whose rows the second derivative keeps apart
            row, width = x.shape[axes:], x.shape[axes:].numel()
            units = torch.eye(width, dtype=x.dtype, device=x.device).reshape(width, *([1] * axes), *row).expand(width, *x.shape)
            product = curved({k: units})[k]
            if product is None:
                return None
            K = product.reshape(width, -1, width).transpose(0, 1)  # rows, width, width
            return _from_matrix(name, K, tangent.reshape(tangent.shape[0], -1, width).permute(1, 2, 0))  # J: rows, width, P
    all_units = dict(zip(tangents, _units(name, [inputs[k] for k in tangents]), strict=True))
    found_of, total = curved(all_units), len(next(iter(all_units.values())))
    K = torch.cat([_flat(found_of[k], total, inputs[k]) for k in tangents], 1)
    return _from_matrix(name, K, torch.cat([_columns(tangent) for tangent in tangents.values()]))


def _product_site(name: str, B: Tensor, left_columns: Tensor, right_columns: Tensor) -> SiteRoots:
    """Return 2 a^T B b for the tangents a and b of two factors, entries x P each."""
    (left_columns_at, J), (at_right, G) = _moving(left_columns), _moving(right_columns)
    lefts, rights = [J[:0]], [G[:0]]
    for rows, columns in _components(B):
        U, s, Vh = torch.linalg.svd(B[rows.unsqueeze(1), columns], full_matrices=False)
        lefts.append(s.sqrt().unsqueeze(1) * (U.T @ J[rows]))
        rights.append(s.sqrt().unsqueeze(1) * (Vh @ G[columns]))
    left, right = torch.cat(lefts), torch.cat(rights)
    sizes = spectral_norm(left), spectral_norm(right)
    if min(sizes) > 0:
        c = min(max((sizes[1] / sizes[0]) ** 0.5, 1e-75), 1e75)  # any c > 0 will do; beyond these, squares overflow
        left, right = left * c, right / c
    plus, minus = (_spread(left / 2**0.5, left_columns_at) for _ in range(2))
    plus[:, at_right] += right / 2**0.5
    minus[:, at_right] -= right / 2**0.5
    return SiteRoots(name, plus, minus)


def _components(B: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows and columns of B that share entries with no others: X W, for one, pairs each column of X with one row of W."""
    m, n = B.shape
    graph = bmat([[None, csr_array(B.cpu())], [csr_array((n, m)), None]])
    _, labels = connected_components(graph, directed=False)
    order = torch.from_numpy(labels.argsort(kind="stable")).to(B.device)
    for members in order.split(torch.from_numpy(labels).bincount().tolist()):
        rows, columns = members[members < m], members[members >= m] - m
        if rows.numel() and columns.numel():
            yield rows, columns


def _tail_site(trace: Trace, tail: list[Step], tangents: dict[int, Tensor]) -> SiteRoots:
    """Return the applications at the end as one site: their Hessian with respect to the value and parameters that they read."""
    outputs = {a.output for a, _, _ in tail}
    ids = list(dict.fromkeys(at for _, inputs, _ in tail for at in inputs if at is not None and at not in outputs))
    units = _units("the end", [trace.values[at] for at in ids])
    value_tangents: dict[int, Tensor] = dict(zip(ids, units, strict=True))
    for a, inputs, _ in tail[:-1]:
        value_tangents[a.output] = a.primitive.jvp(trace.gather(a), [None if at is None else value_tangents[at] for at in inputs])  # type: ignore[arg-type]
    bars: dict[int, Tensor] = {}
    cancelling = 0.0
    for a, inputs, adjoint in reversed(tail):
        at_point, bar = trace.gather(a), bars.pop(a.output, None)
        pull = [None] * len(inputs) if bar is None else a.primitive.vjp(at_point, bar)  # type: ignore[arg-type]
        curved: Sequence[Tensor | None] = [None] * len(inputs)
        if not a.primitive.is_linear:
            input_tangents = [None if at is None else value_tangents[at] for at in inputs]
            curved = a.primitive.curvature(at_point, adjoint, input_tangents)  # type: ignore[arg-type]
        for covectors in (pull, curved):
            accumulate(bars, inputs, covectors)
            cancelling += sum(
                float(c.norm()) for at, c in zip(inputs, covectors, strict=True) if at is not None and c is not None
            )
    total = units[0].shape[0]
    K = torch.cat([_flat(bars.get(at), total, trace.values[at]) for at in ids], 1)
    J = torch.cat([_columns(tangents[at]) for at in ids])
    return replace(_from_matrix("the end", K, J), rounding=1e-14 * cancelling * float(J.norm()) ** 2)


def _from_matrix(name: str, K: Tensor, J: Tensor) -> SiteRoots:
    """Split K, one matrix or one for each row, by the signs of its eigenvalues."""
    w, V = torch.linalg.eigh((K + K.mT) / 2)
    at, J = _moving(J)
    root = w.abs().sqrt().unsqueeze(-1) * (V.mT @ J)
    largest = w.abs().amax(-1).sqrt()[..., None, None] if w.ndim > 1 else w.abs().max().sqrt()
    reach = (largest * J).square().sum(tuple(range(J.ndim - 1)), keepdim=True).sqrt().reshape(1, -1)
    reach = _spread(reach * (w.shape[-1] * torch.finfo(w.dtype).eps) ** 0.5, at)[0]
    return SiteRoots(name, _spread(root[w > 0], at), _spread(root[w < 0], at), reach=reach)


def _moving(J: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask of the columns that are not zero, the parameter entries with an effect, and these columns."""
    at = J.reshape(-1, J.shape[-1]).any(0)
    return at, J[..., at]


def _spread(columns: Tensor, at: Tensor) -> Tensor:
    """Return the columns at their places, with zeros for the others."""
    out = columns.new_zeros(len(columns), len(at))
    out[:, at] = columns
    return out


def _units(name: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """The unit tangents of several values together."""
    total = sum(x.numel() for x in parts)
    if total > LARGEST:
        raise InputError(f"bounds: the inputs of {name} have {total} entries, more than the {LARGEST} that are written out")
    eye = torch.eye(total, dtype=parts[0].dtype, device=parts[0].device)
    pieces = eye.split([x.numel() for x in parts], 1)
    return [piece.reshape(total, *x.shape) for piece, x in zip(pieces, parts, strict=True)]


def _flat(curved: Tensor | None, total: int, like: Tensor) -> Tensor:
    """(total, *shape) -> total x entries; zeros for None."""
    return like.new_zeros(total, like.numel()) if curved is None else curved.reshape(total, -1)


def _columns(tangent: Tensor) -> Tensor:
    """(P, *shape) -> entries x P."""
    return tangent.reshape(tangent.shape[0], -1).T


SLACK, PRODUCT_ROUNDING = 1 + 1e-9, 1e-12
"""Factor that widens a bound, and share of the whole added for terms that cancel; for float64, of unit roundoff u = 1.1e-16.
Largest eigenvalues are proved to 1e-10 (``largest_eigenvalue``), and sums of n terms are off by n u of their absolute sum, so
that n is at most 8e6 and 9e3. Bounds proved to the last bit are ``certified``."""


@dataclass(frozen=True)
class Structured:
    """Bounds on the norms of a Hessian and of its blocks."""

    whole: float
    pairs: Mapping[tuple[str, str], float]
    sites: tuple[str, ...]  # that were kept apart


def structured(batch: BatchLoss) -> Structured:
    """Return the bounds of a traced loss.

    Each block is bounded twice, by the sum of the norms of the sites' shares and by the signs, and the whole by the norm of
    the matrix of block bounds and by the signs; the smaller counts. An InputError names a site too large to be written out.
    """
    if batch.dtype != torch.float64:
        raise InputError(f"structured: the parameters are {batch.dtype}, and rounding is allowed for as in float64; convert them")
    roots, slices = sites(batch), batch.slices
    plus, minus = (roots[0].plus.new_zeros(batch.size, batch.size) for _ in range(2))
    signed_norms: dict[str, tuple[float, float]] = {}
    smaller: dict[tuple[str, str], float] = {}
    pairs = list(combinations_with_replacement(slices, 2))
    for i, j in sorted(pairs, key=lambda pair: pair[0] != pair[1]):  # the signs of a block need those of two diagonal ones
        rows, columns = slices[i], slices[j]
        shares = [  # the two halves of each site's share of the block
            (site.plus[:, rows].T @ site.plus[:, columns], site.minus[:, rows].T @ site.minus[:, columns])
            for site in roots
            if site.reads[rows].any() and site.reads[columns].any()
        ]
        for k, half in enumerate((plus, minus)):
            for share in shares:
                half[rows, columns] += share[k]
            if i != j:
                half[columns, rows] = half[rows, columns].T
        if i == j:
            signed_norms[i] = largest_eigenvalue(plus[rows, rows]), largest_eigenvalue(minus[rows, rows])
        signs = (
            max(signed_norms[i])
            if i == j
            else sum(p**0.5 * q**0.5 for p, q in zip(signed_norms[i], signed_norms[j], strict=True))
        )
        smaller[i, j] = 0.0
        for plus_share, minus_share in shares:
            if smaller[i, j] <= signs:
                smaller[i, j] += spectral_norm(plus_share - minus_share)
        smaller[i, j] = min(smaller[i, j], signs)
    by_sign = max(largest_eigenvalue(plus), largest_eigenvalue(minus))
    bounds: dict[tuple[str, str], float] = {}
    for i, j in pairs:
        bounds[i, j] = bounds[j, i] = smaller[i, j] * SLACK + _rounding(roots, by_sign, slices[i], slices[j])
    table = torch.tensor([[bounds[i, j] for j in slices] for i in slices], dtype=torch.float64, device="cpu")
    rounding = _rounding(roots, by_sign, slice(None), slice(None))
    total = min(by_sign, float(torch.linalg.eigvalsh(table)[-1])) * SLACK + rounding
    return Structured(total, bounds, tuple(site.name for site in roots))


def _rounding(roots: list[SiteRoots], by_sign: float, rows: slice, columns: slice) -> float:
    return PRODUCT_ROUNDING * by_sign + sum(site.rounding_of(rows, columns) for site in roots)
