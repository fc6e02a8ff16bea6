r"""The affine map of the rows of a matrix, N = X W + 1_L b^T, at a point: every projection of a transformer.

It is linear in each of X, W and b, so its only second derivatives are the constant mixed ones of X and W (Properties 2,
5 and 6 of "Closing the Curvature Gap").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from derivations.arrays import Array
from derivations.matrix import Commutation, Dense, Identity, Matrix, Ones, kron
from derivations.operation import OperationAt, shape_of
from derivations.vecr import kron_derivative_left, kron_derivative_right


@dataclass(frozen=True, eq=False)
class AffineAt(OperationAt):
    r"""N = X W + 1_L b^T at a point, with its derivatives in vec_r.

    Args:
        X: L x d.
        W: d x m.
        b: (m,), or None for none, which is then no argument.

    Raises:
        ValueError: if the shapes do not conform.

    >>> import torch
    >>> X, W = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [5.0]])
    >>> point = AffineAt(X, W, torch.tensor([7.0]))
    >>> point.value.tolist(), point.jacobian("X").dense().tolist(), point.jacobian("W").dense().tolist()
    ([[20.0]], [[3.0, 5.0]], [[1.0, 2.0]])
    >>> AffineAt(torch.ones(4, 2), W).jacobian("X")
    Kronecker(4x8: I_{4}\otimes W^\top)
    """

    argument_names = ("X", "W", "b")
    X: Array
    W: Array
    b: Array | None = None

    def __post_init__(self) -> None:
        shapes = self.arguments
        fits = len(shapes["X"]) == len(shapes["W"]) == 2 and shapes["X"][1] == shapes["W"][0]
        if not fits or shapes.get("b", shapes["W"][1:]) != shapes["W"][1:]:
            raise ValueError(f"AffineAt: expected X (L, d), W (d, m) and b (m,), got {shapes}")

    @cached_property
    def value(self) -> Array:
        """N, of shape (L, m)."""
        out = self.X @ self.W
        return out if self.b is None else out + self.b.reshape(1, -1)

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dX = I_L (x) W^T, dN/dW = X (x) I_m or dN/db = 1_L (x) I_m (Property 5)."""
        length, m = shape_of(self.X)[0], shape_of(self.W)[1]
        if name == "X":
            return kron(Identity(length), Dense(self.W, "W").T)
        return kron(Dense(self.X, "X") if name == "W" else Ones(length), Identity(m))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the derivative of dN/d(name_i) with respect to name_j (Property 6).

            d2N/dX dW = (I_L (x) K_{m,L} (x) I_d) (vec_r I_L (x) I_{md}) K_{m,d}      (Lm Ld) x dm
            d2N/dW dX = (I_L (x) K_{m,d} (x) I_m) (I_{Ld} (x) vec_r I_m)              (Lm dm) x Ld

        All other blocks are zero.
        """
        (length, d), m = shape_of(self.X), shape_of(self.W)[1]
        if (name_i, name_j) == ("X", "W"):
            return kron_derivative_right(Identity(length), (m, d)) @ Commutation(m, d)
        if (name_i, name_j) == ("W", "X"):
            return kron_derivative_left((length, d), Identity(m))
        return None
