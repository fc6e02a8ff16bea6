"""Closed forms that lower the bounds of two modules: one head of attention, and a post-norm block around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_structured import post_block_structured
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.theory.bounding.structured import PRODUCT_ROUNDING, SLACK, Structured
from hessiankit.theory.formulas.block_at import causal_mask, is_the_papers

Pairs: TypeAlias = "dict[tuple[str, str], float]"
"""Bound on each block of the Hessian, by its two parameters."""
LEAKS = {"relu": 0.0, "leaky_relu": 0.01, "identity": 1.0}
"""The activations of the closed forms for a post-norm block, and their slopes below 0."""


def sharpened_a_priori(module: nn.Module, x: Tensor, t: Tensor, prior: BlockNorms) -> BlockNorms:
    """Return a-priori bounds for the mean squared error, lowered where the closed form of this module is smaller."""
    if not _has_closed_forms(module):
        return prior
    total, pairs = _closed_form(module, x, t, structured=False)
    norms = prior.matrix.clone()
    for (i, j), value in pairs.items():
        a, b = prior.names.index(i), prior.names.index(j)
        norms[a, b] = min(float(norms[a, b]), value + PRODUCT_ROUNDING * float(norms[a, b]))
    spectral = total + PRODUCT_ROUNDING * prior.whole if len(pairs) == len(prior.names) ** 2 else float("inf")
    return BlockNorms(prior.names, norms, prior.parts, spectral)


def sharpened_structured(module: nn.Module, x: Tensor, t: Tensor, bound: Structured) -> Structured:
    """Return structured bounds for the mean squared error, lowered where the closed form of this module is smaller."""
    if not _has_closed_forms(module):
        return bound
    total, pairs = _closed_form(module, x, t, structured=True)
    floor = PRODUCT_ROUNDING * bound.whole
    table = {pair: min(value, pairs.get(pair, value) * SLACK + floor) for pair, value in bound.pairs.items()}
    return Structured(
        min(bound.whole, total * SLACK + floor) if pairs.keys() == bound.pairs.keys() else bound.whole, table, bound.sites
    )


def _has_closed_forms(module: nn.Module) -> bool:
    if isinstance(module, Attention):
        return is_the_papers(module)
    if not isinstance(module, TransformerBlock) or module.placement != "post" or not is_the_papers(module.attention):
        return False
    network = module.feedforward
    return network.W_G is None and network.activation in LEAKS and network.b_1 is None and has_bare_layernorms(module)


def has_bare_layernorms(block: TransformerBlock) -> bool:
    """Tell whether both norms of a block are LayerNorms without gain and shift."""
    return all(isinstance(norm, nn.LayerNorm) and norm.weight is None for norm in (block.norm_1, block.norm_2))


def _closed_form(module: nn.Module, x: Tensor, t: Tensor, *, structured: bool) -> tuple[float, Pairs]:
    """Return the means over the samples of the bounds on the whole and on each block, by the parameters' full names."""
    samples = [_of_sample(module, X.detach().double(), T.detach().double(), structured) for X, T in zip(x, t, strict=True)]
    full = {name.rsplit(".", 1)[-1]: name for name, _ in module.named_parameters()}
    names, matrix = [full[name] for name in samples[0].names], torch.stack([one.matrix for one in samples]).mean(0)
    pairs = {(i, j): float(matrix[a, b]) for a, i in enumerate(names) for b, j in enumerate(names)}
    return sum(one.whole for one in samples) / len(samples), pairs


def _of_sample(module: nn.Module, X: Tensor, T: Tensor, structured: bool) -> BlockNorms:
    point = _point_of(module, X)
    if structured:
        form: Callable[..., BlockNorms] = attention_structured if isinstance(module, Attention) else post_block_structured
        return form(target=T, **point)
    if isinstance(module, Attention):
        del point["mask"]
        return attention_a_priori(AttentionNorms.measured(target=T, **point))
    kind = point.pop("activation")
    return post_block_a_priori(PostBlockNorms.measured(target=T, leak=LEAKS[kind], **point), activation=kind)


def _point_of(module: nn.Module, X: Tensor) -> dict[str, Any]:
    """Return X, the weights and the causal mask, of a block the eps of its norms and its activation too, by the forms' names."""
    part: Attention = module if isinstance(module, Attention) else module.attention  # type: ignore[assignment]
    point: dict[str, Any] = {"W_Q": part.W_Q, "W_K": part.W_K, "W_V": part.W_V, "W_O": part.W_O}
    if isinstance(module, TransformerBlock):
        point |= {"W_1": module.feedforward.W_1, "W_2": module.feedforward.W_2}
    point = {name: None if W is None else W.detach().double() for name, W in point.items()}
    point |= {"X": X, "mask": causal_mask(X.shape[0], 1) if part.causal else None}
    if isinstance(module, TransformerBlock):
        point |= {"eps": float(getattr(module.norm_1, "eps", 0.0)), "activation": module.feedforward.activation}
    return point
