"""Sections 2 and 4, the methods of Section 5, and the released code."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import torch.nn.functional as F
from torch import Tensor

from hessiankit.blocks import PLACEMENTS, Transformer, initialise
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, deepnorm, olmo, olmo_printed
from papers import second as again
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.curse_of_depth.stacks import make_block, make_stack, stream
from papers.drawing import Draw
from papers.evidence import agrees, readings, wrong
from papers.notation import rms_norm
from papers.registry import claim


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Return d(x, y) of Eq. 1 for each token."""
    return F.cosine_similarity(x, y, -1, eps=0.0).clamp(-1, 1).arccos() / math.pi


@claim("eq1-average", "Sec. 2.1, Eq. 1, 'the average distance over 256K tokens', with the released code", "INCONSISTENT")
def eq1_average(seed: int) -> Evidence:
    """the distance is averaged over tokens
    Correct: the released code takes the last token of each window only, as Gromov et al. do, and compares the last layer
    after the final norm"""
    X = Draw(seed).normal(8, 16)
    states = stream(make_stack(seed, 2), X)
    distance = angle(states[0], states[2])
    return readings({"all tokens": float(distance.mean()), "last token": float(distance[-1])}, "two blocks, 8 tokens")


@claim("abstract-variance", "Abstract; Sec. 8", "WRONG AS PRINTED", uses=[eq.lns])
def abstract_variance(seed: int) -> Evidence:
    r"""LNS 'scales the variance of output of the layer normalization inversely by the square root of its depth'
    Correct: it scales the output by $1/\sqrt\ell$ and so its variance by $1/\ell$ (Eq. 12)
    Severity: slip of print"""
    X, factor = Draw(seed).normal(20, 64), make_block(seed, 9, "lns").factor or 0.0
    ratio = (factor * rms_norm(X)).var() / rms_norm(X).var()
    second = again.variance(factor * rms_norm(X)) / again.variance(rms_norm(X))
    return wrong(1 / math.sqrt(9), ratio, "l = 9", corrected=1 / 9, above=0.5, second=second, by="rational numbers")


@claim(
    "lns-only",
    "Table 8, 'LNS Only After Attn', 'LNS Only After FFN'",
    "VAGUE",
    uses=[eq.lns_after_ffn, eq.lns_ffn_ln, eq.lns_after_attention, eq.lns_attention_ln],
)
def lns_only(seed: int) -> Evidence:
    r"""the scaling of one sub-layer only
    Correct: it can mean the output of the sub-layer times $1/\sqrt\ell$, or LNS on its norm only; these are different
    functions"""
    X, found = Draw(seed).normal(5, 16), {}
    for name in ("lns-only-attention", "lns-only-attention-ln", "lns-only-ffn", "lns-only-ffn-ln"):
        found[PLACEMENTS[name].description] = float(make_block(seed, 4, name, activation="gelu")(X).norm())
    return readings(found, "norm of the same block's output at l = 4")


@claim("lns-before-ln", "Sec. 6, Table 8, 'Before LN'", "DOES NOT FOLLOW", uses=[eq.lns_before_ln])
def lns_before_ln(seed: int) -> Evidence:
    r"""the factor $1/\sqrt\ell$ in front of the norm changes the model's performance: 26.97 against 26.73 of Pre-LN
    Correct: the norm cancels the scaling: this is Pre-LN up to $\epsilon$, and 0.24 is the difference of two runs of one
    model"""
    X, pre = Draw(seed).normal(5, 16), make_block(seed, 9)
    before = make_block(seed, 9, "lns-before-ln")(X)
    detail = "outputs at l = 9: of a norm scaled by 1 / 3, of the block 'before LN', of Pre-LN"
    W = {name.split(".")[-1]: p for name, p in pre.named_parameters()}
    second = again.block(X, W, 2, norms="af", causal=True)
    return wrong(make_block(seed, 9, "lns")(X), before, detail, corrected=pre(X), second=second, by="torch's attention and norms")


