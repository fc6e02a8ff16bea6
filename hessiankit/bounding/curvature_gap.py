"""Bounds of Closing the Curvature Gap for its attention and its post-norm block: as printed, and in sharper closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_printed import theorem_1_appendix_printed, theorem_1_printed
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_printed import phi_printed, sigma_min_printed, theorem_6_factors_printed, theorem_6_printed
from derivations.bounds.block_structured import post_block_structured
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.bounding.a_priori import NormTable, in_float64
from hessiankit.bounding.structured import ROUNDING, SLACK, Structured
from hessiankit.formulas.block_at import causal_mask, is_the_papers

Pairs: TypeAlias = "dict[tuple[str, str], float]"
"""Bound on each block of the Hessian, by its two parameters."""
LEAKS = {"relu": 0.0, "leaky_relu": 0.01, "identity": 1.0}
"""The activations of the closed forms for a post-norm block, and their slopes below 0."""


def sharpened_a_priori(module: nn.Module, x: Tensor, t: Tensor, prior: NormTable) -> NormTable:
    """Return a-priori bounds for the mean squared error, lowered where the closed form of this module is smaller.

    Args:
        module: The attention or block.
        x: B x L x d.
        t: B x L x d.
        prior: Bounds by the rules for any placement.
    """
    if not _has_closed_forms(module):
        return prior
    whole, pairs = _closed_form(_a_priori_form, module, x, t)
    norms = prior.norms.clone()
    for (i, j), value in pairs.items():
        a, b = prior.names.index(i), prior.names.index(j)
        norms[a, b] = min(float(norms[a, b]), value + ROUNDING * float(norms[a, b]))
    spectral = whole + ROUNDING * prior.whole if len(pairs) == len(prior.names) ** 2 else float("inf")
    return NormTable(prior.names, norms, prior.lipschitz, spectral)


def sharpened_structured(module: nn.Module, x: Tensor, t: Tensor, own: Structured) -> Structured:
    """Return structured bounds for the mean squared error, lowered where the closed form of this module is smaller."""
    if not _has_closed_forms(module):
        return own
    whole, pairs = _closed_form(_structured_form, module, x, t)
    floor = ROUNDING * own.whole
    table = {pair: min(value, pairs.get(pair, value) * SLACK + floor) for pair, value in own.pairs.items()}
    return Structured(min(own.whole, whole * SLACK + floor) if pairs.keys() == own.pairs.keys() else own.whole, table, own.sites)


def _has_closed_forms(module: nn.Module) -> bool:
    if isinstance(module, Attention):
        return is_the_papers(module)
    if not isinstance(module, TransformerBlock) or module.placement != "post" or not is_the_papers(module.attention):
        return False
    network = module.feedforward
    return network.W_G is None and network.activation in LEAKS and network.b_1 is None and _has_bare_layernorms(module)


def _has_bare_layernorms(block: TransformerBlock) -> bool:
    return all(isinstance(norm, nn.LayerNorm) and norm.weight is None for norm in (block.norm_1, block.norm_2))


Form: TypeAlias = Callable[[nn.Module, Tensor, Tensor], BlockNorms]


def _closed_form(form: Form, module: nn.Module, x: Tensor, t: Tensor) -> tuple[float, Pairs]:
    """Return the means over the samples of the bounds on the whole and on each block, by the parameters' full names."""
    samples = [form(module, X.detach().double(), T.detach().double()) for X, T in zip(x, t, strict=True)]
    full = {name.rsplit(".", 1)[-1]: name for name, _ in module.named_parameters()}
    names, matrix = [full[name] for name in samples[0].names], torch.stack([one.matrix for one in samples]).mean(0)
    pairs = {(i, j): float(matrix[a, b]) for a, i in enumerate(names) for b, j in enumerate(names)}
    return sum(one.whole for one in samples) / len(samples), pairs


