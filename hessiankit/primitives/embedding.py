"""Lookup of rows as a primitive: N[n] = W[indices[n]], linear in the table W; no one-hot matrix is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from hessiankit.primitives.primitive import ByLinearising, Covectors, CovectorSum, Inputs, Linearised, Sums, Tangents, total


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

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedEmbedding(self, inputs, adjoint, needs)


class LinearisedEmbedding(Linearised):
    """The linear map that takes rows, and its transpose."""

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
        """Pull into the sum: a table has many more rows than are taken."""
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
