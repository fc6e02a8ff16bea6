"""Columns vec_r(Y) of a whole expression, and the slice-wise transpose of a stack of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from derivations.arrays import Array, eye, matmul, to_float
from derivations.matrix.expression import Matrix
from derivations.matrix.letters import dimension


class Vec(Matrix):
    r"""vec_r(Y) as an mn x 1 column for an m x n expression Y, of norm ||Y||_F; it is written out only when it acts.

    >>> from derivations.matrix.permutation import Commutation
    >>> column = Vec(Commutation(2, 3))
    >>> column.shape, round(column.norm_bound() ** 2, 12), column.T.latex()
    ((36, 1), 6.0, '\\operatorname{vec}_r(K_{2,3})^\\top')
    """

    def __init__(self, matrix: Matrix, transposed: bool = False) -> None:
        self.matrix, self.transposed = matrix, transposed
        n = matrix.shape[0] * matrix.shape[1]
        self.shape = (1, n) if transposed else (n, 1)

    def children(self) -> Sequence[Matrix]:
        return (self.matrix,)

    def dense(self, like: Array | None = None) -> Array:
        return self.matrix.dense(like).reshape(self.shape)

    def apply(self, y: Array) -> Array:
        return matmul(self.dense(y), y)

    def transpose(self) -> Matrix:
        return Vec(self.matrix, not self.transposed)

    def norm_bound(self) -> float:
        return float(torch.linalg.vector_norm(to_float(self.matrix.dense().reshape(1, -1))))

    def latex(self) -> str:
        return rf"\operatorname{{vec}}_r({self.matrix.latex()})" + (r"^\top" if self.transposed else "")


class SliceTranspose(Matrix):
    r"""The stack (H_1^T; ...; H_k^T) of a stack H = (H_1; ...; H_k) of k matrices of one shape a x b.

    vec_r of the result is (I_k (x) K_{b,a}) vec_r(H). It is printed T_k[H] and acts without being formed, as H^T on
    I_k (x) y. The norm bound is sqrt(min(k, b)) ||H||, by way of the Frobenius norm or of the k slices.

    >>> from derivations.matrix.leaves import Dense
    >>> H = Dense(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), "H")
    >>> SliceTranspose(H, 2).dense().tolist()
    [[1.0, 3.0], [2.0, 4.0], [5.0, 7.0], [6.0, 8.0]]
    """

    def __init__(self, matrix: Matrix, slices: int, transposed: bool = False) -> None:
        rows, columns = matrix.shape
        if slices < 1 or rows % slices:
            raise ValueError(f"SliceTranspose: the {rows} rows of {matrix!r} do not split into {slices} slices of equal height")
        self.matrix, self.slices, self.transposed = matrix, slices, transposed
        height = rows // slices
        self.shape = (height, slices * columns) if transposed else (slices * columns, height)

    def children(self) -> Sequence[Matrix]:
        return (self.matrix,)

    def dense(self, like: Array | None = None) -> Array:
        k, a, b = self.slices, self.matrix.shape[0] // self.slices, self.matrix.shape[1]
        written = self.matrix.dense(like).reshape(k, a, b).swapaxes(1, 2).reshape(k * b, a)
        return written.T if self.transposed else written

    def apply(self, y: Array) -> Array:
        k, a, b, c = self.slices, self.matrix.shape[0] // self.slices, self.matrix.shape[1], int(y.shape[1])
        if self.transposed:  # sum_o H_o y_o: the diagonal blocks of H (y_1 ... y_k)
            side_by_side = y.reshape(k, b, c).swapaxes(0, 1).reshape(b, k * c)
            products = self.matrix.apply(side_by_side).reshape(k, a, k, c)
            return (eye(k, y).reshape(k, 1, k, 1) * products).sum(2).sum(0)
        spread = (eye(k, y).reshape(k, 1, k, 1) * y.reshape(1, a, 1, c)).reshape(k * a, k * c)  # I_k (x) y
        return self.matrix.T.apply(spread).reshape(b, k, c).swapaxes(0, 1).reshape(k * b, c)

    def transpose(self) -> Matrix:
        return SliceTranspose(self.matrix, self.slices, not self.transposed)

    def norm_bound(self) -> float:
        return math.sqrt(min(self.slices, self.matrix.shape[1])) * self.matrix.norm_bound()

    def latex(self) -> str:
        return rf"\mathcal{{T}}_{{{dimension(self.slices)}}}[{self.matrix.latex()}]" + (r"^\top" if self.transposed else "")
