"""Softmax self-attention, written out: heads, grouped queries, norms of queries, keys, values and context, rotary positions.

Feature i of a head is paired with feature i + d_k / 2, as in Hugging Face's Llama (``rotate_half``), not with feature i + 1 as
in the paper. The two differ by a fixed permutation of the columns of W_Q and W_K within each head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from derivations.rotary_angles import angles
from hessiankit.blocks.feedforward import linear, weight
from hessiankit.blocks.norms import make_norm
from hessiankit.support.errors import InputError, check_heads, check_sizes, unknown

THETA = 10_000.0


def rotate(x: Tensor, theta: float = THETA) -> Tensor:
    """Turn the pairs (x_i, x_{i + d_k/2}) of the token at position p by the angle p theta^(-2 i / d_k).

    Args:
        x: Queries or keys, ``(..., L, d_k)`` with an even d_k.
        theta: Base of the frequencies.

    Returns:
        The same shape.

    >>> rotate(torch.ones(2, 2, dtype=torch.float64))  # position 0 stays; position 1: (cos 1 - sin 1, cos 1 + sin 1)
    tensor([[ 1.0000,  1.0000],
            [-0.3012,  1.3818]], dtype=torch.float64)
    """
    turn = angles(x.shape[-2], x.shape[-1], theta).repeat(1, 2)  # (L, d_k)
    first, second = x.chunk(2, -1)
    return x * turn.cos().to(x) + torch.cat([-second, first], -1) * turn.sin().to(x)


NORM_LETTERS = "qkvc"
SCOPES = ("head", "full")


class Attention(nn.Module):
    """Softmax self-attention F(X) = concat_h( softmax(Q_h K_h^T / sqrt(d_K) + mask) V_h ) [W_O], Q_h = X W_Q^h and so on.

    In this order: projection, norm of q, k, v, rotation of q and k, attention, norm of the context c (the output of the heads),
    W_O. The norms are attn_# of HybridNorm (Eqs. 7, 35-39); their order relative to the rotation is that of its code.

    Args:
        d_model: Width of a token, d_V in the papers.
        n_heads: Number of heads; W_Q, W_K, W_V hold the heads side by side in their columns.
        n_kv_heads: Number of heads of keys and values; query head h reads key head h // (n_heads / n_kv_heads).
        output_projection: Whether W_O follows. The papers' single head has none.
        bias: Whether queries, keys, values (and the output) have biases.
        norms: Letters of those of q, k, v, c that have a norm, such as ``"qkv"``.
        norm_scope: ``"head"``: over each head by itself, with one gain of the head's width that all heads share (HybridNorm,
            Qwen3); ``"full"``: over all heads side by side, with a gain for each (OLMo 2).

    The other options are those of :class:`hessiankit.TransformerBlock`.

    Raises:
        InputError: If heads or groups of heads do not divide what they split, or a name is not known.
    """

    W_O: nn.Parameter | None
    b_Q: nn.Parameter | None
    b_K: nn.Parameter | None
    b_V: nn.Parameter | None
    b_O: nn.Parameter | None
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    norm_v: nn.Module | None
    norm_c: nn.Module | None

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        n_kv_heads: int | None = None,
        output_projection: bool = False,
        bias: bool = False,
        causal: bool = False,
        rotary: bool = False,
        rotary_theta: float = THETA,
        norms: str = "",
        norm: str = "layernorm",
        norm_scope: str = "head",
        eps: float = 1e-5,
        affine: bool = True,
    ) -> None:
        super().__init__()
        sizes = {name: n for name, n in (("d_k", d_k), ("d_v", d_v), ("n_kv_heads", n_kv_heads)) if n is not None}
        check_sizes("Attention", d_model=d_model, n_heads=n_heads, **sizes)
        check_heads("Attention", d_model, n_heads, n_kv_heads, rotary, d_k, d_v)
        self.n_heads, self.causal, self.rotary, self.rotary_theta = n_heads, causal, rotary, rotary_theta
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.d_k = d_model // n_heads if d_k is None else d_k
        self.d_v = d_model // n_heads if d_v is None else d_v
        self.norm_scope = norm_scope
        if n_heads * self.d_v != d_model and not output_projection:
            raise InputError(
                f"Attention: n_heads={n_heads} values of d_v={self.d_v} do not make up d_model={d_model}; "
                "pass output_projection=True"
            )
        if norm_scope not in SCOPES:
            raise unknown("Attention", "norm_scope", norm_scope, SCOPES)
        if set(norms) - set(NORM_LETTERS):
            raise InputError(f"Attention: norms={norms!r}, expected letters of {NORM_LETTERS!r}: queries, keys, values, context")
        q, k, v, c = n_heads * self.d_k, self.n_kv_heads * self.d_k, self.n_kv_heads * self.d_v, n_heads * self.d_v
        self.W_Q = weight(d_model, q)
        self.W_K = weight(d_model, k)
        self.W_V = weight(d_model, v)
        self.register_parameter("W_O", weight(c, d_model) if output_projection else None)
        for name, width in (("b_Q", q), ("b_K", k), ("b_V", v)):
            self.register_parameter(name, nn.Parameter(torch.zeros(width)) if bias else None)
        self.register_parameter("b_O", nn.Parameter(torch.zeros(d_model)) if bias and output_projection else None)
        widths = {"q": (self.d_k, q), "k": (self.d_k, k), "v": (self.d_v, v), "c": (self.d_v, c)}
        for letter, (head, full) in widths.items():
            width = head if norm_scope == "head" else full
            layer = make_norm("Attention", norm, width, eps=eps, affine=affine) if letter in norms else None
            setattr(self, f"norm_{letter}", layer)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Map tokens ``(..., L, d_model)`` to ``(..., L, d_model)``.

        Args:
            x: The tokens.
            key_padding_mask: Booleans ``(..., L)``, True where a token is padding, ignored by all other tokens, as in
                ``nn.MultiheadAttention``. A padded token also attends to itself, so that no softmax is empty.
        """
        q = self._heads(x, self.W_Q, self.b_Q, self.norm_q, self.n_heads)  # (..., n_heads, L, d_k)
        k = self._heads(x, self.W_K, self.b_K, self.norm_k, self.n_kv_heads)  # (..., n_kv_heads, L, d_k)
        v = self._heads(x, self.W_V, self.b_V, self.norm_v, self.n_kv_heads)  # (..., n_kv_heads, L, d_v)
        if self.rotary:
            q, k = rotate(q, self.rotary_theta), rotate(k, self.rotary_theta)
        if self.n_kv_heads < self.n_heads:
            repeats = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)  # (..., n_heads, L, d_k), (..., d_v)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)  # (..., n_heads, L, L)
        hidden = self._hidden(x, key_padding_mask)
        if hidden is not None:
            logits = logits.masked_fill(hidden, -math.inf)
        c = torch.softmax(logits, dim=-1) @ v  # (..., n_heads, L, d_v)
        if self.norm_c is not None and self.norm_scope == "head":
            c = self.norm_c(c)
        if self.n_heads > 1:
            c = c.transpose(-3, -2).flatten(-2)  # (..., L, n_heads d_v)
        if self.norm_c is not None and self.norm_scope == "full":
            c = self.norm_c(c)
        if self.W_O is not None:
            c = c @ self.W_O  # (..., L, d_model)
        return c if self.b_O is None else c + self.b_O

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.Module | None, heads: int) -> Tensor:
        """Project tokens and split them into heads, normalised before or after; a single head has no axis of its own."""
        y = linear(x, weight, bias)  # (..., L, heads * width)
        if norm is not None and self.norm_scope == "full":
            y = norm(y)
        if self.n_heads > 1:
            y = y.unflatten(-1, (heads, -1)).transpose(-3, -2)  # (..., heads, L, width)
        return norm(y) if norm is not None and self.norm_scope == "head" else y

    def _hidden(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
        """Return which keys (last axis) are hidden from which queries (last but one), or None without a mask."""
        length = x.shape[-2]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        if key_padding_mask is None:
            return causal
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != x.shape[:-1]:
            raise InputError(
                f"Attention: key_padding_mask is {key_padding_mask.dtype} {tuple(key_padding_mask.shape)}; expected "
                f"torch.bool {tuple(x.shape[:-1])}, True where a token is padding"
            )
        off_diagonal = ~torch.eye(length, dtype=torch.bool, device=x.device)
        padding = key_padding_mask[..., None, :] & off_diagonal  # (..., L, L)
        if self.n_heads > 1:
            padding = padding[..., None, :, :]  # (..., 1, L, L)
        return padding if causal is None else padding | causal

    def extra_repr(self) -> str:
        """Return the options shown by ``print(attention)``."""
        heads = f"{self.n_heads} heads" if self.n_heads == self.n_kv_heads else f"{self.n_heads} heads on {self.n_kv_heads}"
        parts = (heads, f"d_k={self.d_k}", f"d_v={self.d_v}", *(("causal",) if self.causal else ()))
        return ", ".join((*parts, *((f"rotary theta={self.rotary_theta:g}",) if self.rotary else ())))
