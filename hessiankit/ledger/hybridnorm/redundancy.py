"""Placements that are the same: what QKV-Norm makes of a norm in front, and the two forms of Post-Norm."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, normal
from hessiankit.ledger.autodiff import hessian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, counts, measured, relative_error, small
from hessiankit.ledger.hybridnorm.definitions import LETTERS, mha, rms_norm
from hessiankit.ledger.hybridnorm.equations import HEADS, generic, make
from hessiankit.ledger.registry import claim


def pair(seed: int, with_norm: str, without: str) -> tuple[TransformerBlock, TransformerBlock, Tensor]:
    """Return a block with a norm of gain g in front of its attention, one without whose weights absorb g, and tokens."""
    draw = Draw(seed)
    theirs, mine = make(with_norm, affine=True), make(without, affine=True)
    generic(theirs, draw)
    mine.load_state_dict({name: v for name, v in theirs.state_dict().items() if not name.startswith("norm_1")})
    assert isinstance(theirs.norm_1, torch.nn.RMSNorm)
    with torch.no_grad():
        for letter in LETTERS[:3]:
            getattr(mine.attention, letter).mul_(theirs.norm_1.weight[:, None])
    return theirs, mine, draw.normal(4, 6)


def same(seed: int, with_norm: str, without: str) -> Evidence:
    """Compare two placements as functions, and their first blocks' gain taken up by the weights."""
    theirs, mine, X = pair(seed, with_norm, without)
    return agrees(mine(X), theirs(X), "RMSNorm, eps = 0, a generic gain")


@claim("ours/redundancy-attention", "HybridNorm, Eqs. 7 and 45-48", "HOLDS")
def redundancy_attention(seed: int) -> Evidence:
    r"""$\mathrm{MHA}_{QKV}(g\odot N(X); W) = \mathrm{MHA}_{QKV}(X; \mathrm{diag}(g)W)$ for RMSNorm, $\epsilon = 0$"""
    draw = Draw(seed)
    W = {letter: draw.normal(6, 6) for letter in LETTERS}
    X, g = draw.normal(4, 6), draw.normal(6)
    absorbed = {letter: g[:, None] * W[letter] if letter != "W_O" else W[letter] for letter in LETTERS}
    return agrees(mha(g * rms_norm(X), W, HEADS, "qkv"), mha(X, absorbed, HEADS, "qkv"), "two heads, written out")


@claim("ours/redundancy-hybridnorm", "HybridNorm, Table 4", "HOLDS", uses=[eq.pre_post, eq.bare_post])
def redundancy_hybridnorm(seed: int) -> Evidence:
    """Pre-QKV-Post and HybridNorm are the same functions, so the gap of 20.13 and 20.00 is parametrisation, eps or noise"""
    return same(seed, "pre-qkv-post", "hybridnorm")


@claim("ours/redundancy-qkv-pre", "HybridNorm, Table 4", "HOLDS", uses=[eq.pre, eq.bare_pre])
def redundancy_qkv_pre(seed: int) -> Evidence:
    """Pre-QKV-Pre and QKV-Pre are the same functions (19.97 and 19.96)"""
    return same(seed, "pre-qkv-pre", "qkv-pre")


@claim("ours/redundancy-first-block", "HybridNorm, Fig. 4", "HOLDS", uses=[eq.pre, eq.bare_pre])
def redundancy_first(seed: int) -> Evidence:
    """the starred variant and First-QKV-Pre are the same functions"""
    return same(seed, "hybridnorm*", "first-qkv-pre")


@claim("ours/redundancy-not-others", "HybridNorm, Table 4", "HOLDS")
def redundancy_not_others(seed: int) -> Evidence:
    """QK-, KV- and QKC-Norm leave the norm in front what it is"""
    distances = []
    for inside in ("qk", "kv", "qkc"):
        theirs, mine, X = pair(seed, f"pre-{inside}-pre", f"{inside}-pre")
        distances.append(relative_error(mine(X), theirs(X)))
    return counts(sum(d > 1e-3 for d in distances), 3, f"placements that differ, by {min(distances):.2g} and more")


