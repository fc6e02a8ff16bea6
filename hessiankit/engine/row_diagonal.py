"""The diagonal at sites that move the loss row by row, with everything else at rest.

An entry (e, e) of the Hessian asks for one parameter alone. Where row n of z = X W then moves row n of every later value and
nothing else, the curvature of the loss in z is K_n, (p, p) for each row, and its diagonal is a sum of quadratic forms of the
tangents of the p columns:

    K_n[p, p] = sum over later v of   t_p^T [ lambda_v . D^2 phi_v ] t_p .

Through entrywise functions and a weight at rest, tangents are rows of one matrix, t_p = s_n[p] M[p, :], and are not made:
with the curvature K'_n of the value that they reach, s_n[p]^2 <M[p] M[p]^T, K'_n> is one product of matrices for all rows. Norms
and entrywise functions between that value and the loss leave K'_n a diagonal plus pairs (:mod:`derivations.row_curvature`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.cast import Cast
from derivations.elementwise import Elementwise
from derivations.linear import Add, Linear, MatMul, Multiple, Multiply, Shift
from derivations.loss import MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from derivations.row_curvature import DenseRows, RowCurvature, of_loss, through_entries, through_norm
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.jacobians import is_product
from hessiankit.engine.tangents import by_row
from hessiankit.tracing.trace import Application

ENTRYWISE = (Activation, Add, Cast, Elementwise, MeanSquaredError, Multiply, Multiple, Shift)


class RowsCoupled(Exception):
    """A row of a site moves other rows of later values."""


@dataclass(frozen=True)
class FactoredTangents:
    """Tangents (S, *shape) of a value by the S columns of a site: ``data``, or diag(scale[row]) M with one matrix M for all rows.

    Attributes:
        shape: Of the value.
        data: The tangents, or None.
        matrix: M (S, w), None for an identity.
        scale: (*rows, S), None for ones.
    """

    shape: torch.Size
    data: Tensor | None = None
    matrix: Tensor | None = None
    scale: Tensor | None = None

    @property
    def is_shared(self) -> bool:
        """Whether all rows share one matrix, up to scale."""
        return self.data is None

    @property
    def is_identity(self) -> bool:
        """Whether the value is the site, up to scale."""
        return self.data is None and self.matrix is None

    def dense(self, like: Tensor) -> Tensor:
        """Return (S, *shape)."""
        if self.data is not None:
            return self.data
        width = self.shape[-1]
        M = torch.eye(width, dtype=like.dtype, device=like.device) if self.matrix is None else self.matrix
        t = M.reshape(M.shape[0], *(1,) * (len(self.shape) - 1), width)
        if self.scale is not None:
            t = t * self.scale.movedim(-1, 0).unsqueeze(-1)
        return t.expand(-1, *self.shape)


class RowDiagonal:
    """Diagonals of the curvature at the sites of a trace.

    Args:
        sweep: A sweep that has not run: its adjoints, and which primitives count.
    """

    def __init__(self, sweep: ForwardSweep) -> None:
        self.trace, self.adjoints, self.included = sweep.trace, sweep.adjoints, sweep.included
        self.applications = [a for a in self.trace.applications if a.output in self.adjoints]
        self.made = {a.output: n for n, a in enumerate(self.applications)}
        self.last_use = {at: n for n, a in enumerate(self.applications) for at in a.inputs if at is not None}
        uses = Counter(at for a in self.applications for at in a.inputs if at is not None)
        self._only_use = {at: a for a in self.applications for at in a.inputs if at is not None and uses[at] == 1}
        self._stops: set[int] = set()
        self._squares: dict[int, DenseRows] = {}
        self._known: dict[int, RowCurvature | None] = {}

    def columns(self, values: Sequence[int]) -> dict[int, Tensor]:
        """Return the diagonal (R, p) of the curvature of the loss in each value where rows stay apart; none for the others."""
        found: dict[int, Tensor] = {}
        reached: list[tuple[int, Tensor | None, int, FactoredTangents]] = []
        for at in sorted(values, key=lambda v: -self.made[v]):
            if (K := self._structured(at)) is not None:
                found[at] = K.diagonal()
                continue
            try:
                D, stop, factored = self._push(at, full=False, start=True)
            except RowsCoupled:
                continue
            if stop is None:
                assert D is not None
                found[at] = D
            else:
                assert factored is not None
                reached.append((at, D, stop, factored))
                self._stops.add(stop)
        for at, D, stop, factored in sorted(reached, key=lambda one: (self.made[one[2]], one[3].is_identity)):
            try:
                more = self._of_a_stop(at, stop, factored)
            except RowsCoupled:
                continue
            found[at] = more if D is None else D + more
        return found

    def _of_a_stop(self, at: int, stop: int, factored: FactoredTangents) -> Tensor:
        """Return the quadratic forms (R, S) of tangents of a value."""
        if not factored.is_shared:
            return self._pulled(at, stop, factored, full=False)
        if factored.matrix is not None:
            D = self._square(stop).forms(factored.matrix)
        elif stop in self._squares or self._structured(stop) is not None:
            D = self._square(stop).diagonal()
        else:
            D = self._through(stop, full=False)
        return D if factored.scale is None else D * factored.scale.reshape(-1, factored.scale.shape[-1]).square()

    def _structured(self, at: int) -> RowCurvature | None:
        """Return the curvature in a value from which norms and entrywise functions, one after the other, lead to the loss."""
        if at not in self._known:
            self._known[at] = self._pull_structured(at)
        return self._known[at]

    def _pull_structured(self, at: int) -> RowCurvature | None:
        a, z = self._only_use.get(at), self.trace.values[at]
        if a is None or z.ndim < 1:
            return None
        inputs, primitive, adjoint = self.trace.gather(a), a.primitive, self.adjoints[a.output]
        k, counts = a.inputs.index(at), self.included is None or a.output in self.included
        if a.output == self.trace.output:
            return of_loss(primitive, inputs, adjoint) if k == 0 and counts else None  # type: ignore[arg-type]
        norm = isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1 and k == 0
        if not norm and not (isinstance(primitive, ENTRYWISE) and self.trace.values[a.output].shape == z.shape):
            return None
        K = self._structured(a.output)
        if K is None:
            return None
        if isinstance(primitive, (LayerNorm, RMSNorm)):
            return through_norm(primitive, inputs, adjoint if counts else None, K)
        if isinstance(primitive, Add) and primitive.alpha == 1:
            return K
        identity = FactoredTangents(z.shape)
        slope = self._push_shared(a, inputs, k, identity).scale
        second = self._curvature_shared(a, inputs, k, identity, full=False) if counts and not primitive.is_linear else None
        return None if slope is None else through_entries(slope.reshape(-1, z.shape[-1]), second, K)

    def _square(self, at: int) -> RowCurvature | DenseRows:
        """Return the curvature of the loss in a value."""
        K = self._structured(at)
        if K is None and at not in self._squares:
            self._squares[at] = DenseRows(self._through(at, full=True))
        return K or self._squares[at]

    def _through(self, at: int, *, full: bool) -> Tensor:
        found, stop, factored = self._push(at, full=full, start=False)
        if stop is not None:
            assert factored is not None
            found = _added(found, self._pulled(at, stop, factored, full=full))
        assert found is not None
        return found

    def _pulled(self, at: int, stop: int, factored: FactoredTangents, *, full: bool) -> Tensor:
        """Take the curvature of a stop to a value: (R, S), or in ``full`` (R, S, S)."""
        t = factored.dense(self.trace.values[stop])
        return self._square(stop).pulled(by_row(t, self.trace.values[at].ndim - 1), full=full)

    def _stops_at(self, alone: int, at: int, factored: FactoredTangents, a: Application, *, start: bool, shared: bool) -> bool:
        """Tell whether tangents of the columns of ``at`` need not be pushed beyond a value through which all goes.

        What follows is done once for all columns of that value, and once for all sites before it.
        """
        if alone == at:
            return start and not shared and factored.is_shared
        value = self.trace.values[alone]
        if value.ndim < self.trace.values[at].ndim:
            return False
        if value.ndim == self.trace.values[at].ndim and self._structured(alone) is not None:
            return True
        if shared:
            return False
        if factored.data is None:
            return start or alone in self._stops
        costly = is_product(a.primitive) or alone not in self._only_use
        return alone in self._stops or (costly and factored.data.shape[0] >= value.shape[-1])

    def _push(self, at: int, *, full: bool, start: bool) -> tuple[Tensor | None, int | None, FactoredTangents | None]:
        """Push the columns of a value towards the loss, and add up their curvature, (R, S) or, in ``full``, (R, S, S).

        From a site (``start``) as far as its tangents share a matrix, else as far as a value where such tangents have
        stopped: return what has been found, that value and its tangents; or None and None at the loss.
        """
        value = self.trace.values[at]
        axes, total = value.ndim - 1, None
        pushed = {at: FactoredTangents(value.shape)}
        for n, a in enumerate(self.applications[self.made[at] + 1 :], self.made[at] + 1):
            moved = [k for k, i in enumerate(a.inputs) if i in pushed]
            if not moved:
                continue
            inputs = self.trace.gather(a)
            k, shared = moved[0], self._shares(a, inputs, moved, pushed)
            if len(pushed) == 1:
                ((alone, factored),) = pushed.items()
                if self._stops_at(alone, at, factored, a, start=start, shared=shared):
                    return total, alone, factored
            moving = [i in moved for i in range(len(a.inputs))]
            last = a.output == self.trace.output
            if not (a.primitive.separable if last else a.primitive.rowwise)(inputs, axes, moving):  # type: ignore[arg-type]
                raise RowsCoupled
            nonlinear = not a.primitive.is_linear and (self.included is None or a.output in self.included)
            if is_product(a.primitive) and len(moved) == 1:
                nonlinear = False
            if shared:
                factored = pushed[a.inputs[k]]  # type: ignore[index]
                if nonlinear:
                    total = _added(total, self._curvature_shared(a, inputs, k, factored, full=full))
                if not last:
                    pushed[a.output] = self._push_shared(a, inputs, k, factored)
            else:
                like = self.trace.values[at]
                tangents = [pushed[i].dense(like) if i in pushed else None for i in a.inputs]
                if nonlinear:
                    total = _added(total, self._add_curvature(a, inputs, tangents, axes, full=full))
                if not last:
                    out = a.primitive.jvp(inputs, tangents)  # type: ignore[arg-type]
                    pushed[a.output] = FactoredTangents(out.shape[1:], out)
            pushed = {i: factored for i, factored in pushed.items() if self.last_use.get(i, -1) > n}
        if total is None:
            total = value.new_zeros(value[..., 0].numel(), *((value.shape[-1],) * (2 if full else 1)))
        return total, None, None

    def _shares(self, a: Application, inputs: Any, moved: list[int], pushed: dict[int, FactoredTangents]) -> bool:
        """Tell whether the tangents keep sharing one matrix."""
        k = moved[0]
        factored = pushed[a.inputs[k]]  # type: ignore[index]
        if len(moved) > 1 or not factored.is_shared:
            return False
        if isinstance(a.primitive, (Linear, MatMul)):
            return k == 0 and inputs[1].ndim == 2
        same = a.output == self.trace.output or self.trace.values[a.output].shape == factored.shape
        if isinstance(a.primitive, Add):
            return same and a.primitive.alpha == 1
        return same and isinstance(a.primitive, ENTRYWISE) and factored.matrix is None

    def _push_shared(self, a: Application, inputs: Any, k: int, factored: FactoredTangents) -> FactoredTangents:
        if isinstance(a.primitive, (Linear, MatMul)):
            weight = inputs[1].T if isinstance(a.primitive, Linear) else inputs[1]
            M = weight if factored.matrix is None else factored.matrix @ weight
            return FactoredTangents(self.trace.values[a.output].shape, None, M, factored.scale)
        if isinstance(a.primitive, Add):
            return factored
        slope = a.primitive.jvp(inputs, _alone(inputs, k, torch.ones_like(inputs[k]).unsqueeze(0)))[0]
        return FactoredTangents(factored.shape, None, None, slope if factored.scale is None else slope * factored.scale)

    def _curvature_shared(self, a: Application, inputs: Any, k: int, factored: FactoredTangents, *, full: bool) -> Tensor:
        """Return the curvature of an entrywise function."""
        ones = _alone(inputs, k, torch.ones_like(inputs[k]).unsqueeze(0))
        h = a.primitive.curvature(inputs, self.adjoints[a.output], ones)[k]
        if h is None:
            h = torch.zeros_like(inputs[k]).unsqueeze(0)
        h = h[0] if factored.scale is None else h[0] * factored.scale.square()
        h = h.reshape(-1, h.shape[-1])
        return torch.diag_embed(h) if full else h

    def _add_curvature(
        self, a: Application, inputs: Any, tangents: list[Tensor | None], axes: int, *, full: bool
    ) -> Tensor | None:
        covectors = a.primitive.curvature(inputs, self.adjoints[a.output], tangents)  # type: ignore[arg-type]
        total: Tensor | None = None
        for t, w in zip(tangents, covectors, strict=True):
            if t is not None and w is not None:
                T, W = by_row(t, axes), by_row(w, axes)
                total = _added(total, T @ W.mT if full else (T * W).sum(2))
        return total


def _alone(inputs: Sequence[Any], k: int, t: Tensor) -> list[Tensor | None]:
    return [t if n == k else None for n in range(len(inputs))]


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return total if more is None else more
    return total + more
