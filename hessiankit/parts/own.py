"""The block types of hessiankit's own modules: every parameter's follows from the module that owns it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hessiankit.blocks import (
    Attention,
    ClassHead,
    FeedForward,
    GroupNorm,
    MeanPoolHead,
    PatchEmbedding,
    TokenEmbedding,
    TokenHead,
    TransformerBlock,
)

_LETTERED = (Attention, PatchEmbedding, TokenEmbedding, TokenHead, MeanPoolHead, ClassHead)
_OF_LETTER = {
    "W_Q": ("QK", "query"),
    "W_K": ("QK", "key"),
    "b_Q": ("QK", "query bias"),
    "b_K": ("QK", "key bias"),
    "W_V": ("VO", "value"),
    "W_O": ("VO", "output"),
    "b_V": ("VO", "value bias"),
    "b_O": ("VO", "output bias"),
    "b_E": ("Emb", "patch embedding bias"),
    "P": ("Emb", "position embedding"),
    "W_C": ("Head", "head"),
    "b_C": ("Head", "head bias"),
}
_OF_FEEDFORWARD = {"W_1": "up", "W_2": "down", "W_G": "gate", "b_1": "up bias", "b_2": "down bias", "b_G": "gate bias"}


def own_types(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name, block type, role) of the parameters that one module owns itself; nothing for a module of another library.

    The models of The Sharpness Disparity Principle have no learnable scales beside the norms' gains; those of a placement
    (LayerScale's lambda, Admin's omega) count as ``Norm``.

    >>> [found for found in own_types(FeedForward(2, 3))][0]
    ('W_1', 'FFN', 'up')
    """
    scales = _scales(module) if isinstance(module, TransformerBlock) else set()
    for letter, _ in module.named_parameters(recurse=False):
        if isinstance(module, GroupNorm):
            yield letter, "Norm", "gain" if letter == "weight" else "norm bias"
        elif isinstance(module, FeedForward):
            yield letter, "FFN", _OF_FEEDFORWARD[letter]
        elif isinstance(module, TokenHead) and letter == "W_E":
            yield letter, "Head", "head"
        elif isinstance(module, (PatchEmbedding, TokenEmbedding)) and letter == "W_E":
            yield letter, "Emb", "token embedding" if isinstance(module, TokenEmbedding) else "patch embedding"
        elif isinstance(module, _LETTERED):
            yield letter, *_OF_LETTER[letter]
        elif letter in scales:
            yield letter, "Norm", "scale"


def _scales(block: TransformerBlock) -> set[str]:
    """Return the names of a block's learnable scales."""
    return {f"{scale.name}_{k}" for scale in block.own_placement.scales for k in (1, 2)}
