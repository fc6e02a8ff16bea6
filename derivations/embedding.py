"""Lookup of rows: N[n] = W[indices[n]], linear in the table W of embeddings; the indices are constants.

In vec_r, with the one-hot matrix R of the indices, N = R W and dN/dW = R (x) I_d (Property 5 of "Closing the Curvature
Gap"); the second derivative vanishes. R is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from derivations.primitive import Covectors, Inputs, Primitive, Tangents


@dataclass(frozen=True, eq=False)
class Embedding(Primitive):
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

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0][self.indices]

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        if tangents[0] is None:
            raise ValueError("Embedding.jvp: the tangent of W is None")
        moved = tangents[0][:, self.indices]
        return moved if self.frozen is None else moved.masked_fill(self._still(), 0)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        W = inputs[0]
        pulled = adjoint if self.frozen is None else adjoint.masked_fill(self._still(), 0)
        out = adjoint.new_zeros(adjoint.shape[0], *W.shape)
        out.index_add_(1, self.indices.reshape(-1), pulled.reshape(adjoint.shape[0], -1, W.shape[1]))
        return (out,)

    def _still(self) -> Tensor:
        assert self.frozen is not None
        return self.indices.eq(self.frozen).unsqueeze(-1)
