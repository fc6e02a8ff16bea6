"""Sections 5 and 6: the methods it compares with, and the released code."""

from __future__ import annotations

import math
from typing import Any

import torch

from hessiankit.blocks import SCHEMES, GroupNorm, TransformerBlock, initialise, profile_admin
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, deepnorm, depth_scaled, ds_init, megatron, normal, olmo, olmo_printed
from hessiankit.blocks.placements import layerscale_initial, post_norm_layers
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import make_block, make_stack, rms_norm, stream
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, counts, false, off, readings, relative_error, small
from hessiankit.ledger.registry import claim


def place(letter: str, layer: int = 3, n_layers: int = 12) -> WeightPlace:
    """Return a weight's place in a model of width 768, d_ff 2048."""
    rows, columns = {"W_2": (2048, 768), "W_1": (768, 2048)}.get(letter, (768, 768))
    return WeightPlace(letter, rows, columns, layer, n_layers)


@claim("curse-of-depth/post-ln", "Sec. 5.1, Post-LN; Table 1", "HOLDS", uses=[eq.post])
def post_ln(seed: int) -> Evidence:
    """Post-LN: a norm after each residual sum"""
    block, X = make_block(seed, placement="post"), Draw(seed).normal(5, 16)
    Y = rms_norm(X + block.attention(X))
    return agrees(block(X), rms_norm(Y + block.feedforward(Y)), "written out against hessiankit's placement 'post'")


@claim("curse-of-depth/mix-ln", "Sec. 5.1, Mix-LN", "HOLDS", uses=[post_norm_layers])
def mix_ln(seed: int) -> Evidence:
    r"""Mix-LN has a 'hyperparameter $\alpha$ manually set to 0.25': the first quarter of the blocks is Post-LN"""
    names = [block.own_placement.name for block in make_stack(seed, 12, "mix-ln", n_layers=12)]
    return counts(
        names.count("post") * (names[:3] == ["post"] * 3), 3, "Post-LN blocks of 12, at the front, as in its released code"
    )


@claim("curse-of-depth/deepnorm", "Sec. 5.1, DeepNorm", "OMITTED", uses=[eq.deepnorm, deepnorm])
def deepnorm_row(seed: int) -> Evidence:
    r"""DeepNorm: $\mathrm{LN}(\alpha x + f(x))$ with $\alpha = (2L)^{1/4}$, gains $(8L)^{-1/4}$ (not in the paper)"""
    block, X = make_block(seed, placement="deepnorm", n_layers=12), Draw(seed).normal(5, 16)
    Y = rms_norm(24**0.25 * X + block.attention(X))
    return agrees(block(X), rms_norm(24**0.25 * Y + block.feedforward(Y)), "L = 12, written out")


@claim(
    "curse-of-depth/deepnorm-code", "released code, DeepNorm of Tables 1 and 2", "WRONG AS PRINTED", uses=[eq.deepnorm, deepnorm]
)
def deepnorm_code(seed: int) -> Evidence:
    r"""the baseline DeepNorm is Wang et al.'s

    Correct: the code has $\alpha = 2.8284$ at every depth, which is that of $L = 32$, and gains $(8L)^{+1/4}$ for
    $(8L)^{-1/4}$: weights 9.8 times too large at $L = 12$, 13.9 times at 24
    """
    errors, corrected = [], []
    for L in (12, 24):
        alpha, gain = (2 * L) ** 0.25, (8 * L) ** -0.25
        ours = deepnorm(place("W_O", n_layers=L)).std / deepnorm(place("W_Q", n_layers=L)).std
        errors += [relative_error(2.8284, alpha), relative_error((8 * L) ** 0.25, gain)]
        corrected += [
            relative_error(make_block(seed, placement="deepnorm", n_layers=L).factor, alpha),
            relative_error(ours, gain),
        ]
    detail = f"gain over the right one {96**0.5:.1f} and {192**0.5:.1f}"
    return off(errors, detail, corrected=corrected, above=0.05)


@claim("curse-of-depth/lns-code", "released code, LayerNorm Scaling", "WRONG AS PRINTED")
def lns_code(seed: int) -> Evidence:
    """a run whose type of norm is LNS trains with LayerNorm Scaling

    Correct: since April 2025 the type is put into lower case and then compared with 'LNS', which no spelling is equal to: no
    norm is made, and the run stops, or its blocks are the identity. Before, with 'cod' in both places, the two agreed
    """
    spellings = ("LNS", "lns", "Lns")
    before = sum(name.lower() == "cod" for name in ("cod", "COD", "Cod"))
    taken = sum(name.lower() == "LNS" for name in spellings)
    return false(taken, len(spellings), f"spellings for which the branch is taken (with 'cod', {before} of 3)")


