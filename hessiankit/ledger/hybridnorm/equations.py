"""Blocks: Eqs. 1-11, Figs. 2 and 4, Algorithm 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.attention import Attention
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import counts, relative_error, wrong
from hessiankit.ledger.hybridnorm.definitions import mha, rms_norm, swiglu
from hessiankit.ledger.registry import claim

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


@claim("hybridnorm/post-norm-in-ffn", "Abstract, Sec. 1 and 3.2", "WRONG AS PRINTED", uses=[eq.bare_post])
def post_norm_in_ffn(seed: int) -> Evidence:
    r"""'Post-Norm in the FFN', with Post-Norm as in Eq. 4

    Correct: Eq. 9: the norm stands before the network and feeds branch and residual, not $\mathrm{Norm}(\mathrm{FFN}(Y) + Y)$
    """
    draw = Draw(seed)
    block = make("hybridnorm")
    W, X = generic(block, draw), draw.normal(3, 6)
    Y = mha(X, W, HEADS, "qkv") + X
    return wrong(rms_norm(swiglu(Y, W) + Y), block(X), "Eq. 4 in place of Eq. 9", corrected=hybridnorm_block(X, W), above=0.05)


@claim("ours/full-norms-differ", "HybridNorm, Eqs. 7 and 40, Algorithm 1", "HOLDS", uses=[Attention])
def full_norms(seed: int) -> Evidence:
    """norms of each head and norms over all heads side by side give different functions of the same weights"""
    draw, distances = Draw(seed), []
    for _ in range(5):
        block, full = make("hybridnorm"), make("hybridnorm", norm_scope="full")
        generic(block, draw)
        full.load_state_dict(block.state_dict())
        X = draw.normal(3, 6)
        distances.append(relative_error(full(X), block(X)))
    return counts(sum(distance > 1e-3 for distance in distances), 5, f"of 5 draws, by {min(distances):.2g} and more")
