"""Hand-written attention, activations, feed-forward network and norms, for sequences with any leading axes, and cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., Tensor]
ACTIVATIONS: dict[str, Function] = {
    "relu": lambda x: x.clamp_min(0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: torch.expm1(2 * x) / (torch.expm1(2 * x) + 2),
    "identity": lambda x: x,
}


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


def feedforward(Y, W_1, W_2, b_1=0, b_2=0, kind="relu", residual=True):
    out = ACTIVATIONS[kind](Y @ W_1 + b_1) @ W_2 + b_2
    return Y + out if residual else out


def normalised(X, eps=0.0, norm="layernorm"):
    M = X - X.mean(-1, keepdim=True) if norm == "layernorm" else X
    return M / (M.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(eps, dims=1):
    def f(X, gamma=1.0, beta=0.0):
        axes = tuple(range(-dims, 0))
        centred = X - X.mean(axes, keepdim=True)
        return centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt() * gamma + beta

    return f


def rms_norm(eps, dims=1):
    def f(X, gamma=1.0):
        return X / (X.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps).sqrt() * gamma

    return f


def cross_entropy(labels, smoothing=0.0, normalizer=None, ignored=-100):
    """Written with logarithms of sums, one class at a time."""

    def f(logits, _labels=None):
        kept = labels != ignored
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        target = torch.nn.functional.one_hot(labels.where(kept, 0), logits.shape[-1]).to(logits)
        target = (1 - smoothing) * target + smoothing / logits.shape[-1]
        losses = -(target * log_p).sum(-1) * kept
        return losses.sum() / (kept.sum() if normalizer is None else normalizer)

    return f
