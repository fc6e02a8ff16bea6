"""Embeddings of patches and tokens, and heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.blocks.feedforward import weight
from hessiankit.support.errors import InputError, check_sizes


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
        """Return the options shown by ``print(embedding)``."""
        positions = "" if self.P is None else f", {self.P.shape[0]} positions"
        return f"{self.W_E.shape[0]} tokens, d_model={self.W_E.shape[1]}{positions}"


class TokenHead(nn.Module):
    """Each token Z_i to logits over the vocabulary: Z W_C, or Z W_E^T where the head is tied to the embedding.

    Args:
        d_model: Width of a token.
        vocab_size: Number of logits.
        tied_to: The embedding's W_E ``(vocab_size, d_model)``, which then is this head's parameter too, not a copy.
    """

    W_C: nn.Parameter | None
    W_E: nn.Parameter | None

    def __init__(self, d_model: int, vocab_size: int, *, tied_to: nn.Parameter | None = None) -> None:
        super().__init__()
        check_sizes("TokenHead", d_model=d_model, vocab_size=vocab_size)
        self.register_parameter("W_E", tied_to)
        self.register_parameter("W_C", weight(d_model, vocab_size) if tied_to is None else None)

    def forward(self, z: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Map tokens ``(..., L, d_model)`` to logits ``(..., L, vocab_size)``, padded tokens included."""
        return z @ (self.W_E.T if self.W_C is None else self.W_C)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """Return the options shown by ``print(head)``."""
        return f"{_sizes(self.W_E.T)}, tied" if self.W_C is None else _sizes(self.W_C)  # type: ignore[union-attr]


class _ClassLogits(nn.Module):
    """One vector z of each sequence to class logits, z W_C + b_C^T; subclasses choose the vector."""

    def __init__(self, d_model: int, n_classes: int) -> None:
        super().__init__()
        check_sizes(type(self).__name__, d_model=d_model, n_classes=n_classes)
        self.W_C = weight(d_model, n_classes)
        self.b_C = nn.Parameter(torch.zeros(n_classes))

    def forward(self, z: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Map tokens ``(..., L, d_model)`` to logits ``(..., n_classes)``."""
        return self._read(z, key_padding_mask) @ self.W_C + self.b_C

    def _read(self, z: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the options shown by ``print(head)``."""
        return _sizes(self.W_C)


class MeanPoolHead(_ClassLogits):
    """Tokens Z to class logits, (1/L) 1^T Z W_C + b_C^T; with padding, the mean is over the tokens that are not padded."""

    def _read(self, z: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if key_padding_mask is None:
            return z.mean(-2)
        mask = (~key_padding_mask).to(z).unsqueeze(-1)  # (..., L, 1)
        return (z * mask).sum(-2) / mask.sum(-2)


class ClassHead(_ClassLogits):
    """One token to class logits, Z_i W_C + b_C^T: the first token, or with a causal mask the last that is not padding.

    The last token is read in a causal model, whose first token attends to itself only, as in Hugging Face's Llama; the first
    token in other models, as BERT's [CLS].

    Args:
        d_model: Width of a token.
        n_classes: Number of logits.
        last: Whether the last token is read.
    """

    def __init__(self, d_model: int, n_classes: int, *, last: bool = False) -> None:
        super().__init__(d_model, n_classes)
        self.last = last

    def _read(self, z: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if not self.last or key_padding_mask is None:
            return z[..., -1 if self.last else 0, :]
        # 1 at the last token that is not padding: as many such tokens from here to the end as one, this one among them
        mask = (~key_padding_mask).to(z)  # (..., L)
        last_token = mask * (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        return (z * last_token.unsqueeze(-1)).sum(-2)

    def extra_repr(self) -> str:
        """Return the options shown by ``print(head)``."""
        return f"{super().extra_repr()}, {'last' if self.last else 'first'} token"


def _sizes(matrix: Tensor) -> str:
    return f"{matrix.shape[0]} -> {matrix.shape[1]}"