@claim("ours/redundancy-hessian", "HybridNorm, Table 4", "HOLDS")
def redundancy_hessian(seed: int) -> Evidence:
    """at gain 1, Pre-QKV-Post and HybridNorm have the same Hessian in all weights that both have"""
    draw = Draw(seed)
    theirs, mine = make("pre-qkv-post", d=4), make("hybridnorm", d=4)
    generic(theirs, draw)
    mine.load_state_dict(theirs.state_dict())
    X, T = draw.normal(3, 4), draw.normal(3, 4)
    errors = []
    for letter in LETTERS:

        def loss(W: Tensor, block: TransformerBlock, letter: str = letter) -> Tensor:
            return (torch.func.functional_call(block, {f"attention.{letter}": W}, (X,)) - T).square().mean()

        W = getattr(theirs.attention, letter).detach()
        found = [hessian_of(lambda W, b=block, f=loss: f(W, b), W) for block in (mine, theirs)]
        errors.append(relative_error(*found))
    return small(errors, "blocks of W_Q, W_K, W_V, W_O, by autograd twice")


@claim("ours/post-shifted", "HybridNorm, Eqs. 3-4 and App. E", "HOLDS", uses=[eq.post, eq.post_shifted])
def post_shifted(seed: int) -> Evidence:
    """a Post-Norm stack (Eqs. 3-4) of $N(X)$ is $N$ of a stack of Post in the sense of App. E of $X$: the two agree with an
    EmbedNorm and a final norm, and differ without"""
    draw = Draw(seed)
    post, shifted = [make("post") for _ in range(3)], [make("post-shifted") for _ in range(3)]
    X = draw.normal(4, 6)
    x, y, bare = rms_norm(X), X, X
    for a, b in zip(post, shifted, strict=True):
        generic(a, draw)
        b.load_state_dict(a.state_dict())
        x, y, bare = a(x), b(y), a(bare)
    if relative_error(bare, rms_norm(y)) < 1e-3:
        return small(1.0, "the two agree without a norm of the embedding")
    return agrees(x, rms_norm(y), "three blocks")


@claim("ours/qkv-eps-in-block-0", "HybridNorm, Eqs. 8-9, at the initialisation of Table 7", "REPRODUCED", uses=[normal])
def eps_in_block_0(seed: int) -> Evidence:
    r"""on raw embeddings of standard deviation $1/\sqrt{2.5d}$, $d = 2048$, the mean square of $q$ is $7.8\cdot10^{-5}$:
    $\epsilon = 10^{-5}$ is 11 % of what the norm divides by"""
    d = 2048
    std = normal(WeightPlace("W_Q", d, d, 1, 16)).std
    draw = Draw(seed)
    q = draw.normal(64, d, std=std) @ draw.normal(d, 128, std=std)
    square = float(q.square().mean())
    share = 1e-5 / (square + 1e-5)
    return measured(share, abs(share - 0.113) < 0.01, f"mean square of q {square:.3g}, d std^4 = {d * std**4:.3g}")


@claim("ours/norm-parameters", "HybridNorm, Secs. 3.1-3.2 and App. E", "HOLDS", uses=[TransformerBlock])
def norm_parameters(seed: int) -> Evidence:
    """gains in a block: $2d$ for Pre- and Post-Norm, $d + 3d_k$ for HybridNorm, $2d + 3d_k$ for Pre-QKV-Pre"""
    expected = {"pre": 12, "post": 12, "hybridnorm": 6 + 9, "pre-qkv-pre": 12 + 9, "qk-post": 6 + 6, "pre-qkvc-post": 12 + 12}
    wrong = 0
    for name, number in expected.items():
        block = make(name, affine=True)
        gains = sum(p.numel() for n, p in block.named_parameters() if "norm" in n)
        wrong += gains != number
    return counts(wrong, 0, "placements with another number than the formula, d = 6, d_k = 3")
