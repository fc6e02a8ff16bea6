r"""Linear maps of vec_r at a point, among them two that attention is built from: splitting heads and taking rows.

A reshape leaves vec_r as it is, and a transposition of axes is a commutation matrix in a Kronecker product with
identities; so these maps have exact norms (1, or sqrt(r) where rows are repeated r times) and no second derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from derivations.arrays import Array
from derivations.matrix import Commutation, Identity, Matrix, Ones, kron
from derivations.operation import OperationAt, Shape, shape_of, size
from derivations.rotary import rotary
from derivations.selection import Selection

__all__ = ["LinearMapAt", "mean_rows", "merge_heads", "rotary", "split_heads", "take_row"]


@dataclass(frozen=True, eq=False)
class LinearMapAt(OperationAt):
    r"""N with vec_r(N) = M vec_r(X), for a constant matrix M.

    Args:
        X: an array of n entries.
        matrix: M, an expression of shape out x n.
        shape: the shape of N, of out entries.

    Raises:
        ValueError: if the numbers of entries do not conform.

    >>> import torch
    >>> point = LinearMapAt(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mean_rows(2, 2), (1, 2))
    >>> point.value.tolist(), point.jacobian("X").latex()
    ([[2.0, 3.0]], '\\frac{1}{2}\\,\\left(\\mathbf{1}_{2}^\\top\\otimes I_{2}\\right)')
    """

    argument_names = ("X",)
    X: Array
    matrix: Matrix
    shape: Shape

    def __post_init__(self) -> None:
        entries = (size(self.shape), size(shape_of(self.X)))
        if self.matrix.shape != entries:
            raise ValueError(
                f"LinearMapAt: X of shape {shape_of(self.X)} to {tuple(self.shape)} needs a matrix of shape {entries}, "
                f"got {self.matrix!r}"
            )

    @cached_property
    def value(self) -> Array:
        """N."""
        return (self.matrix @ self.X.reshape(-1)).reshape(self.shape)

    def _jacobian(self, name: str) -> Matrix:
        """Return M."""
        return self.matrix


def split_heads(length: int, heads: int, width: int, repeat: int = 1) -> Matrix:
    r"""Return (I_H (x) 1_r (x) I_{Lw}) (K_{H,L} (x) I_w): L x (H w) -> (H r L) x w, with rows (head, copy, token).

    It is HrLw x LHw, of norm sqrt(r): with r > 1 each head of keys or values serves r query heads (grouped-query attention).

    Args:
        length: L.
        heads: H, the heads that there are.
        width: w, the width of a head.
        repeat: r.

    >>> split_heads(5, 2, 3), split_heads(5, 1, 3)
    (Kronecker(30x30: K_{2,5}\otimes I_{3}), Identity(15x15: I_{15}))
    >>> import torch
    >>> (split_heads(2, 2, 1) @ torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()  # rows (1, 2) and (3, 4)
    [1.0, 3.0, 2.0, 4.0]
    """
    copies = Identity(heads * length * width) if repeat == 1 else kron(Identity(heads), Ones(repeat), Identity(length * width))
    return copies @ kron(Commutation(heads, length), Identity(width))


def merge_heads(length: int, heads: int, width: int) -> Matrix:
    r"""Return K_{L,H} (x) I_w: (H L) x w -> L x (H w), the inverse of ``split_heads`` without repetition.

    >>> merge_heads(5, 2, 3), merge_heads(5, 2, 3) @ split_heads(5, 2, 3)
    (Kronecker(30x30: K_{5,2}\otimes I_{3}), Identity(30x30: I_{30}))
    """
    return kron(Commutation(length, heads), Identity(width))


def take_row(length: int, width: int, index: int) -> Matrix:
    r"""Return e_t^T (x) I_d: L x d -> 1 x d, row t (from the end if the index is negative), of norm 1.

    Raises:
        ValueError: if there is no such row.

    >>> take_row(4, 3, 0), take_row(4, 3, -1)
    (Kronecker(3x12: e_{0}^\top\otimes I_{3}), Kronecker(3x12: e_{3}^\top\otimes I_{3}))
    """
    if not -length <= index < length:
        raise ValueError(f"take_row: there is no row {index} of {length}")
    row = index % length
    return kron(Selection([row], length, rf"e_{{{row}}}^\top"), Identity(width))


def mean_rows(length: int, width: int) -> Matrix:
    r"""Return (1/L) 1_L^T (x) I_d: L x d -> 1 x d, the mean of the rows, of norm 1/sqrt(L).

    >>> mean_rows(4, 3).norm_bound()
    0.5
    """
    return Fraction(1, length) * kron(Ones(1, length), Identity(width))
