"""Transformer blocks as ordinary ``nn.Module``s in the papers' letters.

A weight ``W`` multiplies from the right, ``X @ W`` with tokens as rows, so that ``W.reshape(-1)`` is the paper's
vec_r(W) and a block of the Hessian can be laid beside its formula without any re-ordering. Each norm placement is an
equation of two lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.errors import InputError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
NORMS = ("layernorm", "rmsnorm")


def _weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(rows))


def _check_sizes(who: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{who}: {name}={size}, expected at least 1")


def _norm(kind: str, d_model: int, eps: float, affine: bool) -> nn.Module:
    if kind == "layernorm":
        return nn.LayerNorm(d_model, eps=eps, elementwise_affine=affine)
    if kind == "rmsnorm":
        return nn.RMSNorm(d_model, eps=eps, elementwise_affine=affine)
    raise InputError(f"TransformerBlock: norm={kind!r} is not known; choose one of {', '.join(NORMS)}")


class Attention(nn.Module):
    """Softmax self-attention F(X) = concat_h( softmax(X W_Q^h (X W_K^h)^T / sqrt(d_K) + mask) X W_V^h ) [W_O].

    Args:
        d_model: Width of a token, d_V in the papers.
        n_heads: Number of heads; W_Q, W_K, W_V hold the heads side by side in their columns.
        d_k: Width of a query and a key per head; ``d_model / n_heads`` by default.
        output_projection: Whether W_O follows. The papers' single head has none.
        bias: Whether queries, keys, values (and the output) have biases.
        causal: Whether a token attends to itself and earlier tokens only.
    """

    W_O: nn.Parameter | None
    b_Q: nn.Parameter | None
    b_K: nn.Parameter | None
    b_V: nn.Parameter | None
    b_O: nn.Parameter | None

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_k: int | None = None,
        output_projection: bool = False,
        bias: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes("Attention", d_model=d_model, n_heads=n_heads, **({} if d_k is None else {"d_k": d_k}))
        if d_model % n_heads:
            raise InputError(f"Attention: d_model={d_model} does not split into n_heads={n_heads} equal heads")
        self.n_heads, self.causal = n_heads, causal
        self.d_k = d_k if d_k is not None else d_model // n_heads
        self.W_Q = _weight(d_model, n_heads * self.d_k)
        self.W_K = _weight(d_model, n_heads * self.d_k)
        self.W_V = _weight(d_model, d_model)
        self.register_parameter("W_O", _weight(d_model, d_model) if output_projection else None)
        for name, width in (("b_Q", n_heads * self.d_k), ("b_K", n_heads * self.d_k), ("b_V", d_model)):
            self.register_parameter(name, nn.Parameter(torch.zeros(width)) if bias else None)
        self.register_parameter("b_O", nn.Parameter(torch.zeros(d_model)) if bias and output_projection else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``(..., L, d_model)`` to ``(..., L, d_model)``."""
        q = self._heads(x, self.W_Q, self.b_Q)  # (..., n_heads, L, d_k)
        k = self._heads(x, self.W_K, self.b_K)  # (..., n_heads, L, d_k)
        v = self._heads(x, self.W_V, self.b_V)  # (..., n_heads, L, d_model / n_heads)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)  # (..., n_heads, L, L)
        if self.causal:
            length = x.shape[-2]
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(future, -math.inf)
        out = torch.softmax(logits, dim=-1) @ v  # (..., n_heads, L, d_model / n_heads)
        if self.n_heads > 1:
            out = out.transpose(-3, -2).flatten(-2)  # (..., L, d_model)
        if self.W_O is not None:
            out = out @ self.W_O
        return out if self.b_O is None else out + self.b_O

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x @ weight if bias is None else x @ weight + bias  # (..., L, n_heads * width)
        return y if self.n_heads == 1 else y.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)


class FeedForward(nn.Module):
    """Position-wise feed-forward network sigma(Y W_1 + 1 b_1^T) W_2 + 1 b_2^T."""

    b_1: nn.Parameter | None
    b_2: nn.Parameter | None

    def __init__(self, d_model: int, d_ff: int, *, activation: str = "relu", bias: bool = False) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f"FeedForward: activation={activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
        _check_sizes("FeedForward", d_model=d_model, d_ff=d_ff)
        self.activation = activation
        self.W_1 = _weight(d_model, d_ff)
        self.register_parameter("b_1", nn.Parameter(torch.zeros(d_ff)) if bias else None)
        self.W_2 = _weight(d_ff, d_model)
        self.register_parameter("b_2", nn.Parameter(torch.zeros(d_model)) if bias else None)

    def forward(self, y: Tensor) -> Tensor:
        """Map tokens ``(..., d_model)`` to ``(..., d_model)``."""
        hidden = y @ self.W_1 if self.b_1 is None else y @ self.W_1 + self.b_1  # (..., d_ff)
        out = ACTIVATIONS[self.activation](hidden) @ self.W_2  # (..., d_model)
        return out if self.b_2 is None else out + self.b_2


def _post(block: TransformerBlock, x: Tensor) -> Tensor:
    y = block.norm_1(x + block.attention(x))
    return block.norm_2(y + block.feedforward(y))


