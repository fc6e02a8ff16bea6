"""Blocks: Eqs. 1-11 and 35-52, the first block, placements that are the same, and gauges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, normal
from papers import second as again
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import assumed, small, wrong
from papers.hybridnorm.definitions import mha, swiglu
from papers.notation import rms_norm
from papers.registry import claim

HEADS = 2


def make(placement: str, *, d: int = 6, **options: Any) -> TransformerBlock:
    """Return a block as the paper defines it: RMSNorm without gain and eps, SwiGLU, two heads."""
    fixed: dict[str, Any] = {"norm": "rmsnorm", "eps": 0.0, "affine": False, "activation": "swiglu"}
    return TransformerBlock(d, 5, HEADS, placement, **{**fixed, **options}).double()


def generic(block: TransformerBlock, draw: Draw) -> dict[str, Tensor]:
    """Give the block generic weights and return them by letter."""
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(draw.normal(*p.shape))
    return {name.split(".")[-1]: p.detach() for name, p in block.named_parameters()}


def hybridnorm_block(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 8 and 9."""
    Y = mha(X, W, HEADS, "qkv") + X
    return swiglu(rms_norm(Y), W) + rms_norm(Y)


@claim("post-norm-in-ffn", "Abstract, Secs. 1 and 3.2: Eqs. 4 and 9", "INCONSISTENT", uses=[eq.bare_post])
def post_norm_in_ffn(seed: int) -> Evidence:
    r"""'Post-Norm in the FFN', with Post-Norm as in Eq. 4
    Correct: in Eq. 9 the norm precedes the network and feeds branch and residual, unlike $\mathrm{Norm}(\mathrm{FFN}(Y) +
    Y)$"""
    draw = Draw(seed)
    block = make("hybridnorm")
    W, X = generic(block, draw), draw.normal(3, 6)
    Y = mha(X, W, HEADS, "qkv") + X
    printed, corrected, second = rms_norm(swiglu(Y, W) + Y), hybridnorm_block(X, W), again.block(X, W, HEADS, norms="qkvy")
    detail, by = "Eq. 4 in place of Eq. 9", "torch's attention and norms"
    return wrong(printed, block(X), detail, corrected=corrected, above=0.05, second=second, by=by)


# The first block: Eqs. 10-11, First-QKV-Pre, EmbedNorm, and what eps does there
@claim("first-block-eps", "released code, norms of queries, keys and values", "HOLDS UNDER ASSUMPTION", uses=[normal])
def first_block_eps(seed: int) -> Evidence:
    r"""behind their norms queries, keys and values have mean square 1
    Needs: the input of the norm is large compared with the code's $\epsilon = 10^{-5}$. The first block reads the
    embedding itself, of standard deviation $1/\sqrt{2.5d}$: at $d = 2048$ its queries have mean square $1/(6.25d) =
    7.8\cdot10^{-5}$, and 0.89 after the norm"""
    draw, d, head = Draw(seed), 2048, 128
    W = draw.normal(d, head, std=normal(WeightPlace("W_Q", d, d, 1, 16)).std)
    X = draw.normal(16, d, std=(2.5 * d) ** -0.5)

    def lost(rows: Tensor) -> float:
        return 1 - float(torch.nn.functional.rms_norm(rows @ W, (head,), eps=1e-5).square().mean())

    return assumed(small(lost(rms_norm(X)), "a normed input, mean square short of 1", below=1e-4), lost(X), above=0.05)


# App. E: formulas for positions of the norms, Eqs. 35-52
@claim("pre-qkv-pre-in-words", "Sec. 4.4, Normalization Position", "WRONG AS PRINTED", uses=[eq.pre])
def pre_qkv_pre_in_words(seed: int) -> Evidence:
    """in Pre-QKV-Pre, 'the FFN layer utilizes Post-Norm'
    Correct: Pre-Norm, as in Eq. 48 and in the name; Pre-QKV-Post is the other one
    Severity: slip of print"""
    draw = Draw(seed)
    block, told = make("pre-qkv-pre"), make("pre-qkv-post")
    W, X = generic(block, draw), draw.normal(3, 6)
    told.load_state_dict(block.state_dict())
    Y = mha(rms_norm(X), W, HEADS, "qkv") + X
    reference, second = swiglu(rms_norm(Y), W) + Y, again.block(X, W, HEADS, norms="a qkv f")
    detail, by = "the words against Eqs. 47-48", "torch's attention and norms"
    return wrong(told(X), reference, detail, corrected=block(X), above=0.02, second=second, by=by)
