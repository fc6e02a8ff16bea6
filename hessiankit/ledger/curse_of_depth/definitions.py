"""Sections 2-4: the block, the angular distance, and LayerNorm Scaling."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hessiankit.blocks import PLACEMENTS, Transformer, initialise
from hessiankit.blocks import placements as eq
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import make_block, make_stack, rms_norm, stream
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, bounded, readings, wrong
from hessiankit.ledger.registry import claim


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Return d(x, y) of Eq. 1 for each token."""
    return F.cosine_similarity(x, y, -1, eps=0.0).clamp(-1, 1).arccos() / math.pi


@claim("curse-of-depth/eq1-average", "Sec. 2.1, Eq. 1, 'the average distance over 256K tokens'", "VAGUE")
def eq1_average(seed: int) -> Evidence:
    """the distance is averaged over tokens

    Correct: the released code takes the last token of each window only, as Gromov et al. do, and compares the last layer
    after the final norm
    """
    X = Draw(seed).normal(8, 16)
    states = stream(make_stack(seed, 2), X)
    distance = angle(states[0], states[2])
    return readings({"all tokens": float(distance.mean()), "last token": float(distance[-1])}, "two blocks, 8 tokens")


@claim("curse-of-depth/abstract-variance", "Abstract; Sec. 8", "WRONG AS PRINTED", uses=[eq.lns])
def abstract_variance(seed: int) -> Evidence:
    r"""LNS 'scales the variance of output of the layer normalization inversely by the square root of its depth'

    Correct: it scales the output by $1/\sqrt\ell$ and so its variance by $1/\ell$ (Eq. 12)
    """
    X, factor = Draw(seed).normal(20, 64), make_block(seed, 9, "lns").factor or 0.0
    ratio = (factor * rms_norm(X)).var() / rms_norm(X).var()
    return wrong(1 / math.sqrt(9), ratio, "l = 9", corrected=1 / 9, above=0.5)


@claim(
    "curse-of-depth/lns-only",
    "Table 8, 'LNS Only After Attn', 'LNS Only After FFN'",
    "VAGUE",
    uses=[eq.lns_after_ffn, eq.lns_ffn_ln, eq.lns_after_attention, eq.lns_attention_ln],
)
def lns_only(seed: int) -> Evidence:
    r"""the scaling of one sub-layer only

    Correct: what the sub-layer returns times $1/\sqrt\ell$, or LNS on its norm only; not the same function
    """
    X, found = Draw(seed).normal(5, 16), {}
    for name in ("lns-only-attention", "lns-only-attention-ln", "lns-only-ffn", "lns-only-ffn-ln"):
        found[PLACEMENTS[name].description] = float(make_block(seed, 4, name, activation="gelu")(X).norm())
    return readings(found, "norm of the same block's output at l = 4")


@claim("curse-of-depth/lns-before-ln", "Table 8, 'Before LN'", "WRONG AS PRINTED", uses=[eq.lns_before_ln])
def lns_before_ln(seed: int) -> Evidence:
    r"""scaling the input of the norm by $1/\sqrt\ell$ is a method of its own: perplexity 26.97 against 26.73 of Pre-LN

    Correct: the norm undoes it: it is Pre-LN up to $\epsilon$, and 0.24 is the difference of two runs of one model
    """
    X, pre = Draw(seed).normal(5, 16), make_block(seed, 9)
    before = make_block(seed, 9, "lns-before-ln")(X)
    detail = "outputs at l = 9: of a norm scaled by 1 / 3, of the block 'before LN', of Pre-LN"
    return wrong(make_block(seed, 9, "lns")(X), before, detail, corrected=pre(X))


@claim("ours/lns-gain", "The Curse of Depth, Eq. 12", "HOLDS", uses=[eq.lns, eq.pre])
def lns_gain(seed: int) -> Evidence:
    r"""LNS is Pre-LN with gains $\gamma_\ell/\sqrt\ell$: the same function, so that the factor folds into the gain"""
    X = Draw(seed).normal(5, 16)
    lns, pre = make_block(seed, 5, "lns", affine=True), make_block(seed, 5, affine=True)
    norms: Any = (pre.norm_1, pre.norm_2)
    for norm in norms:
        norm.weight /= math.sqrt(5)
    return agrees(lns(X), pre(X), "l = 5")


@claim("curse-of-depth/embedding-std", "Sec. 5.1; the theory, wherever sigma of x_1 enters", "OMITTED", uses=[initialise])
def embedding_std(seed: int) -> Evidence:
    """the standard deviation of the embedding is not given

    Correct: 0.632 in the released code until January 2026, 0.02 since: the first block's Jacobian feels it, and with it the
    theory
    """
    gain, tokens = [], Draw(seed).integers(0, 32, 1, 6)
    for std in (0.632, 0.02):
        model = Transformer(32, 16, 32, 1, 2, placement="pre", norm="rmsnorm", rotary=True, causal=True).double()
        initialise(model, "normal", seed=seed, embedding_std=std)
        X = model.embedding(tokens)[0].detach()
        gain.append(float(jacobian_of(model.blocks[0], X).norm() / math.sqrt(X.numel())))
    text = f"rms gain of block 1 with std 0.632 and 0.02: {gain[0]:.2f}, {gain[1]:.2f}; 5 times the first over the second"
    return bounded(5 * gain[0] / gain[1], text)
