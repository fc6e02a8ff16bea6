"""A whole GPT-2 of toy size, in plain torch: learned positions, pre-norm blocks, GELU, a head that may be tied."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention


class _Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); queries, keys and values from one linear layer."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.project = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor, future: Tensor | None) -> Tensor:
        """Map (B, L, d) to the same; ``future`` is True where a token must not look, None: torch's fused attention."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.n_heads, -1).transpose(1, 2) for part in parts)  # (B, heads, L, d/heads)
        if future is None:
            heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.transpose(-2, -1) / math.sqrt(width // self.n_heads)  # (B, heads, L, L)
            heads = torch.softmax(logits.masked_fill(future, -math.inf), -1) @ v
        x = x + self.project(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm_2(x)), approximate="tanh"))


class TinyGPT2(nn.Module):
    """Token ids (B, L) to logits (B, L, vocabulary).

    >>> model = TinyGPT2(64, 16, tied=True)
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([2, 16, 64]), 28032)
    """

    head: nn.Parameter | None
    future: Tensor | None

    def __init__(
        self,
        vocabulary: int,
        context: int,
        *,
        d_model: int = 32,
        n_heads: int = 4,
        n_layers: int = 2,
        tied: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d_model), nn.Parameter(0.3 * torch.randn(context, d_model))
        self.blocks = nn.ModuleList(_Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.register_parameter("head", None if tied else nn.Parameter(torch.randn(vocabulary, d_model) / math.sqrt(d_model)))
        future = None if fused else torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token."""
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions[:length]
        for block in self.blocks:
            x = block(x, None if self.future is None else self.future[:length, :length])
        return linear(self.norm(x), self.tokens.weight if self.head is None else self.head)
