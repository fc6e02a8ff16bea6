"""Diagonal and block-diagonal matrices, and the map that sends a vector to its diagonal matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from derivations.arrays import Array, as_array, common, concatenate, full, lift_diagonal, to_float
from derivations.matrix.expression import Matrix
from derivations.matrix.leaves import transposed
from derivations.matrix.letters import dimension, in_letters


class Diagonal(Matrix):
    r"""diag(v) for a vector v.

    >>> import torch
    >>> D = Diagonal(torch.tensor([1.0, -5.0]), "v")
    >>> D.norm_bound(), D.latex()
    (5.0, '\\operatorname{diag}(v)')
    """

    def __init__(self, values: Any, symbol: str = r"\bullet") -> None:
        self.values = as_array(values).reshape(-1)
        self.symbol = in_letters(symbol)
        n = int(self.values.shape[0])
        self.shape = (n, n)

    def like(self) -> Array:
        return self.values

    def apply(self, y: Array) -> Array:
        values, y = common(self.values, y)
        return values.reshape(-1, 1) * y

    def transpose(self) -> Matrix:
        return self

    def norm_bound(self) -> float:
        return float(to_float(self.values).abs().max()) if self.shape[0] else 0.0

    def latex(self) -> str:
        return rf"\operatorname{{diag}}({self.symbol})"


class BlockDiagonal(Matrix):
    """blockdiag(B_1, ..., B_k); its spectral norm is the largest of the blocks' (Property 11).

    >>> from derivations.matrix.leaves import Identity, Ones
    >>> BlockDiagonal([Identity(2), Ones(3, 1)]).shape
    (5, 3)
    """

    def __init__(self, blocks: Sequence[Matrix], symbol: str | None = None) -> None:
        self.blocks, self.symbol = tuple(blocks), None if symbol is None else in_letters(symbol)
        self.shape = (sum(b.shape[0] for b in self.blocks), sum(b.shape[1] for b in self.blocks))

    def children(self) -> Sequence[Matrix]:
        return self.blocks

    def apply(self, y: Array) -> Array:
        parts, start = [], 0
        for block in self.blocks:
            parts.append(block.apply(y[start : start + block.shape[1]]))
            start += block.shape[1]
        return concatenate(parts, 0) if parts else full((0, int(y.shape[1])), 0, y)

    def transpose(self) -> Matrix:
        result = BlockDiagonal([block.T for block in self.blocks])
        result.symbol = None if self.symbol is None else transposed(self.symbol)
        return result

    def norm_bound(self) -> float:
        return max((block.norm_bound() for block in self.blocks), default=0.0)

    def latex(self) -> str:
        inner = self.symbol if self.symbol is not None else r",\,".join(block.latex() for block in self.blocks)
        return rf"\operatorname{{blockdiag}}\left({inner}\right)"


class DiagonalLift(Matrix):
    """E_n = (e_1 (x) e_1, ..., e_n (x) e_n), the n^2 x n matrix with vec_r(diag v) = E_n v (Proposition 6).

    >>> import torch
    >>> (DiagonalLift(2) @ torch.tensor([3.0, 4.0])).tolist()
    [3.0, 0.0, 0.0, 4.0]
    """

    def __init__(self, n: int) -> None:
        self.n, self.shape = n, (n * n, n)

    def apply(self, y: Array) -> Array:
        return lift_diagonal(y)

    def transpose(self) -> Matrix:
        return DiagonalTake(self.n)

    def norm_bound(self) -> float:
        return 1.0

    def latex(self) -> str:
        return f"E_{{{dimension(self.n)}}}"


class DiagonalTake(Matrix):
    """E_n^T, which reads the diagonal: E_n^T vec_r(A) = diag(A).

    >>> import torch
    >>> (DiagonalTake(2) @ torch.tensor([3.0, 1.0, 2.0, 4.0])).tolist()
    [3.0, 4.0]
    """

    def __init__(self, n: int) -> None:
        self.n, self.shape = n, (n, n * n)

    def apply(self, y: Array) -> Array:
        return y[:: self.n + 1]

    def transpose(self) -> Matrix:
        return DiagonalLift(self.n)

    def norm_bound(self) -> float:
        return 1.0

    def latex(self) -> str:
        return rf"E_{{{dimension(self.n)}}}^\top"
