r"""Learned gains and gates at a point: a gain a column, one gain for all entries, and the product with another array.

    X diag(v)   LayerScale (Touvron et al., "Going deeper with Image Transformers") and Admin's residual weights
    a X         SkipInit (De and Smith) and ReZero
    X o Y       the gate of SwiGLU (Shazeer, "GLU Variants Improve Transformer")

All are bilinear: their only second derivatives are the constant mixed ones (Properties 3 and 6 and Proposition 6 of
"Closing the Curvature Gap").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from derivations.arrays import Array
from derivations.matrix import Dense, Diagonal, DiagonalLift, Identity, Matrix, Ones, VecIdentity, kron
from derivations.operation import OperationAt, shape_of, size
from derivations.vecr import hadamard, kron_derivative_right, vec_r_column


@dataclass(frozen=True, eq=False)
class ColumnScaleAt(OperationAt):
    r"""N = X diag(v): column j times v_j.

    Args:
        X: L x d.
        v: (d,).

    Raises:
        ValueError: if the shapes do not conform.

    >>> import torch
    >>> point = ColumnScaleAt(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 4.0]))
    >>> point.value.tolist(), point.jacobian("X"), point.jacobian("v").dense().tolist()
    ([[3.0, 8.0]], Diagonal(2x2: \operatorname{diag}(v)), [[1.0, 0.0], [0.0, 2.0]])
    """

    argument_names = ("X", "v")
    X: Array
    v: Array

    def __post_init__(self) -> None:
        X, v = self.arguments.values()
        if len(X) != 2 or v != X[1:]:
            raise ValueError(f"ColumnScaleAt: expected X (L, d) and v (d,), got {X} and {v}")

    @cached_property
    def value(self) -> Array:
        """N, of shape (L, d)."""
        return self.X * self.v.reshape(1, -1)

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dX = I_L (x) diag(v) or dN/dv = diag(vec_r X) (1_L (x) I_d)."""
        length, d = shape_of(self.X)
        if name == "X":
            return kron(Identity(length), Diagonal(self.v, "v"))
        return hadamard(self.X, "X") @ kron(Ones(length), Identity(d))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the derivative of dN/d(name_i) with respect to name_j.

            d2N/dX dv = d(I_L (x) D)/dD E_d  at D = diag(v)             (Ld Ld) x d
            d2N/dv dX = (I_{Ld} (x) 1_L^T (x) I_d) E_{Ld}               (Ld d) x Ld

        All other blocks are zero.
        """
        length, d = shape_of(self.X)
        if (name_i, name_j) == ("X", "v"):
            return kron_derivative_right(Identity(length), (d, d)) @ DiagonalLift(d)
        if (name_i, name_j) == ("v", "X"):
            return kron(Identity(length * d), Ones(1, length), Identity(d)) @ DiagonalLift(length * d)
        return None


@dataclass(frozen=True, eq=False)
class ScalarScaleAt(OperationAt):
    r"""N = a X with one learned number a.

    Args:
        X: an array of n entries, with one axis or more.
        a: of shape () or (1,).

    Raises:
        ValueError: if a is not one number.

    >>> import torch
    >>> point = ScalarScaleAt(torch.tensor([[1.0, 2.0]]), torch.tensor(3.0))
    >>> point.value.tolist(), point.jacobian("X"), point.jacobian("a").dense().tolist(), point.hessian("X", "a")
    ([[3.0, 6.0]], Kronecker(2x2: a\otimes I_{2}), [[1.0], [2.0]], VecIdentity(4x1: \operatorname{vec}_r(I_{2})))
    """

    argument_names = ("X", "a")
    X: Array
    a: Array

    def __post_init__(self) -> None:
        if shape_of(self.a) not in ((), (1,)):
            raise ValueError(f"ScalarScaleAt: a must be one number, of shape () or (1,), got {shape_of(self.a)}")

    @cached_property
    def value(self) -> Array:
        """N, of the shape of X."""
        return self.X * self.a.reshape((1,) * self.X.ndim)

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dX = a I_n or dN/da = vec_r X."""
        if name == "X":
            return kron(Dense(self.a.reshape(1, 1), "a"), Identity(size(shape_of(self.X))))
        return vec_r_column(Dense(self.X.reshape(shape_of(self.X)[0], -1), "X"))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return d2N/dX da = vec_r I_n (n^2 x 1), d2N/da dX = I_n, or zero."""
        n = size(shape_of(self.X))
        if name_i == name_j:
            return None
        return VecIdentity(n) if name_i == "X" else Identity(n)


@dataclass(frozen=True, eq=False)
class HadamardAt(OperationAt):
    r"""N = X o Y, entry by entry.

    Args:
        X: an array of n entries.
        Y: of the same shape.

    Raises:
        ValueError: if the shapes differ.

    >>> import torch
    >>> point = HadamardAt(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> point.value.tolist(), point.jacobian("X"), point.hessian("X", "Y")
    ([[3.0, 8.0]], Diagonal(2x2: \operatorname{diag}(\operatorname{vec}_r(Y))), DiagonalLift(4x2: E_{2}))
    """

    argument_names = ("X", "Y")
    X: Array
    Y: Array

    def __post_init__(self) -> None:
        X, Y = self.arguments.values()
        if X != Y:
            raise ValueError(f"HadamardAt: X and Y need one shape, got {X} and {Y}")

    @cached_property
    def value(self) -> Array:
        """N, of the shape of X."""
        return self.X * self.Y

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dX = diag(vec_r Y) or dN/dY = diag(vec_r X) (Property 3)."""
        return hadamard(self.Y, "Y") if name == "X" else hadamard(self.X, "X")

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return E_n, n^2 x n, for X and Y in either order (Proposition 6), or zero."""
        return None if name_i == name_j else DiagonalLift(size(shape_of(self.X)))
