"""The definitions of the paper, written out: what its rows compare closed forms and blocks with.

Norm is RMSNorm without gain, eps = 0 unless it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.normalization import RMSNormAt
from derivations.stage import Stage, leaf
from hessiankit.blocks import TransformerBlock
from hessiankit.theory.formulas.block_at import BlockAt, attention_stage
from papers.drawing import Draw
from papers.notation import rms_norm

LETTERS = ("W_Q", "W_K", "W_V", "W_O")


def attn(Q: Tensor, K: Tensor, V: Tensor, normed: str = "", causal: bool = False) -> Tensor:
    """Return attn_#(Q, K, V), # the letters in ``normed`` (Eqs. 1, 7, 35-39)."""
    Q, K, V = (rms_norm(Y) if letter in normed else Y for letter, Y in zip("qkv", (Q, K, V), strict=True))
    logits = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    C = logits.softmax(-1) @ V
    return rms_norm(C) if "c" in normed else C


def mha(X: Tensor, W: dict[str, Tensor], n_heads: int, normed: str = "") -> Tensor:
    """Return Concat(head_1, ..., head_h) W_O (Eqs. 2, 40)."""
    Q, K, V = (torch.chunk(X @ W[name], n_heads, -1) for name in LETTERS[:3])
    return torch.cat([attn(*head, normed) for head in zip(Q, K, V, strict=True)], -1) @ W["W_O"]


def swiglu(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Return the feed-forward network of the experiments."""
    return (F.silu(X @ W["W_G"]) * (X @ W["W_1"])) @ W["W_2"]


@dataclass(frozen=True)
class HeadPoint:
    """One head of App. A at a point: tokens X, s x d; W_Q, W_K, W_V, d x d_k; W_O, d_k x d."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    causal: bool = field(default=False, kw_only=True)

    @staticmethod
    def draw(draw: Draw, s: int = 4, d: int = 5, d_k: int = 3, *, causal: bool = False) -> HeadPoint:
        """Return a generic point."""
        weights = (draw.normal(d, d_k), draw.normal(d, d_k), draw.normal(d, d_k), draw.normal(d_k, d))
        return HeadPoint(draw.normal(s, d), *weights, causal=causal)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V, W_O."""
        return self.W_Q, self.W_K, self.W_V, self.W_O

    @property
    def sizes(self) -> tuple[int, int, int]:
        """s, d and d_k."""
        return self.X.shape[0], self.X.shape[1], self.W_Q.shape[1]

    @property
    def mask(self) -> Tensor | None:
        """Where a token may look, None for everywhere."""
        return torch.ones(len(self.X), len(self.X), dtype=torch.bool).tril() if self.causal else None

    def pre_norm(self, X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor) -> Tensor:
        """S of Eq. 12."""
        N = rms_norm(X)
        return attn(N @ W_Q, N @ W_K, N @ W_V, causal=self.causal) @ W_O

    def qkv_norm(self, X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor) -> Tensor:
        """S_N of Eq. 13."""
        return attn(X @ W_Q, X @ W_K, X @ W_V, "qkv", self.causal) @ W_O

    @property
    def closed_pre_norm(self) -> AttentionAt:
        """The closed forms of S as a function of X_N and the weights."""
        return AttentionAt(RMSNormAt(self.X).value, *self.weights, mask=self.mask)

    @property
    def closed_qkv_norm(self) -> Stage:
        """The closed forms of S_N, composed from those of its parts."""
        return closed_attention(self, "qkv")


def closed_attention(head: HeadPoint, normed: str) -> Stage:
    """Return the closed forms of attn_#(X W_Q, X W_K, X W_V) W_O."""
    _, d, d_k = head.sizes
    options: dict[str, Any] = {"norm": "rmsnorm", "eps": 0.0, "affine": False, "output_projection": True, "causal": head.causal}
    block = TransformerBlock(d, 1, placement=f"{normed}-post", d_k=d_k, d_v=d_k, **options).double()
    values = {f"attention.{letter}": W for letter, W in zip(LETTERS, head.weights, strict=True)}
    return attention_stage(BlockAt(block, values), "S", leaf("X", head.X))