@claim("embedding-std", "Sec. 5.1; the theory, wherever sigma of x_1 enters", "OMITTED", uses=[initialise])
def embedding_std(seed: int) -> Evidence:
    """the standard deviation of the embedding is not given
    Correct: it is 0.632 in the released code until January 2026, and 0.02 since. The first block's Jacobian depends on
    it, and so does the theory"""
    gain, tokens = [], Draw(seed).integers(0, 32, 1, 6)
    for std in (0.632, 0.02):
        model = Transformer(32, 16, 32, 1, 2, placement="pre", norm="rmsnorm", rotary=True, causal=True).double()
        initialise(model, "normal", seed=seed, embedding_std=std)
        X = model.embedding(tokens)[0].detach()
        gain.append(float(jacobian_of(model.blocks[0], X).norm() / math.sqrt(X.numel())))
    return readings({"0.632": gain[0], "0.02": gain[1]}, "rms gain of block 1 with either", apart=0.5)


# Sections 5 and 6: the methods it compares with, and the released code
def place(letter: str, layer: int = 3, n_layers: int = 12) -> WeightPlace:
    """Return a weight's place in a model of width 768, d_ff 2048."""
    rows, columns = {"W_2": (2048, 768), "W_1": (768, 2048)}.get(letter, (768, 768))
    return WeightPlace(letter, rows, columns, layer, n_layers)


@claim("deepnorm-code", "Tables 1 and 2, DeepNorm, with the released code", "INCONSISTENT", uses=[eq.deepnorm, deepnorm])
def deepnorm_code(seed: int) -> Evidence:
    r"""the baseline DeepNorm is Wang et al.'s
    Correct: the code has $\alpha = 2.8284$ at every depth, which is that of $L = 32$, and gains $(8L)^{+1/4}$ for
    $(8L)^{-1/4}$: weights 9.8 times too large at $L = 12$, 13.9 times at 24"""
    printed, reference, corrected = [], [], []
    for L in (12, 24):
        gain = deepnorm(place("W_O", n_layers=L)).std / deepnorm(place("W_Q", n_layers=L)).std
        factor = make_block(seed, placement="deepnorm", n_layers=L).factor or 0.0
        printed += [2.8284, (8 * L) ** 0.25]
        reference += [(2 * L) ** 0.25, (8 * L) ** -0.25]
        corrected += [factor, gain]
    detail = f"alpha and gain at L = 12, 24; the gain over the right one {96**0.5:.1f} and {192**0.5:.1f}"
    second = [float(mpmath.exp(s * mpmath.log(n * L) / 4)) for L in (12, 24) for n, s in ((2, 1), (8, -1))]
    return wrong(printed, reference, detail, corrected=corrected, above=0.05, below=1e-6, second=second, by="mpmath")


@claim("olmo-init", "Sec. 5.3, OLMo's Scaled Initialization, with OLMo's code", "INCONSISTENT", uses=[olmo, olmo_printed])
def olmo_init(seed: int) -> Evidence:
    r"""'scales input projections by $1/\sqrt{d_{\mathrm{model}}}$, and output projections by
    $1/\sqrt{2\,d_{\mathrm{model}}\,l}$ at every layer'
    Correct: OLMo's code has $1/\sqrt{2\,d_{\mathrm{ff}}\,l}$, the fan-in, for the network's $W_2$; both are the standard
    deviation, cut at three of it"""
    printed, code = olmo_printed(place("W_2")).std, olmo(place("W_2")).std
    second = 1 / mpmath.sqrt(2 * 2048 * 3)
    corrected = 1 / math.sqrt(2 * 2048 * 3)
    return wrong(printed, code, "W_2 of block 3", corrected=corrected, above=0.3, second=float(second), by="mpmath")


@claim("ours/after-residual-forgets", "The Curse of Depth, Table 8, 'After Residual'", "HOLDS", uses=[eq.lns_after_residual])
def forgets(seed: int) -> Evidence:
    """there the part of $x_1$ in $x_{L+1}$ is $1/L!$"""
    X, blocks = Draw(seed).normal(5, 16), make_stack(seed, 5, "lns-after-residual")
    for block in blocks:
        ends: Any = (block.attention.W_O, block.feedforward.W_2)
        for W in ends:
            W.zero_()
    return agrees(stream(blocks, X)[-1], X / math.factorial(5), "5 blocks whose branches return 0")
