"""Hand-written attention, feed-forward network and block, and all their second derivatives in one reverse-over-reverse sweep."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., Tensor]


def attention(X, W_Q, W_K, W_V, W_O=None, *, causal=False, mask=None, scale=None, heads=1, kv_heads=None):
    """Softmax attention of sequences with any leading axes; heads lie side by side in the columns, ``kv_heads`` of them shared."""
    kv_heads = kv_heads or heads
    keys, values = W_K.chunk(kv_heads, -1), W_V.chunk(kv_heads, -1)
    outputs = [None] * heads if W_O is None else W_O.chunk(heads, -2)
    mask = torch.ones(X.shape[-2], X.shape[-2], dtype=torch.bool).tril() if causal else mask
    contexts = []
    for h, (q, o) in enumerate(zip(W_Q.chunk(heads, -1), outputs, strict=True)):
        k, v = (weights[h * kv_heads // heads] for weights in (keys, values))
        T = (X @ q) @ (X @ k).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        context = torch.softmax(T if mask is None else T.masked_fill(~mask, -math.inf), -1) @ X @ v
        contexts.append(context if o is None else context @ o)
    return sum(contexts)


def activation(kind, U):
    if kind == "relu":
        return U * (U > 0)
    return U * torch.sigmoid(U) if kind == "silu" else U * 0.5 * (1 + torch.erf(U / math.sqrt(2)))


def feedforward(Y, W_1, W_2, b_1=0, b_2=0, kind="relu", residual=True):
    out = activation(kind, Y @ W_1 + b_1) @ W_2 + b_2
    return Y + out if residual else out


def normalised(X, eps=0.0, norm="layernorm"):
    M = X - X.mean(-1, keepdim=True) if norm == "layernorm" else X
    return M / (M.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(X, gamma=1.0, beta=0.0, eps=0.0):
    return normalised(X, eps) * gamma + beta


def post_norm_block(kind="relu", causal=False, eps=(0.0, 0.0), attend=attention):
    """The block as a function of its arguments by name; ``attend`` takes X and the weights that the block does not know."""

    def block(X, W_1, W_2, b_1=0, b_2=0, gamma_1=1.0, beta_1=0.0, gamma_2=1.0, beta_2=0.0, **weights):
        Y = layer_norm(X + attend(X, **weights, causal=causal), gamma_1, beta_1, eps[0])
        return layer_norm(feedforward(Y, W_1, W_2, b_1, b_2, kind), gamma_2, beta_2, eps[1])

    return block
