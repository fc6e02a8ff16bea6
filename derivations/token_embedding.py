r"""The token embedding N = P E at a point: rows of a table E, taken by the one-hot matrix P of the tokens.

It is linear in E, dN/dE = P (x) I_d (Property 5 of "Closing the Curvature Gap"), and P^T P counts how often each token
occurs: a token that occurs k times has a k times larger block in the Gauss-Newton matrix of E.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from derivations.arrays import Array
from derivations.matrix import Identity, Matrix, kron
from derivations.operation import OperationAt, shape_of
from derivations.selection import Selection


@dataclass(frozen=True, eq=False)
class TokenEmbeddingAt(OperationAt):
    r"""N = P E, with rows E[t_1], ..., E[t_L], at a point.

    Args:
        tokens: L integers t_i in 0, ..., V - 1, which are constants.
        E: V x d.

    Raises:
        ValueError: if E is not a matrix, or the tokens are not a list of its row numbers.

    >>> point = TokenEmbeddingAt([2, 0, 2], torch.tensor([[1.0], [2.0], [3.0]]))
    >>> point.value.tolist(), point.jacobian("E").dense().tolist()
    ([[3.0], [1.0], [3.0]], [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    """

    argument_names = ("E",)
    tokens: Any
    E: Array

    def __post_init__(self) -> None:
        entries = torch.as_tensor(self.tokens)
        if self.E.ndim != 2 or entries.ndim != 1 or entries.is_floating_point():
            found = f"{str(entries.dtype).removeprefix('torch.')} tokens of shape {shape_of(entries)}, E {shape_of(self.E)}"
            raise ValueError(f"TokenEmbeddingAt: expected integer tokens (L,) and E (V, d), got {found}")
        _ = self.P

    @property
    def P(self) -> Matrix:
        """The one-hot matrix of the tokens, L x V."""
        return Selection(torch.as_tensor(self.tokens).tolist(), shape_of(self.E)[0])

    @cached_property
    def value(self) -> Array:
        """N, of shape (L, d)."""
        return self.P @ self.E

    def _jacobian(self, name: str) -> Matrix:
        """Return dN/dE = P (x) I_d."""
        return kron(self.P, Identity(shape_of(self.E)[1]))