def _pre(block: TransformerBlock, x: Tensor) -> Tensor:
    y = x + block.attention(block.norm_1(x))
    return y + block.feedforward(block.norm_2(y))


PLACEMENTS: dict[str, Callable[[TransformerBlock, Tensor], Tensor]] = {"post": _post, "pre": _pre}


class TransformerBlock(nn.Module):
    """One transformer block; by default the post-norm block of Closing the Curvature Gap.

    ``post``: Y = LN(X + F(X)), Z = LN(Y + FFN(Y)).  ``pre``: Y = X + F(LN(X)), Z = Y + FFN(LN(Y)).

    Args:
        d_model: Width of a token, d_V in the papers.
        d_ff: Hidden width of the feed-forward network.
        n_heads: Number of attention heads.
        placement: Where the norms stand: ``"post"`` or ``"pre"``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        activation: One of ``relu, leaky_relu, gelu, gelu_tanh, silu, tanh, identity``.
        bias: Whether the feed-forward network has b_1 and b_2.
        attention_bias: Whether queries, keys and values have biases.
        output_projection: Whether W_O follows the heads; by default with more than one head.
        d_k: Width of a query and a key per head; ``d_model / n_heads`` by default.
        causal: Whether a token attends to itself and earlier tokens only.
        eps: Added to the variance, inside the root.
        affine: Whether the norms have a gain (and, for LayerNorm, a bias).

    Shape:
        ``(B, L, d_model)`` or ``(L, d_model)`` to the same.

    >>> block = TransformerBlock(d_model=4, d_ff=8)
    >>> block(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int = 1,
        placement: str = "post",
        norm: str = "layernorm",
        activation: str = "relu",
        bias: bool = False,
        *,
        attention_bias: bool = False,
        output_projection: bool | None = None,
        d_k: int | None = None,
        causal: bool = False,
        eps: float = 1e-5,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if placement not in PLACEMENTS:
            raise InputError(f"TransformerBlock: placement={placement!r} is not known; choose one of {', '.join(PLACEMENTS)}")
        project = n_heads > 1 if output_projection is None else output_projection
        self.placement, self.d_model = placement, d_model
        self.attention = Attention(d_model, n_heads, d_k=d_k, output_projection=project, bias=attention_bias, causal=causal)
        self.norm_1 = _norm(norm, d_model, eps, affine)
        self.feedforward = FeedForward(d_model, d_ff, activation=activation, bias=bias)
        self.norm_2 = _norm(norm, d_model, eps, affine)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``(B, L, d_model)`` or ``(L, d_model)`` to the same shape."""
        return PLACEMENTS[self.placement](self, x)

    def extra_repr(self) -> str:
        """Return what ``print(block)`` says beside the class name."""
        return f"placement={self.placement}"


class PatchEmbedding(nn.Module):
    """Patches X to tokens X W_E + 1 b_E^T + P, with a learned position P for each token."""

    def __init__(self, patch_dim: int, seq_len: int, d_model: int) -> None:
        super().__init__()
        self.W_E = _weight(patch_dim, d_model)
        self.b_E = nn.Parameter(torch.zeros(d_model))
        self.P = nn.Parameter(torch.randn(seq_len, d_model) / math.sqrt(d_model))

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches ``(B, L, patch_dim)`` to tokens ``(B, L, d_model)``."""
        return patches @ self.W_E + self.b_E + self.P


class MeanPoolHead(nn.Module):
    """Tokens Z to class logits: (1/L) 1^T Z W_C + b_C^T."""

    def __init__(self, d_model: int, n_classes: int) -> None:
        super().__init__()
        self.W_C = _weight(d_model, n_classes)
        self.b_C = nn.Parameter(torch.zeros(n_classes))

    def forward(self, z: Tensor) -> Tensor:
        """Map tokens ``(B, L, d_model)`` to logits ``(B, n_classes)``."""
        return z.mean(-2) @ self.W_C + self.b_C


class VisionTransformer(nn.Module):
    """Patches -> linear embedding + positions -> blocks -> mean over tokens -> class logits.

    The classifier of Closing the Curvature Gap, Section 5: the outputs are averaged over the tokens.

    Args:
        patch_dim: Entries of one patch.
        seq_len: Number of patches L.
        n_classes: Number of logits.
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward networks.
        n_blocks: Number of transformer blocks.
        block: Options passed on to :class:`TransformerBlock`.

    Shape:
        ``(B, L, patch_dim)`` to ``(B, n_classes)``.

    >>> sum(p.numel() for p in VisionTransformer(4, 16, 10, d_model=16, d_ff=64, bias=True).parameters())
    3466
    """

    def __init__(
        self, patch_dim: int, seq_len: int, n_classes: int, *, d_model: int, d_ff: int, n_blocks: int = 1, **block: Any
    ) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(patch_dim, seq_len, d_model)
        self.blocks = nn.ModuleList(TransformerBlock(d_model, d_ff, **block) for _ in range(n_blocks))
        self.head = MeanPoolHead(d_model, n_classes)

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches ``(B, L, patch_dim)`` to logits ``(B, n_classes)``."""
        x = self.embedding(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
