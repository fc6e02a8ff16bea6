"""Parts of a block written out by hand, for one sequence (L, d_model): loops over heads and tokens, complex rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from transformer_reference import ACTIVATIONS


def norm_by_hand(kind: str, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        row = row - row.sum() / len(row) if kind == "layernorm" else row
        row = row / math.sqrt(float((row * row).sum()) / len(row) + eps)
        rows.append(row if gain is None else row * gain)
    out = torch.stack(rows).reshape(x.shape)
    return out if bias is None else out + bias


def rotate_by_hand(x: Tensor, theta: float) -> Tensor:
    """Features i and i + d/2 of the token at position p, as one complex number, times exp(i p theta^(-2 i / d))."""
    half = x.shape[-1] // 2
    out = x.clone()
    for p in range(x.shape[0]):
        for i in range(half):
            z = complex(x[p, i], x[p, i + half]) * complex(math.cos(a := p / theta ** (i / half)), math.sin(a))
            out[p, i], out[p, i + half] = z.real, z.imag
    return out


def attention_by_hand(
    x: Tensor,
    p: Mapping[str, Tensor],
    heads: int,
    causal: bool,
    *,
    kv_heads: int | None = None,
    kind: str = "layernorm",
    normed: str = "",
    scope: str = "head",
    eps: float = 1e-5,
    theta: float | None = None,
    padded: tuple[int, ...] = (),
) -> Tensor:
    """softmax(q_i . k_j / sqrt(d_K)) over the j that i sees, head by head and token by token."""
    length, kv = x.shape[0], kv_heads or heads

    def norm(letter: str, y: Tensor, at: str) -> Tensor:
        if letter not in normed or scope != at:
            return y
        return norm_by_hand(kind, y, p.get(f"norm_{letter}.weight"), p.get(f"norm_{letter}.bias"), eps)

    def heads_of(letter: str, count: int) -> list[Tensor]:
        y = norm(letter, x @ p[f"W_{letter.upper()}"] + p.get(f"b_{letter.upper()}", 0), "full")
        return [norm(letter, part, "head") for part in y.tensor_split(count, dim=1)]

    q, k, v = heads_of("q", heads), heads_of("k", kv), heads_of("v", kv)
    if theta is not None:
        q, k = ([rotate_by_hand(part, theta) for part in parts] for parts in (q, k))
    contexts = []
    for h in range(heads):
        group = h * kv // heads
        rows = []
        for i in range(length):
            seen = [j for j in range(length) if (j <= i or not causal) and (j not in padded or j == i)]
            score = torch.stack([q[h][i] @ k[group][j] / math.sqrt(q[h].shape[1]) for j in seen]).exp()
            rows.append(sum(s * v[group][j] for s, j in zip(score / score.sum(), seen, strict=True)))
        contexts.append(norm("c", torch.stack(rows), "head"))
    c = norm("c", torch.cat(contexts, 1), "full")
    return c @ p["W_O"] + p.get("b_O", 0) if "W_O" in p else c


def feedforward_by_hand(y: Tensor, p: Mapping[str, Tensor], activation: str) -> Tensor:
    hidden = y @ p["W_1"] + p.get("b_1", 0)
    if activation == "swiglu":
        gate = y @ p["W_G"] + p.get("b_G", 0)
        return (ACTIVATIONS["silu"](gate) * hidden) @ p["W_2"] + p.get("b_2", 0)
    return ACTIVATIONS[activation](hidden) @ p["W_2"] + p.get("b_2", 0)
