"""Transformer blocks and models as ordinary ``nn.Module``s in the papers' letters.

A weight ``W`` multiplies from the right, ``X @ W`` with tokens as rows, so that ``W.reshape(-1)`` is the paper's
vec_r(W) and a block of the Hessian can be laid beside its formula without any re-ordering. Each norm placement is an
equation of two lines and an entry in the registry (``placements.py``).
"""

from typing import TYPE_CHECKING

from hessiankit.support.package import on_demand

if TYPE_CHECKING:  # for type checkers; at run time ``_NAMES`` imports them, so that the placements are read without torch
    from hessiankit.blocks.attention import Attention
    from hessiankit.blocks.block import TransformerBlock
    from hessiankit.blocks.embeddings import ClassHead, MeanPoolHead, PatchEmbedding, TokenEmbedding, TokenHead
    from hessiankit.blocks.feedforward import ACTIVATIONS, GATED, FeedForward
    from hessiankit.blocks.initialisation import SCHEMES, initialise, profile_admin
    from hessiankit.blocks.norms import NORMS, GroupNorm
    from hessiankit.blocks.placements import PLACEMENTS, Placement, Scale, register
    from hessiankit.blocks.transformer import Transformer, VisionTransformer

_NAMES = {
    "attention": "Attention",
    "block": "TransformerBlock",
    "embeddings": "ClassHead MeanPoolHead PatchEmbedding TokenEmbedding TokenHead",
    "feedforward": "ACTIVATIONS GATED FeedForward",
    "initialisation": "SCHEMES initialise profile_admin",
    "norms": "NORMS GroupNorm",
    "placements": "PLACEMENTS Placement Scale register",
    "transformer": "Transformer VisionTransformer",
}
__all__ = [
    "ACTIVATIONS", "GATED", "NORMS", "PLACEMENTS", "SCHEMES", "Attention", "ClassHead", "FeedForward", "GroupNorm",
    "MeanPoolHead", "PatchEmbedding", "Placement", "Scale", "TokenEmbedding", "TokenHead", "Transformer", "TransformerBlock",
    "VisionTransformer", "initialise", "profile_admin", "register",
]  # fmt: skip  # written out, since type checkers read it

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _NAMES)
