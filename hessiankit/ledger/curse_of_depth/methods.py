"""Sections 5 and 6: the methods it compares with, and the released code."""

from __future__ import annotations

import math
from typing import Any

import torch

from hessiankit.blocks import placements as eq
from hessiankit.blocks.initialisation import WeightPlace, deepnorm, olmo, olmo_printed
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import make_block, make_stack, stream
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, wrong
from hessiankit.ledger.registry import claim


def place(letter: str, layer: int = 3, n_layers: int = 12) -> WeightPlace:
    """Return a weight's place in a model of width 768, d_ff 2048."""
    rows, columns = {"W_2": (2048, 768), "W_1": (768, 2048)}.get(letter, (768, 768))
    return WeightPlace(letter, rows, columns, layer, n_layers)


@claim(
    "curse-of-depth/deepnorm-code", "released code, DeepNorm of Tables 1 and 2", "WRONG AS PRINTED", uses=[eq.deepnorm, deepnorm]
)
def deepnorm_code(seed: int) -> Evidence:
    r"""the baseline DeepNorm is Wang et al.'s

    Correct: the code has $\alpha = 2.8284$ at every depth, which is that of $L = 32$, and gains $(8L)^{+1/4}$ for
    $(8L)^{-1/4}$: weights 9.8 times too large at $L = 12$, 13.9 times at 24
    """
    printed, reference, corrected = [], [], []
    for L in (12, 24):
        gain = deepnorm(place("W_O", n_layers=L)).std / deepnorm(place("W_Q", n_layers=L)).std
        factor = make_block(seed, placement="deepnorm", n_layers=L).factor or 0.0
        printed += [torch.tensor([2.8284]), torch.tensor([(8 * L) ** 0.25])]
        reference += [torch.tensor([(2 * L) ** 0.25]), torch.tensor([(8 * L) ** -0.25])]
        corrected += [torch.tensor([factor]), torch.tensor([gain])]
    detail = f"alpha and gain at L = 12, 24; the gain over the right one {96**0.5:.1f} and {192**0.5:.1f}"
    return wrong(printed, reference, detail, corrected=corrected, above=0.05, below=1e-6)


@claim("curse-of-depth/olmo-init", "Sec. 5.3, OLMo's Scaled Initialization", "WRONG AS PRINTED", uses=[olmo, olmo_printed])
def olmo_init(seed: int) -> Evidence:
    r"""'scales input projections by $1/\sqrt{d_{\mathrm{model}}}$, and output projections by
    $1/\sqrt{2\,d_{\mathrm{model}}\,l}$ at every layer'

    Correct: OLMo's code has $1/\sqrt{2\,d_{\mathrm{ff}}\,l}$, the fan-in, for the network's $W_2$; both are the standard
    deviation, cut at three of it
    """
    printed, code = olmo_printed(place("W_2")).std, olmo(place("W_2")).std
    return wrong(printed, code, "W_2 of block 3", corrected=1 / math.sqrt(2 * 2048 * 3), above=0.3)


@claim("ours/after-residual-forgets", "The Curse of Depth, Table 8, 'After Residual'", "HOLDS", uses=[eq.lns_after_residual])
def forgets(seed: int) -> Evidence:
    """there the part of $x_1$ in $x_{L+1}$ is $1/L!$"""
    X, blocks = Draw(seed).normal(5, 16), make_stack(seed, 5, "lns-after-residual")
    for block in blocks:
        ends: Any = (block.attention.W_O, block.feedforward.W_2)
        for W in ends:
            W.zero_()
    return agrees(stream(blocks, X)[-1], X / math.factorial(5), "5 blocks whose branches return 0")
