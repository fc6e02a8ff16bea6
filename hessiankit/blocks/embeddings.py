"""What stands in front of the blocks: patches or token ids to tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.blocks.feedforward import weight
from hessiankit.errors import InputError, check_sizes


def _positions(length: int, d_model: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(length, d_model) / math.sqrt(d_model))


class PatchEmbedding(nn.Module):
    """Patches X to tokens X W_E + 1 b_E^T + P, with a learned position P for each token."""

    def __init__(self, patch_dim: int, seq_len: int, d_model: int) -> None:
        super().__init__()
        self.W_E = weight(patch_dim, d_model)
        self.b_E = nn.Parameter(torch.zeros(d_model))
        self.P = _positions(seq_len, d_model)

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches ``(B, L, patch_dim)`` to tokens ``(B, L, d_model)``."""
        return patches @ self.W_E + self.b_E + self.P


class TokenEmbedding(nn.Module):
    """Token ids to rows of W_E, plus a learned position P where ``max_len`` is given.

    Args:
        vocab_size: Number of rows of W_E.
        d_model: Width of a token.
        max_len: Number of learned positions; None for none.

    >>> embedding = TokenEmbedding(5, 2)
    >>> bool((embedding(torch.tensor([3])) == embedding.W_E[3]).all())
    True
    """

    P: nn.Parameter | None

    def __init__(self, vocab_size: int, d_model: int, *, max_len: int | None = None) -> None:
        super().__init__()
        check_sizes("TokenEmbedding", vocab_size=vocab_size, d_model=d_model, **({} if max_len is None else {"max_len": max_len}))
        self.W_E = nn.Parameter(torch.randn(vocab_size, d_model) / math.sqrt(d_model))
        self.register_parameter("P", None if max_len is None else _positions(max_len, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        """Map integer ids ``(B, L)`` or ``(L,)`` to tokens ``(..., L, d_model)``.

        Raises:
            InputError: If the ids are no integers or out of range, or the sequence is longer than the learned positions.
        """
        if ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"TokenEmbedding: the token ids are {ids.dtype}; expected torch.int64 (or int32) of shape (B, L)")
        length = ids.shape[-1]
        if self.P is not None and length > self.P.shape[0]:
            raise InputError(
                f"TokenEmbedding: the sequence has {length} tokens and there are {self.P.shape[0]} learned positions; "
                f"pass max_len={length} or more, or shorter sequences"
            )
        try:  # asking for the range beforehand would read the ids, which a tracer cannot
            tokens = F.embedding(ids, self.W_E)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            raise InputError(
                f"TokenEmbedding: token ids from {low} to {high}; expected 0 to {self.W_E.shape[0] - 1} (vocab_size - 1)"
            ) from None
        return tokens if self.P is None else tokens + self.P[:length]

    def extra_repr(self) -> str:
        """Return what ``print(embedding)`` says beside the class name."""
        positions = "" if self.P is None else f", {self.P.shape[0]} positions"
        return f"{self.W_E.shape[0]} tokens, d_model={self.W_E.shape[1]}{positions}"
