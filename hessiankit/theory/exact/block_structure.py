"""The structure of a block (placement, norm, heads, mask, biases), which decides its formulas, and the smallest such block."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm, norm_of
from hessiankit.blocks.placements import ALPHA, Placement, placement_of_layer

FACTOR = Fraction(3, 2)
"""A rational number in place of a block's ``factor``, 1/sqrt(l) or DeepNet's alpha."""


@dataclass(frozen=True)
class BlockStructure:
    """The structure of a ``TransformerBlock``; the options have its names.

    ``norm_scope`` is None for the placement's own. Heads are 1 and 1, 2 and 2, or 2 on 1 (grouped queries).

    >>> print(BlockStructure("olmo2", n_heads=2, n_kv_heads=1, rotary=True))
    olmo2: layernorm, relu, 2 heads on 1, rotary
    """

    placement: str
    norm: str = "layernorm"
    activation: str = "relu"
    n_heads: int = 1
    n_kv_heads: int = 1
    causal: bool = False
    rotary: bool = False
    bias: bool = False
    attention_bias: bool = False
    output_projection: bool = False
    norm_scope: str | None = None
    affine: bool = True
    layer: int = 1
    n_layers: int = 1
    alpha: float = ALPHA

    def __str__(self) -> str:
        heads = "1 head" if self.n_heads == 1 else f"{self.n_heads} heads" + (" on 1" if self.n_kv_heads == 1 else "")
        flags = ("causal", "rotary", "bias", "attention_bias")
        words = [self.norm, self.activation, heads, *(flag.replace("_", " ") for flag in flags if getattr(self, flag))]
        words += ["W_O"] * (self.output_projection and self.n_heads == 1) + ["no gains"] * (not self.affine)
        words += ["norms over all heads"] * (self.norm_scope == "full")
        layer = f", layer {self.layer} of {self.n_layers}" if self.n_layers > 1 else ""
        return f"{self.placement}{layer}: {', '.join(words)}"

    @property
    def sizes(self) -> dict[str, int]:
        """The smallest widths that show the structure.

        LayerNorm of two features has no curvature but that of eps, so it gets three; queries have two features, since one could
        not tell a transposition; values of several heads have one, unless each head's are normalised.
        """
        placement = self.placed
        d = 4 if placement.grouped else 3 if self.norm == "layernorm" else 2
        has_norm = bool({"v", "c"} & set(placement.attention_norms)) and self.norm_scope != "full"
        d_v = d if self.n_heads == 1 and not self.output_projection else 2 if has_norm or self.n_heads == 1 else 1
        return {"d": d, "d_ff": 1 if self.n_heads > 1 or d > 2 else 2, "d_k": 2, "d_v": d_v}

    def block(self, d_model: int, d_ff: int, **options: Any) -> TransformerBlock:
        """Return a block of this structure and these widths, some of its options changed."""
        return TransformerBlock(d_model, d_ff, **{**vars(self), **options})

    def small(self) -> TransformerBlock:
        """Return the block of this structure at these sizes, with a rational factor."""
        sizes, has_output = self.sizes, self.n_heads > 1 or self.output_projection
        block = self.block(sizes["d"], sizes["d_ff"], d_k=sizes["d_k"], d_v=sizes["d_v"], output_projection=has_output)
        if block.factor is not None:
            block.factor = FACTOR  # type: ignore[assignment]
        return block

    @property
    def placed(self) -> Placement:
        """The placement that the layer has."""
        return placement_of_layer(self.placement, self.layer, self.n_layers, self.alpha)


def structure_of(block: TransformerBlock) -> BlockStructure:
    """Return the structure of a block, with as many heads as ``BlockStructure.small`` has.

    >>> print(structure_of(TransformerBlock(8, 5, 4, "pre", "rmsnorm", "swiglu", n_kv_heads=2, causal=True)))
    pre: rmsnorm, swiglu, 2 heads on 1, causal
    """
    part, network = block.attention, block.feedforward
    norms = [m for m in block.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm, GroupNorm))]
    multi_head = part.n_heads > 1
    inner = any(getattr(part, f"norm_{letter}") is not None for letter in "qkvc")
    return BlockStructure(
        block.placement,
        norm="rmsnorm" if any(norm_of(m)[0] == "rmsnorm" for m in norms) else "layernorm",
        activation="swiglu" if network.W_G is not None else network.activation,
        n_heads=2 if multi_head else 1,
        n_kv_heads=2 if multi_head and part.n_kv_heads == part.n_heads else 1,
        causal=part.causal,
        rotary=part.rotary,
        bias=network.b_1 is not None,
        attention_bias=part.b_Q is not None,
        output_projection=part.W_O is not None,
        norm_scope=part.norm_scope if inner and part.norm_scope != block.own_placement.norm_scope else None,
        affine=any(getattr(m, "weight", None) is not None for m in norms) or not norms,
        layer=block.layer,
        n_layers=block.n_layers,
        alpha=block.alpha,
    )
