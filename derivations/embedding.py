"""Lookup of rows in vec_r: N[n] = E[tokens[n]], linear in the table E of embeddings; the tokens are constants.

With the one-hot matrix P of the tokens, N = P E and dN/dE = P (x) I_d (Property 5 of "Closing the Curvature Gap"); the second
derivative vanishes. P^T P counts how often each token occurs: a token that occurs k times has a k times larger block in the
Gauss-Newton matrix of E.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from derivations.arrays import Array, full
from derivations.matrix import Diagonal, Identity, Matrix, kron
from derivations.operation import OperationAt, shape_of
from derivations.selection import Selection


@dataclass(frozen=True, eq=False)
class TokenEmbeddingAt(OperationAt):
    r"""N = P E, with rows E[t_1], ..., E[t_L], at a point.

    Args:
        tokens: L integers t_i in 0, ..., V - 1, which are constants.
        E: V x d.
        frozen: a row that does not move (torch's ``padding_idx``, left out of the gradient), or None.

    Raises:
        ValueError: if E is not a matrix, or the tokens are not a list of its row numbers.

    >>> point = TokenEmbeddingAt([2, 0, 2], torch.tensor([[1.0], [2.0], [3.0]]))
    >>> point.value.tolist(), point.jacobian("E").dense().tolist()
    ([[3.0], [1.0], [3.0]], [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    """

    argument_names = ("E",)
    tokens: Any
    E: Array
    frozen: int | None = None

    def __post_init__(self) -> None:
        entries = self.tokens if isinstance(self.tokens, Tensor) else torch.as_tensor(self.tokens, device="cpu")
        if self.E.ndim != 2 or entries.ndim != 1 or entries.is_floating_point():
            seen = f"{str(entries.dtype).removeprefix('torch.')} tokens of shape {shape_of(entries)}, E {shape_of(self.E)}"
            raise ValueError(f"TokenEmbeddingAt: expected integer tokens (L,) and E (V, d), got {seen}")
        _ = self.P

    @property
    def P(self) -> Matrix:
        """The one-hot matrix of the tokens, L x V."""
        return Selection(torch.as_tensor(self.tokens, device="cpu").tolist(), shape_of(self.E)[0])

    @cached_property
    def value(self) -> Array:
        """N, of shape (L, d)."""
        return self.P @ self.E

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dE = P (x) I_d, or P diag(k) (x) I_d with 0 in k at the row that does not move."""
        rows, d = shape_of(self.E)
        if self.frozen is None:
            return kron(self.P, Identity(d))
        k = full((rows,), 1, self.E)
        k[self.frozen : self.frozen + 1] = 0
        return kron(self.P @ Diagonal(k, "k"), Identity(d))
