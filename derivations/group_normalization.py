r"""LayerNorm or RMSNorm of groups of features, row by row, at a point (the "group LN" of head-wise norms).

The d features of a row fall into g groups of d/g in a row, each of which is (for LayerNorm) centred and divided by its own
scale; gain and shift have all d entries. The groups of X in R^{L x d} are the rows of X read as (L g) x (d/g), and reading
it so leaves vec_r(X) as it is. So this is the norm of (L g) rows, then a gain of L rows, joined by the chain rule:

```math
\frac{\partial N}{\partial X} = (I_L\otimes\mathrm{diag}\,\gamma)(P\otimes I)\Big(I_{Lg}\otimes C - \frac{VV^\top}{d/g}\Big)
```

with P and V those of the (L g) rows and C the centring matrix, or the identity for RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from derivations.arrays import Array, Scalar
from derivations.composition import Composite
from derivations.gains import ColumnScaleAt
from derivations.linear_map import LinearMapAt
from derivations.matrix import Identity, Matrix, Ones, kron
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Lettered, Operation, OperationAt, Renamed, Total, shape_of, size

_NORMS: dict[str, type[LayerNormAt | RMSNormAt]] = {"layernorm": LayerNormAt, "rmsnorm": RMSNormAt}


@dataclass(frozen=True, eq=False)
class GroupNormRowsAt(OperationAt):
    r"""N = norm(X, by groups of d/g features) diag(gamma) + 1_L beta^T at a point.

    Args:
        X: L x d.
        groups: g, a divisor of d.
        gamma: (d,), the gain; None for 1, which is then no argument.
        beta: (d,), the shift; None for 0, which is then no argument.
        eps: a number, or one for each of the L g groups, row by row.
        kind: "layernorm" or "rmsnorm".

    Raises:
        ValueError: if there is no such kind, the shapes do not fit, or the scale of a group is zero.

    >>> import torch
    >>> point = GroupNormRowsAt(torch.tensor([[1.0, 3.0, 1.0, 5.0]]), 2, gamma=torch.tensor([1.0, 1.0, 1.0, 10.0]))
    >>> point.value.tolist()
    [[-1.0, 1.0, -1.0, 10.0]]
    >>> point.jacobian("gamma").dense().tolist()[3]
    [0.0, 0.0, 0.0, 1.0]
    >>> GroupNormRowsAt(torch.tensor([[3.0, 3.0, -7.0, 7.0]]), 2, kind="rmsnorm").value.tolist()  # each pair by its own rms
    [[1.0, 1.0, -1.0, 1.0]]
    """

    argument_names = ("X", "gamma", "beta")
    X: Array
    groups: int
    gamma: Array | None = None
    beta: Array | None = None
    eps: Scalar | Array = 0
    kind: str = "layernorm"

    def __post_init__(self) -> None:
        shapes = self.arguments
        d = shapes["X"][-1]
        if self.kind not in _NORMS:
            raise ValueError(f"GroupNormRowsAt: there is no kind {self.kind!r}; the kinds are 'layernorm' and 'rmsnorm'")
        if len(shapes["X"]) != 2 or self.groups < 1 or d % self.groups:
            raise ValueError(f"GroupNormRowsAt: X must be L x d with d a multiple of the {self.groups} groups, got {shapes['X']}")
        if any(shapes.get(name, (d,)) != (d,) for name in ("gamma", "beta")):
            raise ValueError(f"GroupNormRowsAt: gamma and beta must have shape ({d},), got {shapes}")

    @cached_property
    def norm(self) -> LayerNormAt | RMSNormAt:
        """The norm of the groups, as rows of their own: (L g) x (d/g)."""
        return _NORMS[self.kind](self.X.reshape(-1, shape_of(self.X)[1] // self.groups), eps=self.eps)

    @cached_property
    def total(self) -> Operation:
        """The chain: read X by groups, normalise, read by rows, gain, shift."""
        (length, d), n = shape_of(self.X), size(shape_of(self.X))
        by_group = LinearMapAt(self.X, Identity(n), shape_of(self.norm.value))
        by_row = LinearMapAt(self.norm.value, Identity(n), (length, d))
        out: Operation = Composite(by_row, {"X": Composite(self.norm, {"X": by_group})})
        if self.gamma is not None:
            gain = Lettered(ColumnScaleAt(out.value, self.gamma), {"v": r"\gamma", "X": r"\hat X"})
            out = Composite(Renamed(gain, {"v": "gamma"}), {"X": out})
        if self.beta is not None:
            shift = LinearMapAt(self.beta, kron(Ones(length), Identity(d)), (length, d))
            out = Total(out, Renamed(shift, {"X": "beta"}))
        return out

    @property
    def value(self) -> Array:
        """N, of shape (L, d)."""
        return self.total.value

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dX, dN/dgamma = diag(vec_r ^X) (1_L (x) I_d) or dN/dbeta = 1_L (x) I_d."""
        return self.total.jacobian(name)

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the derivative of dN/d(name_i) with respect to name_j, by the chain rule."""
        return self.total.hessian(name_i, name_j)
