"""The first block: Eqs. 10-11, First-QKV-Pre, EmbedNorm, and what eps does there."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.blocks.initialisation import WeightPlace, normal
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import assumed, small
from hessiankit.ledger.hybridnorm.definitions import rms_norm
from hessiankit.ledger.registry import claim


@claim("hybridnorm/first-block-eps", "released code, norms of queries, keys and values", "HOLDS UNDER ASSUMPTION", uses=[normal])
def first_block_eps(seed: int) -> Evidence:
    r"""behind their norms queries, keys and values have mean square 1

    Needs: what is normed is large beside the code's $\epsilon = 10^{-5}$. The first block reads the bare embedding, of
    standard deviation $1/\sqrt{2.5d}$: at $d = 2048$ its queries have mean square $1/(6.25d) = 7.8\cdot10^{-5}$, and behind
    the norm 0.89
    """
    draw, d, head = Draw(seed), 2048, 128
    W = draw.normal(d, head, std=normal(WeightPlace("W_Q", d, d, 1, 16)).std)
    X = draw.normal(16, d, std=(2.5 * d) ** -0.5)

    def lost(rows: Tensor) -> float:
        return 1 - float(torch.nn.functional.rms_norm(rows @ W, (head,), eps=1e-5).square().mean())

    return assumed(small(lost(rms_norm(X)), "a normed input, mean square short of 1", below=1e-4), lost(X), above=0.05)
