"""Placements that are the same: what QKV-Norm makes of a norm in front, and the two forms of Post-Norm."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, normal
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, measured, relative_error, small
from hessiankit.ledger.hybridnorm.definitions import LETTERS, rms_norm
from hessiankit.ledger.hybridnorm.equations import generic, make
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
