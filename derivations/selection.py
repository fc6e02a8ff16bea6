"""The matrix that takes rows of another by their numbers: token embeddings, the class token, the last token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from derivations.arrays import Array, full, is_exact
from derivations.matrix import Matrix
from derivations.matrix.leaves import transposed as transposed_symbol
from derivations.matrix.letters import in_letters


class Selection(Matrix):
    r"""P = (e_{t_1}, ..., e_{t_n})^T, n x V, so that P E are the rows t_1, ..., t_n of E; it acts without being formed.

    P^T P is the diagonal matrix of how often each row is taken, so ||P|| is the root of the largest of these numbers.

    Args:
        indices: the n row numbers, each in 0, ..., V - 1.
        rows: V.
        symbol: what P is printed as.

    Raises:
        ValueError: if an index is not one of the rows.

    >>> P = Selection([2, 0, 2], 3)
    >>> (P @ torch.tensor([5.0, 6.0, 7.0])).tolist(), P.T.dense().tolist()
    ([7.0, 5.0, 7.0], [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    >>> round(P.norm_bound() ** 2, 12)
    2.0
    """

    def __init__(self, indices: Sequence[int], rows: int, symbol: str = "P", transposed: bool = False) -> None:
        self.indices, self.rows = tuple(int(index) for index in indices), int(rows)
        wrong = [index for index in self.indices if not 0 <= index < self.rows]
        if wrong:
            raise ValueError(f"Selection: there is no row {wrong[0]} of {self.rows}; rows are numbered 0 to {self.rows - 1}")
        self.symbol, self.transposed = in_letters(symbol), transposed
        n = len(self.indices)
        self.shape = (self.rows, n) if transposed else (n, self.rows)

    def apply(self, y: Array) -> Array:
        if not self.transposed:
            return y[list(self.indices)]
        out = full((self.rows, int(y.shape[1])), 0, y)
        if not is_exact(y):
            return out.index_add(0, torch.tensor(self.indices, dtype=torch.long, device=y.device), y)
        for index, row in zip(self.indices, y, strict=True):
            out[index] = out[index] + row
        return out

    def transpose(self) -> Matrix:
        result = Selection(self.indices, self.rows, transposed=not self.transposed)
        result.symbol = self.symbol  # not once more in other letters
        return result

    def norm_bound(self) -> float:
        return math.sqrt(max(Counter(self.indices).values(), default=0))

    def latex(self) -> str:
        return transposed_symbol(self.symbol) if self.transposed else self.symbol
