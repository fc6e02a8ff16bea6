r"""The mean-pool head o = (1/L) 1^T Z W_c + b_c of the vision transformer in "Closing the Curvature Gap".

The head is linear in each argument, so its only second derivative is the mixed one (the paper trains with
this head and has no formula for it).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from derivations.arrays import Array, scale
from derivations.matrix import Commutation, Dense, Identity, Matrix, Ones, kron
from derivations.operation import OperationAt, shape_of
from derivations.vecr import kron_derivative_left, kron_derivative_right


@dataclass(frozen=True, eq=False)
class MeanPoolHeadAt(OperationAt):
    """o = (1/L) 1_L^T Z W_c + b_c, at a point.

    Args:
        Z: L x d, one sequence.
        W_c: d x C.
        b_c: (C,), or None for none, which is then no argument.

    Raises:
        ValueError: if the shapes do not fit.

    >>> import torch
    >>> point = MeanPoolHeadAt(torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]]))
    >>> point.value.tolist(), point.jacobian("Z").dense().tolist(), point.hessian("W_c", "Z").dense().tolist()
    ([[10.0]], [[2.5, 2.5]], [[0.5, 0.5]])
    """

    argument_names = ("Z", "W_c", "b_c")
    Z: Array
    W_c: Array
    b_c: Array | None = None

    def __post_init__(self) -> None:
        shapes = self.arguments
        fits = len(shapes["Z"]) == len(shapes["W_c"]) == 2 and shapes["Z"][1] == shapes["W_c"][0]
        if not fits or shapes.get("b_c", shapes["W_c"][1:]) != shapes["W_c"][1:]:
            raise ValueError(f"MeanPoolHeadAt: expected Z (L, d), W_c (d, C) and b_c (C,), got {shapes}")

    @cached_property
    def pooled(self) -> Array:
        """(1/L) 1_L^T Z, of shape (1, d)."""
        return scale(Fraction(1, int(self.Z.shape[0])), self.Z.sum(0).reshape(1, -1))

    @cached_property
    def value(self) -> Array:
        """o, of shape (1, C)."""
        out = self.pooled @ self.W_c
        return out if self.b_c is None else out + self.b_c.reshape(1, -1)

    def _jacobian(self, name: str) -> Matrix:
        """Return do/dZ = (1/L) 1_L^T (x) W_c^T, do/dW_c = (1/L) 1_L^T Z (x) I_C or do/db_c = I_C."""
        rows, classes = int(self.Z.shape[0]), int(self.W_c.shape[1])
        if name == "Z":
            return Fraction(1, rows) * kron(Ones(1, rows), Dense(self.W_c, "W_c").T)
        if name == "W_c":
            return kron(Dense(self.pooled, r"\tfrac1L\mathbf{1}^\top Z"), Identity(classes))
        return Identity(classes)

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the derivative of do/d(name_i) with respect to name_j.

            d2o/dW_c dZ = (K_{C,d} (x) I_C) (I_d (x) vec_r I_C) ((1/L) 1_L^T (x) I_d)      (C dC) x Ld
            d2o/dZ dW_c = (1/L) (K_{C,L} (x) I_d) (1_L (x) I_{Cd}) K_{C,d}                 (C Ld) x dC

        All other blocks are zero.
        """
        (rows, d), classes = shape_of(self.Z), int(self.W_c.shape[1])
        mean = Fraction(1, rows)
        if (name_i, name_j) == ("W_c", "Z"):
            return mean * (kron_derivative_left((1, d), Identity(classes)) @ kron(Ones(1, rows), Identity(d)))
        if (name_i, name_j) == ("Z", "W_c"):
            return mean * (kron_derivative_right(Ones(1, rows), (classes, d)) @ Commutation(classes, d))
        return None
