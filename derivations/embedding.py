"""Lookup of rows: N[n] = W[indices[n]], linear in the table W of embeddings; the indices are constants.

In vec_r, with the one-hot matrix P of the indices, N = P W and dN/dW = P (x) I_d (Property 5 of "Closing the Curvature
Gap"); the second derivative vanishes. P^T P counts how often each token occurs: a token that occurs k times has a k times
larger block in the Gauss-Newton matrix of W. As a primitive, P is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from derivations.arrays import Array, full
from derivations.matrix import Diagonal, Identity, Matrix, kron
from derivations.operation import OperationAt, shape_of
from derivations.primitive import ByLinearising, Covectors, CovectorSum, Inputs, Linearised, Sums, Tangents, total
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


@dataclass(frozen=True, eq=False)
class Embedding(ByLinearising):
    """N = W[indices], of shape (*indices.shape, d) for W of shape (V, d); inputs (W,).

    Args:
        indices: integers in 0, ..., V - 1, of any shape.
        frozen: a row that does not move (torch's ``padding_idx``, whose derivatives are zero by convention), or None.

    >>> import torch
    >>> W, twice = torch.tensor([[1.0], [2.0]]), Embedding(torch.tensor([1, 1, 0]))
    >>> twice.value(W).tolist(), twice.vjp((W,), torch.ones(1, 3, 1))[0].tolist()
    ([[2.0], [2.0], [1.0]], [[[1.0], [2.0]]])
    """

    indices: Tensor
    frozen: int | None = None
    is_linear = True
    roles = MappingProxyType({0: "table"})

    @property
    def selects(self) -> bool:  # type: ignore[override]
        return self.frozen is None

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0][self.indices]

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, wanted: Sequence[bool] | None = None) -> Linearised:
        return LinearisedEmbedding(self, inputs, adjoint, wanted)


class LinearisedEmbedding(Linearised):
    """Rows taken, and rows put where they were taken from."""

    primitive: Embedding

    def push(self, tangents: Tangents) -> Tensor:
        """Return the rows of the tangent."""
        return self._moving(total(self.primitive, tangents[0])[:, self.primitive.indices])

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the sums of the rows that were taken from the same place."""
        if bar is None:
            return (None,)
        total = CovectorSum(bar.new_empty(bar.shape[0], *self.inputs[0].shape))
        self.pull_into(bar, None, (total,))
        return (total.memory,)

    def pull_into(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Covectors:
        """As :meth:`pull`, into the sum: a table has many more rows than are taken."""
        if sums[0] is None:
            return self.pull(bar)
        if bar is not None:
            rows = self._moving(bar).reshape(bar.shape[0], -1, self.inputs[0].shape[1])
            sums[0].add_rows(self.primitive.indices.reshape(-1), rows)
        return (None,)

    def _moving(self, rows: Tensor) -> Tensor:
        """Return rows with zeros for the one that does not move."""
        frozen = self.primitive.frozen
        return rows if frozen is None else rows.masked_fill(self.primitive.indices.eq(frozen).unsqueeze(-1), 0)
