"""The first block: Eqs. 10-11, First-QKV-Pre, EmbedNorm, and what eps does there."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hessiankit.blocks import Transformer, TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, normal
from hessiankit.blocks.placements import placement_of_layer
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, small
from hessiankit.ledger.hybridnorm.definitions import mha, rms_norm, swiglu
from hessiankit.ledger.hybridnorm.equations import HEADS, compare, generic, hybridnorm_block
from hessiankit.ledger.registry import claim


def first_block(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 10 and 11."""
    Y = mha(rms_norm(X), W, HEADS, "qkv") + X
    return swiglu(rms_norm(Y), W) + Y


def first_qkv_pre(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """The unnumbered equations of Sec. 4.4."""
    Y = mha(X, W, HEADS, "qkv") + X
    return swiglu(rms_norm(Y), W) + Y


@claim("hybridnorm/eq10-11", "Sec. 3.2, Eqs. 10-11", "HOLDS", uses=[eq.pre, placement_of_layer])
def eq10_11(seed: int) -> Evidence:
    r"""first block of the starred variant: $Y^0 = \mathrm{MHA}_{QKV}(\mathrm{Norm}(X^0)) + X^0$, $X^1 =
    \mathrm{FFN}(\mathrm{Norm}(Y^0)) + Y^0$"""
    return compare(seed, "hybridnorm*", first_block)


@claim("hybridnorm/first-block-rest", "Sec. 3.2, after Eq. 11", "HOLDS", uses=[placement_of_layer])
def first_block_rest(seed: int) -> Evidence:
    """all other blocks of the starred variant are HybridNorm blocks"""
    draw = Draw(seed)
    model = Transformer(11, 6, 5, 3, HEADS, "hybridnorm*", head=None, final_norm=False, norm="rmsnorm", eps=0.0, affine=False,
                        activation="swiglu", initialisation=None).double()  # fmt: skip
    weights = [generic(cast(TransformerBlock, block), draw) for block in model.blocks]
    X = draw.normal(4, 6)
    with torch.no_grad():
        model.embedding.W_E[:4] = X
    reference = hybridnorm_block(hybridnorm_block(first_block(X, weights[0]), weights[1]), weights[2])
    return agrees(model(torch.arange(4)[None])[0], reference, "three blocks")


@claim("hybridnorm/first-qkv-pre", "Sec. 4.4, unnumbered, Fig. 4", "HOLDS", uses=[eq.bare_pre, placement_of_layer])
def first_qkv(seed: int) -> Evidence:
    r"""First-QKV-Pre: $Y^0 = \mathrm{MHA}_{QKV}(X^0) + X^0$, $X^1 = \mathrm{FFN}(\mathrm{Norm}(Y^0)) + Y^0$"""
    return compare(seed, "first-qkv-pre", first_qkv_pre)


@claim("hybridnorm/embednorm", "Sec. 4.4, Fig. 4", "HOLDS", uses=[Transformer])
def embednorm(seed: int) -> Evidence:
    """EmbedNorm: a norm after the embedding, HybridNorm blocks"""
    draw = Draw(seed)
    options: dict[str, Any] = {"norm": "rmsnorm", "eps": 0.0, "affine": False, "activation": "swiglu"}
    model = Transformer(11, 6, 5, 2, HEADS, "embednorm-hybridnorm", head=None, final_norm=False, initialisation=None, **options)
    model = model.double()
    weights = [generic(cast(TransformerBlock, block), draw) for block in model.blocks]
    X = draw.normal(4, 6)
    with torch.no_grad():
        model.embedding.W_E[:4] = X
    return agrees(model(torch.arange(4)[None])[0], hybridnorm_block(hybridnorm_block(rms_norm(X), weights[0]), weights[1]))


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