def _a_priori_form(module: nn.Module, X: Tensor, T: Tensor) -> BlockNorms:
    point = _point_of(module, X)
    if isinstance(module, Attention):
        del point["mask"]
        return attention_a_priori(AttentionNorms.measured(target=T, **point))
    kind = point.pop("activation")
    return post_block_a_priori(PostBlockNorms.measured(target=T, leak=LEAKS[kind], **point), activation=kind)


def _structured_form(module: nn.Module, X: Tensor, T: Tensor) -> BlockNorms:
    form: Callable[..., BlockNorms] = attention_structured if isinstance(module, Attention) else post_block_structured
    return form(target=T, **_point_of(module, X))


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


def undefined(module: nn.Module, x: Tensor, loss: str) -> str:
    """Return why the printed bounds are not defined for a problem; nothing if they are."""
    if loss != "mse":
        return "the paper's loss is the squared error"
    if x.shape[0] > 1:
        return "the paper bounds the Hessian of one sample; pass one"
    part = module.attention if isinstance(module, TransformerBlock) else module
    if not isinstance(part, Attention) or not is_the_papers(part) or part.W_O is not None or part.causal:
        return "the paper has one head, without mask, biases, norms inside and output projection"
    if isinstance(module, TransformerBlock):
        plain = module.placement == "post" and module.feedforward.activation == "relu" and module.feedforward.b_1 is None
        if not plain or not _has_bare_layernorms(module):
            return "the paper's block is post-norm with ReLU, and its norms have neither gain nor shift"
    return ""


def _norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A.detach().double(), 2))


def theorem_1(part: Attention, X: Tensor, T: Tensor, *, appendix: bool) -> tuple[float, Pairs]:
    """Return Theorem 1 as printed, in the text or in the appendix, on the whole and on the four blocks that it names."""
    (length, d), sizes = X.shape, [_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V, T)]
    blocks = (theorem_1_appendix_printed if appendix else theorem_1_printed)(length, d, part.d_k, *sizes)
    pairs = {(f"W_{i}", f"W_{j}"): float(getattr(blocks, f"{i}{j}")) for i, j in ("VV", "QQ", "VQ", "QK")}
    return blocks.M, pairs


_ORDER = ("feedforward.W_1", "feedforward.W_2", "attention.W_K", "attention.W_Q", "attention.W_V")


def theorem_6(block: TransformerBlock, X: Tensor, T: Tensor, *, reading: str) -> tuple[float, Pairs]:
    """Return Theorem 6 as printed, on the whole and on each block.

    Args:
        block: The paper's post-norm block.
        X: L x d.
        T: L x d.
        reading: Of sigma_min: ``"stated"`` in the theorem or used in its ``"proof"``.
    """
    block = in_float64(block)
    part, network = block.attention, block.feedforward
    with torch.no_grad():
        before = X + part(X)
        Y = block.norm_1(before)  # type: ignore[misc]
        S = Y + network(Y)
        residual = float((block.norm_2(S) - T).norm())  # type: ignore[misc]
    (length, d), d_ff = X.shape, network.W_1.shape[1]
    x, w_Q, w_K, w_V = (_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V))
    w_1, w_2 = _norm(network.W_1), _norm(network.W_2)
    scales = {"sigma": sigma_min_printed(before, reading=reading), "sigma_prime": sigma_min_printed(S, reading=reading)}
    factors = theorem_6_factors_printed(length, d, part.d_k, d_ff, x, w_Q, w_K, w_V, w_1, w_2, **scales)
    phi = phi_printed(length, d, part.d_k, x, w_Q, w_K, w_V)
    terms = theorem_6_printed(length, d, d_ff, factors, phi, w_1, w_2, residual)
    norms = 2 / (length * d) * factors.J_Z**2 * torch.outer(terms.B, terms.B) + residual * terms.H_tr
    return terms.whole, {(i, j): float(norms[a, b]) for a, i in enumerate(_ORDER) for b, j in enumerate(_ORDER)}
