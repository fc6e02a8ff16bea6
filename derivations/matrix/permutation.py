"""The commutation matrix and the vectorised identity: the two constant matrices of the vec_r calculus."""

from __future__ import annotations

import math

from derivations.arrays import Array, full
from derivations.matrix.diagonal import DiagonalLift
from derivations.matrix.expression import Matrix
from derivations.matrix.letters import dimension


class Commutation(Matrix):
    """K_{m,n}, the mn x mn permutation with K_{m,n} vec(A) = vec(A^T) for A in R^{m x n} (Definition 3).

    On row-stacked vectors: vec_r(A^T) = K_{n,m} vec_r(A). It turns a Kronecker product round:
    K_{m,n} (x (x) y) = y (x) x for x in R^n, y in R^m. K_{1,n} = K_{n,1} = I_n.

    >>> import torch
    >>> A = torch.arange(6.0).reshape(2, 3)
    >>> bool(((Commutation(3, 2) @ A.reshape(-1)) == A.T.reshape(-1)).all())
    True
    """

    def __init__(self, m: int, n: int) -> None:
        self.m, self.n, self.shape = m, n, (m * n, m * n)

    def apply(self, y: Array) -> Array:
        columns = int(y.shape[1])
        return y.reshape(self.n, self.m, columns).swapaxes(0, 1).reshape(self.m * self.n, columns)

    def transpose(self) -> Matrix:
        return Commutation(self.n, self.m)

    def norm_bound(self) -> float:
        return 1.0

    def latex(self) -> str:
        return f"K_{{{dimension(self.m)},{dimension(self.n)}}}"


class VecIdentity(Matrix):
    """vec_r(I_n) as an n^2 x 1 column, of norm sqrt(n).

    >>> VecIdentity(2).dense().reshape(-1).tolist()
    [1.0, 0.0, 0.0, 1.0]
    """

    def __init__(self, n: int, transposed: bool = False) -> None:
        self.n, self.transposed = n, transposed
        self.shape = (1, n * n) if transposed else (n * n, 1)

    def apply(self, y: Array) -> Array:
        if self.transposed:
            return y[:: self.n + 1].sum(0).reshape(1, -1)
        return DiagonalLift(self.n).apply(full((self.n, 1), 1, y) * y)

    def transpose(self) -> Matrix:
        return VecIdentity(self.n, not self.transposed)

    def norm_bound(self) -> float:
        return math.sqrt(self.n)

    def latex(self) -> str:
        return rf"\operatorname{{vec}}_r(I_{{{dimension(self.n)}}})" + (r"^\top" if self.transposed else "")