@claim("curse-of-depth/scaled-init", "Sec. 5.4; Sec. 6, Scaled Initialization", "WRONG AS PRINTED", uses=[megatron])
def scaled_init(seed: int) -> Evidence:
    r"""'scales the initialization of the feedforward layers' weights $W_0$ and $W_2$' by $\frac{1}{\sqrt{2L}}$

    Correct: what ends a branch: the attention's $W_O$ and the network's $W_2$; $W_0$ is no matrix of the network
    """
    letters = ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_2")
    scaled = [x for x in letters if relative_error(megatron(place(x)).std / normal(place(x)).std, 1 / math.sqrt(24)) < 1e-12]
    of_network = sum(letter in scaled for letter in ("W_1", "W_2"))
    return false(of_network, 2, f"matrices of the network among the scaled ones, which are {', '.join(scaled)}")


@claim("curse-of-depth/depth-scaled-init", "Sec. 6, Depth-Scaled Initialization", "VAGUE", uses=[depth_scaled, ds_init])
def depth_scaled_init(seed: int) -> Evidence:
    r"""'scales the initialization of weight matrices by the current depth $1/\sqrt{2l}$' (Zhang et al. 2019)

    Correct: which matrices is not said; Zhang et al.'s DS-Init is a uniform Xavier distribution over $\sqrt l$, for all
    matrices
    """
    found = {"1 / sqrt(2 l) on W_O and W_2": depth_scaled(place("W_Q")).std, "DS-Init": ds_init(place("W_Q")).std}
    return readings(found, "standard deviation of W_Q in block 3, width 768")


@claim("curse-of-depth/olmo-init", "Sec. 5.3, OLMo's Scaled Initialization", "WRONG AS PRINTED", uses=[olmo, olmo_printed])
def olmo_init(seed: int) -> Evidence:
    r"""'scales input projections by $1/\sqrt{d_{\mathrm{model}}}$, and output projections by
    $1/\sqrt{2\,d_{\mathrm{model}}\,l}$ at every layer'

    Correct: OLMo's code has $1/\sqrt{2\,d_{\mathrm{ff}}\,l}$, the fan-in, for the network's $W_2$; both are the standard
    deviation, cut at three of it
    """
    printed, code = olmo_printed(place("W_2")).std, olmo(place("W_2")).std
    return off(
        relative_error(printed, code), "W_2 of block 3", corrected=relative_error(1 / math.sqrt(2 * 2048 * 3), code), above=0.3
    )


@claim("curse-of-depth/skipinit", "Sec. 6, SkipInit", "HOLDS", uses=[eq.scaled_branches])
def skipinit(seed: int) -> Evidence:
    r"""'introduces a learnable parameter after FFN/Att layers, initialized as $1/\sqrt L$'"""
    block, X = make_block(seed, placement="skipinit", n_layers=16), Draw(seed).normal(5, 16)
    Y = X + block.attention(rms_norm(X)) / 4
    return agrees(
        block(X), Y + block.feedforward(rms_norm(Y)) / 4, "L = 16, written out against hessiankit's placement 'skipinit'"
    )


@claim("curse-of-depth/layerscale", "Sec. 6, LayerScale", "VAGUE", uses=[eq.scaled_branches, layerscale_initial])
def layerscale(seed: int) -> Evidence:
    r"""$\mathrm{diag}(\lambda_1,\dots,\lambda_d)$ with $\lambda_i = \epsilon$, 'a small value'

    Correct: $\epsilon$ is not given; CaiT has 0.1 to 18 blocks, $10^{-5}$ to 24, $10^{-6}$ beyond
    """
    return readings({"12 blocks": layerscale_initial(1, 12), "24 blocks": layerscale_initial(1, 24)}, "CaiT's initial value")


@claim("curse-of-depth/sandwich", "Sec. 6, Sandwich-LN", "OMITTED", uses=[eq.sandwich])
def sandwich(seed: int) -> Evidence:
    r"""Sandwich-LN: $x + \mathrm{LN}(f(\mathrm{LN}(x)))$ (Ding et al. 2021; no formula in the paper)"""
    block, X = make_block(seed, placement="sandwich"), Draw(seed).normal(5, 16)
    Y = X + rms_norm(block.attention(rms_norm(X)))
    return agrees(block(X), Y + rms_norm(block.feedforward(rms_norm(Y))), "written out against hessiankit's placement 'sandwich'")


