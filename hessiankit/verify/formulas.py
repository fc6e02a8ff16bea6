"""The vec_r formulas of the chapters against the fast path, on a small twin of a block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from derivations.transformer import PostNormBlockAt
from hessiankit.blocks import TransformerBlock
from hessiankit.curvature import hessian

LENGTH, WIDTH, HEAD, HIDDEN = 3, 4, 2, 5  # unequal, so that a swapped index cannot hide

LETTERS = {"norm_1.weight": "gamma_1", "norm_1.bias": "beta_1", "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2"}


def letter(name: str) -> str:
    """Return the papers' letter of a block's parameter.

    >>> letter("attention.W_Q"), letter("norm_2.weight")
    ('W_Q', 'gamma_2')
    """
    return LETTERS.get(name, name.rpartition(".")[2])


def point_of(block: TransformerBlock, x: Tensor) -> PostNormBlockAt | None:
    """Return the chapters' formulas for a block at one sequence (L, d_model), or None where they are not written yet.

    They are written for the post-norm block with LayerNorm, one head and no attention biases.
    """
    attention, norm = block.attention, block.norm_1
    if not _written(block) or not isinstance(norm, torch.nn.LayerNorm):
        return None
    given = {letter(name): p.detach() for name, p in block.named_parameters()}
    length = x.shape[0]
    mask = torch.zeros(length, length).to(x).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    return PostNormBlockAt(
        X=x, **given, mask=mask if attention.causal else None, eps=norm.eps, activation=block.feedforward.activation
    )


def _written(block: TransformerBlock) -> bool:
    attention = block.attention
    plain = attention.n_heads == 1 and not attention.rotary and all(getattr(attention, b) is None for b in ("b_Q", "b_O"))
    return block.placement == "post" and plain and block.feedforward.W_G is None


def formula_errors(block: TransformerBlock, seed: int) -> dict[str, float]:
    """Compare fast path and formulas for every pair of parameters on a twin of the block with tiny unequal widths.

    Returns:
        The largest difference of each block pair relative to its largest entry; empty where no formulas are written.
    """
    if not _written(block):
        return {}
    generator = torch.Generator().manual_seed(seed)
    attention, feedforward = block.attention, block.feedforward
    norm = block.norm_1
    assert isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm))
    affine = norm.weight is not None
    twin = TransformerBlock(
        WIDTH,
        HIDDEN,
        attention.n_heads,
        block.placement,
        "layernorm" if isinstance(norm, torch.nn.LayerNorm) else "rmsnorm",
        feedforward.activation,
        feedforward.b_1 is not None,
        attention_bias=attention.b_Q is not None,
        output_projection=attention.W_O is not None,
        d_k=HEAD,
        causal=attention.causal,
        eps=norm.eps or 1e-6,
        affine=affine,
    ).double()
    x, target = (torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    for p in twin.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7 + (0.5 if p.ndim == 1 else 0.0)
    point = point_of(twin, x)
    if point is None:
        return {}
    fast = hessian(twin, x, target, handshake=False)
    whole = float(fast.matrix.abs().max())
    errors = {}
    for a, i in enumerate(fast.names):
        for j in fast.names[a:]:
            formula = point.loss_hessian(target, letter(i), letter(j)).total.dense()
            mine = fast.block(i, j)
            difference, scale = float((formula - mine).abs().max()), float(formula.abs().max())
            vanishes = max(difference, scale) <= 1e-14 * whole
            errors[f"{i} x {j} (formula)"] = 0.0 if vanishes else difference / scale if scale else math.inf
    return errors
