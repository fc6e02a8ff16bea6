"""Block types of a model's parameters, as The Sharpness Disparity Principle (Wang et al.) groups them."""

from __future__ import annotations

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
    Transformer,
    TransformerBlock,
    VisionTransformer,
)
from hessiankit.errors import InputError

TYPES = ("Emb", "QK", "VO", "FFN", "Norm", "Head")

_OF_LETTER = {
    **dict.fromkeys(("W_Q", "W_K", "b_Q", "b_K"), "QK"),
    **dict.fromkeys(("W_V", "W_O", "b_V", "b_O"), "VO"),
    **dict.fromkeys(("W_E", "b_E", "P"), "Emb"),
    **dict.fromkeys(("W_C", "b_C"), "Head"),
}
_LETTERED = (Attention, PatchEmbedding, TokenEmbedding, TokenHead, MeanPoolHead, ClassHead)


def block_types(model: nn.Module) -> dict[str, str]:
    """Return the block type (Emb, QK, VO, FFN, Norm, Head) of every parameter of one of hessiankit's own modules.

    The type follows from the module that owns the parameter. Every parameter gets exactly one. The paper's models have no
    learnable scales beside the norms' gains; those of a placement (LayerScale's lambda, Admin's omega) count as ``Norm``, and a
    head that is tied to the embedding as ``Emb``.

    Raises:
        InputError: If a parameter belongs to a module that is not recognised; it is named, never guessed.

    >>> types = block_types(TransformerBlock(d_model=4, d_ff=8))
    >>> types["attention.W_Q"], types["attention.W_V"], types["feedforward.W_1"], types["norm_1.weight"]
    ('QK', 'VO', 'FFN', 'Norm')
    """
    found: dict[str, str] = {}
    listed = {name for name, _ in model.named_parameters()}  # a tied parameter is listed under its first name only
    for prefix, module in model.named_modules():
        for letter, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{letter}" if prefix else letter
            if name not in listed:
                continue
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm, GroupNorm)):
                found[name] = "Norm"
            elif isinstance(module, FeedForward):
                found[name] = "FFN"
            elif isinstance(module, _LETTERED):
                found[name] = _OF_LETTER[letter]
            elif isinstance(module, TransformerBlock) and letter in _scales(module):
                found[name] = "Norm"
            else:
                raise InputError(
                    f"block_types: {name!r} belongs to a {type(module).__name__}, which is not recognised; only "
                    f"{TransformerBlock.__name__}, {Transformer.__name__}, {VisionTransformer.__name__} and stacks of them are."
                )
    return found


def _scales(block: TransformerBlock) -> set[str]:
    """Return the names of a block's learnable scales."""
    return {f"{scale.name}_{k}" for scale in block.own_placement.scales for k in (1, 2)}
