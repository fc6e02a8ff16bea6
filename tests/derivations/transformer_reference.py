"""Hand-written attention, feed-forward network and block, and all their second derivatives in one reverse-over-reverse sweep."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., Tensor]


def attention(X, W_Q, W_K, W_V, W_O=None, causal=False, scale=None):
    T = (X @ W_Q) @ (X @ W_K).T * (1 / math.sqrt(W_Q.shape[1]) if scale is None else scale)
    weights = torch.exp(T - T.max(1, keepdim=True).values.detach())
    weights = weights.tril() if causal else weights
    F = (weights / weights.sum(1, keepdim=True)) @ (X @ W_V)
    return F if W_O is None else F @ W_O


def activation(kind, U):
    if kind == "relu":
        return U * (U > 0)
    return U * torch.sigmoid(U) if kind == "silu" else U * 0.5 * (1 + torch.erf(U / math.sqrt(2)))


def feedforward(Y, W_1, W_2, b_1=0, b_2=0, kind="relu", residual=True):
    out = activation(kind, Y @ W_1 + b_1) @ W_2 + b_2
    return Y + out if residual else out


def layer_norm(X, gamma=1.0, beta=0.0, eps=0.0):
    centred = X - X.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + beta


def post_norm_block(kind="relu", causal=False, eps=(0.0, 0.0), attend=attention):
    """The block as a function of its arguments by name; ``attend`` takes X and the weights that the block does not know."""

    def block(X, W_1, W_2, b_1=0, b_2=0, gamma_1=1.0, beta_1=0.0, gamma_2=1.0, beta_2=0.0, **weights):
        Y = layer_norm(X + attend(X, **weights, causal=causal), gamma_1, beta_1, eps[0])
        return layer_norm(feedforward(Y, W_1, W_2, b_1, b_2, kind), gamma_2, beta_2, eps[1])

    return block
