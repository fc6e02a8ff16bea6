"""Block matrices with one block for each row of an array: the Jacobians of LayerNorm, softmax and cross entropy."""

from __future__ import annotations

from fractions import Fraction

import torch

from derivations.arrays import Array, common, scale, to_float
from derivations.matrix import Matrix
from derivations.matrix.letters import dimension, in_letters
from derivations.operation import shape_of


class Centring(Matrix):
    r"""C_d = I_d - 1 1^T / d, the symmetric projection that takes the mean away.

    >>> (Centring(3) @ torch.tensor([1.0, 2.0, 6.0])).tolist()
    [-2.0, -1.0, 3.0]
    """

    def __init__(self, d: int) -> None:
        self.shape = (d, d)

    def apply(self, y: Array) -> Array:
        return y - scale(Fraction(1, self.shape[0]), y.sum(0).reshape(1, -1))

    def transpose(self) -> Matrix:
        return self

    def norm_bound(self) -> float:
        return 1.0 if self.shape[0] > 1 else 0.0

    def latex(self) -> str:
        return f"C_{{{dimension(self.shape[0])}}}"


class RowBlocks(Matrix):
    r"""blockdiag_i(a_i), LS x L: the rows a_i of an L x S array as columns, each in its own block.

    It is diag(vec_r A) (I_L (x) 1_S), and its norm is the largest norm of a row.

    >>> RowBlocks(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).dense().tolist()
    [[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 4.0]]
    """

    def __init__(self, rows: Array, symbol: str = "a_i", transposed: bool = False) -> None:
        self.rows, self.symbol, self.transposed = rows, in_letters(symbol), transposed
        L, S = shape_of(rows)
        self.shape = (L, L * S) if transposed else (L * S, L)

    def like(self) -> Array:
        return self.rows

    def apply(self, y: Array) -> Array:
        L, S = shape_of(self.rows)
        columns = int(y.shape[1])
        rows, y = common(self.rows, y)
        a = rows.reshape(L, S, 1)
        if self.transposed:
            return (a * y.reshape(L, S, columns)).sum(1)
        return (a * y.reshape(L, 1, columns)).reshape(L * S, columns)

    def transpose(self) -> Matrix:
        result = RowBlocks(self.rows, transposed=not self.transposed)
        result.symbol = self.symbol
        return result

    def norm_bound(self) -> float:
        return float(torch.linalg.vector_norm(to_float(self.rows), dim=1).max())

    def latex(self) -> str:
        return rf"\operatorname{{blockdiag}}_i({self.symbol})" + (r"^\top" if self.transposed else "")


class RowCovariance(Matrix):
    r"""blockdiag_i(diag(a_i) - a_i a_i^T) for the rows a_i of an L x S array: the covariance of a one-hot draw from each.

    Symmetric, and positive semidefinite where the rows are distributions. Its norm is the largest over the rows, found
    exactly; it is at most 1/2, which a row (1/2, 1/2) attains.

    >>> draw = RowCovariance(torch.tensor([[0.5, 0.5]]))
    >>> draw.dense().tolist(), round(draw.norm_bound(), 6)
    ([[0.25, -0.25], [-0.25, 0.25]], 0.5)
    """

    def __init__(self, rows: Array, symbol: str = "a_i") -> None:
        self.rows, self.symbol = rows, in_letters(symbol)
        L, S = shape_of(rows)
        self.shape = (L * S, L * S)

    def like(self) -> Array:
        return self.rows

    def apply(self, y: Array) -> Array:
        L, S = shape_of(self.rows)
        columns = int(y.shape[1])
        rows, y = common(self.rows, y)
        a, y = rows.reshape(L, S, 1), y.reshape(L, S, columns)
        if isinstance(y, torch.Tensor):  # a constant drops out; from the largest weight, nearly one-hot rows keep their digits
            y = y - torch.take_along_dim(y, a.argmax(1, keepdim=True), 1)
        weighted = a * y
        return (weighted - a * weighted.sum(1).reshape(L, 1, columns)).reshape(L * S, columns)

    def transpose(self) -> Matrix:
        return self

    def norm_bound(self) -> float:
        a = to_float(self.rows)
        return float(torch.linalg.matrix_norm(torch.diag_embed(a) - a.unsqueeze(2) * a.unsqueeze(1), 2).max())

    def latex(self) -> str:
        a = self.symbol
        return rf"\operatorname{{blockdiag}}_i(\operatorname{{diag}}({a})-{a}{{{a}}}^\top)"