@claim("ours/sandwich-variance", "The Curse of Depth, Sec. 6, Sandwich-LN", "HOLDS", uses=[eq.sandwich])
def sandwich_variance(seed: int) -> Evidence:
    """a Sandwich-LN sub-layer adds a branch of variance 1 at initialisation: 17 after 8 blocks, from 1, to 20 %"""
    draw = Draw(seed)
    squares = []
    for k in range(4):
        blocks = make_stack(4 * seed + k, 8, "sandwich", d_model=64, d_ff=128, n_heads=4)
        squares.append(float(stream(blocks, draw.normal(64, 64))[-1].square().mean()))
    return small(abs(sum(squares) / len(squares) / 17 - 1), "mean of 4 stacks of width 64, 64 tokens", below=0.2)


@claim("curse-of-depth/admin", "Sec. 6, Admin", "OMITTED", uses=[eq.admin, profile_admin])
def admin(seed: int) -> Evidence:
    r"""Admin: $\mathrm{LN}(\omega\odot x + f(x))$ with $\omega_i = \sqrt{1 + \sum_{j<i}\mathrm{Var}f_j}$ (Liu et al. 2020; no
    formula in the paper)"""
    X, blocks = Draw(seed).normal(5, 16), make_stack(seed, 2, "admin")
    variances, state = [], X
    for block in blocks:
        for branch in (block.attention, block.feedforward):
            f = branch(state)
            variances.append(float(f.var(correction=0)))
            state = rms_norm(state + f)
    expected = [math.sqrt(1 + sum(variances[:i])) for i in range(4)]
    return agrees(profile_admin(torch.nn.Sequential(*blocks), X), expected, "two blocks, the profiling pass written out")


@claim("curse-of-depth/group-ln", "Sec. 6, Group-LN", "VAGUE", uses=[GroupNorm])
def group_ln(seed: int) -> Evidence:
    """Group-LN normalises groups of features; their number is not given

    Correct: it matters: two groups and eight are two functions
    """
    X, found = Draw(seed).normal(5, 16), {}
    for groups in (2, 8):
        block = make_block(seed, placement="group-ln", groups=groups, norm="layernorm", eps=1e-6)
        found[f"{groups} groups"] = float(block(X)[0, 0])
    return readings(found, "an entry of the same block's output")


@claim("curse-of-depth/lns-no-parameters", "Sec. 4; Sec. 5.1", "HOLDS", uses=[eq.lns])
def no_parameters(seed: int) -> Evidence:
    """LNS 'does not introduce additional learnable parameters' and has no hyperparameter"""
    found, expected = (sum(p.numel() for p in make_block(seed, 3, name, affine=True).parameters()) for name in ("lns", "pre"))
    return counts(found, expected, "parameters of a block, against Pre-LN")


@claim("ours/after-residual-forgets", "The Curse of Depth, Table 8, 'After Residual'", "HOLDS", uses=[eq.lns_after_residual])
def forgets(seed: int) -> Evidence:
    """there the part of $x_1$ in $x_{L+1}$ is $1/L!$"""
    X, blocks = Draw(seed).normal(5, 16), make_stack(seed, 5, "lns-after-residual")
    for block in blocks:
        ends: Any = (block.attention.W_O, block.feedforward.W_2)
        for W in ends:
            W.zero_()
    return agrees(stream(blocks, X)[-1], X / math.factorial(5), "5 blocks whose branches return 0")


@claim("curse-of-depth/schemes-named", "Secs. 5.3, 5.4 and 6", "HOLDS", uses=[initialise])
def schemes_named(seed: int) -> Evidence:
    """the initialisations it compares with: scaled, depth-scaled, OLMo's"""
    ratios, expected = [], []
    for scheme, factor in (("scaled", 1 / math.sqrt(128)), ("depth-scaled", 1 / math.sqrt(6))):
        own = TransformerBlock(16, 32, 2, layer=3, n_layers=64).double()
        plain = TransformerBlock(16, 32, 2, layer=3, n_layers=64).double()
        initialise(own, scheme, seed=seed)
        initialise(plain, "normal", seed=seed)
        numerator, denominator = (dict(block.named_parameters())["attention.W_O"].detach() for block in (own, plain))
        ratios.append(numerator / denominator)
        expected.append(torch.full((16, 16), factor, dtype=torch.float64))
    return agrees(ratios, expected, f"W_O of block 3 of 64 over the plain one, two of the {len(SCHEMES)} schemes")
