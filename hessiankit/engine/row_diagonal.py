"""The diagonal of the curvature of the loss in values that norms, entrywise functions and one weight lead to it.

An entry (e, e) of the Hessian asks for one parameter alone. Where row n of z moves row n of the loss and nothing else, z has the
curvature K_n for each row, and with K'_n that of a later value y,

    diag K_n = s^2 o diag K'_n + lambda o f''      y = f(z), entry by entry, with slopes s
    diag K_n = diag(W K'_n W^T)                    y = z W

From y to the loss K'_n is a diagonal plus pairs (:mod:`derivations.row_curvature`): no row has a matrix, however many classes
there are.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.cast import Cast
from derivations.elementwise import Elementwise
from derivations.linear import Add, Linear, MatMul, Multiple, Multiply, Shift
from derivations.normalization import LayerNorm, RMSNorm
from derivations.row_curvature import RowCurvature, of_loss, through_entries, through_norm
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.tracing.trace import Application

ENTRYWISE = (Activation, Add, Cast, Elementwise, Multiply, Multiple, Shift)


class RowDiagonal:
    """Diagonals of the curvature of the loss in values of a trace.

    Args:
        sweep: A sweep that has not run: its adjoints, and which primitives count.
    """

    def __init__(self, sweep: ForwardSweep) -> None:
        self.trace, self.adjoints, self.included = sweep.trace, sweep.adjoints, sweep.included
        path = [a for a in self.trace.applications if a.output in self.adjoints]
        uses = Counter(at for a in path for at in a.inputs if at is not None)
        self._only_use = {at: a for a in path for at in a.inputs if at is not None and uses[at] == 1}
        self._known: dict[int, RowCurvature | None] = {}

    def diagonal(self, at: int) -> Tensor | None:
        """Return the diagonal (R, p) in a value; None where something else leads from it to the loss."""
        if (K := self._curvature(at)) is not None:
            return K.diagonal()
        if (a := self._only_use.get(at)) is None:
            return None
        weight = self.trace.gather(a)[1] if isinstance(a.primitive, (Linear, MatMul)) and a.inputs[0] == at else None
        if weight is not None and weight.ndim == 2 and (K := self._curvature(a.output)) is not None:
            return K.forms(weight.T if isinstance(a.primitive, Linear) else weight)
        D = self.diagonal(a.output) if self._is_entrywise(a, at) else None
        if D is None:
            return None
        first, second = self._derivatives(a, at)
        D = D * first.square()
        return D if second is None else D + second

    def _curvature(self, at: int) -> RowCurvature | None:
        """Return the curvature in a value from which norms and entrywise functions alone lead to the loss."""
        if at not in self._known:
            self._known[at] = self._pulled(at)
        return self._known[at]

    def _pulled(self, at: int) -> RowCurvature | None:
        a, z = self._only_use.get(at), self.trace.values[at]
        if a is None or z.ndim < 1:
            return None
        inputs, primitive, adjoint = self.trace.gather(a), a.primitive, self.adjoints[a.output]
        if a.output == self.trace.output:
            return of_loss(primitive, inputs, adjoint) if a.inputs[0] == at and self._counts(a) else None  # type: ignore[arg-type]
        norm = isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1 and a.inputs[0] == at
        K = self._curvature(a.output) if norm or self._is_entrywise(a, at) else None
        if K is None:
            return None
        if isinstance(primitive, (LayerNorm, RMSNorm)):
            return through_norm(primitive, inputs, adjoint if self._counts(a) else None, K)
        return through_entries(*self._derivatives(a, at), K)

    def _is_entrywise(self, a: Application, at: int) -> bool:
        return isinstance(a.primitive, ENTRYWISE) and self.trace.values[a.output].shape == self.trace.values[at].shape

    def _counts(self, a: Application) -> bool:
        return self.included is None or a.output in self.included

    def _derivatives(self, a: Application, at: int) -> tuple[Tensor, Tensor | None]:
        """Return the derivative of an entrywise function and its second one times the adjoint, or None: (R, p)."""
        inputs, width = self.trace.gather(a), self.trace.values[at].shape[-1]
        ones = [torch.ones_like(x).unsqueeze(0) if i == at else None for i, x in zip(a.inputs, inputs, strict=True)]  # type: ignore[arg-type]
        first = a.primitive.jvp(inputs, ones).reshape(-1, width)  # type: ignore[arg-type]
        if a.primitive.is_linear or not self._counts(a):
            return first, None
        second = a.primitive.curvature(inputs, self.adjoints[a.output], ones)[a.inputs.index(at)]  # type: ignore[arg-type]
        return first, None if second is None else second.reshape(-1, width)
