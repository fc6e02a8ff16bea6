"""Tiny vision transformers and their relatives from timm: the same interface as the models of transformers, labels to loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.architectures import Instance, batch_of, generic

IMAGES: dict[str, Any] = {"img_size": 8, "in_chans": 2, "num_classes": 3}
PATCHES = {**IMAGES, "patch_size": 4}
VIT = {**PATCHES, "embed_dim": 4, "depth": 1, "num_heads": 2, "mlp_ratio": 1.25}
FLAT: dict[str, Any] = {"in_chans": 2, "num_classes": 3}
WINDOWS = {**IMAGES, "patch_size": 2, "embed_dim": 4, "depths": (2,), "num_heads": (2,), "window_size": 2}
STAGES = {**FLAT, "depths": (1, 1), "dims": (4, 6)}
MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "vit": lambda m: m.vision_transformer.VisionTransformer(**VIT),
    "vit, average of the tokens": lambda m: m.vision_transformer.VisionTransformer(
        **VIT, global_pool="avg", class_token=False, reg_tokens=1
    ),
    "vit, pooled by attention": lambda m: m.vision_transformer.VisionTransformer(**VIT, global_pool="map", class_token=False),
    "vit, relative positions": lambda m: m.vision_transformer_relpos.VisionTransformerRelPos(**VIT),
    "deit, distilled": lambda m: m.deit.VisionTransformerDistilled(**VIT),
    "beit": lambda m: m.beit.Beit(**VIT, use_rel_pos_bias=True),
    "cait": lambda m: m.cait.Cait(**VIT),
    "eva, rotary": lambda m: m.eva.Eva(**{**VIT, "embed_dim": 8}, use_rot_pos_emb=True, swiglu_mlp=True),
    "xcit": lambda m: m.xcit.Xcit(**{**PATCHES, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2, "img_size": 8}),
    "mlp-mixer": lambda m: m.mlp_mixer.MlpMixer(**PATCHES, num_blocks=1, embed_dim=4),
    "gmlp": lambda m: m.mlp_mixer.MlpMixer(
        **PATCHES,
        num_blocks=1,
        embed_dim=4,
        mlp_ratio=2,
        block_layer=m.mlp_mixer.SpatialGatingBlock,
        mlp_layer=m.mlp_mixer.GatedMlp,
    ),
    "swin": lambda m: m.swin_transformer.SwinTransformer(**WINDOWS),
    "swin v2": lambda m: m.swin_transformer_v2.SwinTransformerV2(**WINDOWS),
    "twins": lambda m: m.twins.Twins(
        **IMAGES,
        patch_size=2,
        embed_dims=(4, 4),
        num_heads=(1, 2),
        mlp_ratios=(2, 2),
        depths=(1, 1),
        sr_ratios=(2, 1),
        wss=(2, 2),
    ),
    "pvt v2": lambda m: m.pvt_v2.PyramidVisionTransformerV2(
        **FLAT, depths=(1, 1), embed_dims=(4, 4), num_heads=(1, 2), sr_ratios=(2, 1), mlp_ratios=(2, 2)
    ),
    "metaformer": lambda m: m.metaformer.MetaFormer(**STAGES),
    "convnext": lambda m: m.convnext.ConvNeXt(**FLAT, depths=(1, 1, 1, 1), dims=(2, 2, 4, 4), patch_size=1),
    "gc vit": lambda m: m.gcvit.GlobalContextVit(
        **FLAT, img_size=(16, 16), window_size=(2, 2), embed_dim=4, depths=(1,), num_heads=(2,), mlp_ratio=2.0
    ),
    "nest": lambda m: m.nest.Nest(**PATCHES, num_levels=1, embed_dims=(4,), num_heads=(2,), depths=(1,)),
}
"""By name, each made from ``timm.models``."""


class Labelled(nn.Module):
    """A classifier that returns its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        """Return ``loss`` and ``logits``."""
        logits = self.model(pixel_values)
        return SimpleNamespace(loss=cross_entropy(logits.float(), labels), logits=logits)


def vision_names() -> list[str]:
    """Return "timm/vit" and the like."""
    return [f"timm/{name}" for name in MODELS]


def vision(name: str, attention: str = "eager") -> Instance:
    """Return an instance of one of :func:`vision_names`.

    Args:
        name: Its name.
        attention: "eager", or "sdpa" for torch's fused attention where the model has it.
    """
    import timm
    from timm.layers import set_fused_attn, use_fused_attn

    before = use_fused_attn()
    set_fused_attn(attention == "sdpa")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = generic(Labelled(MODELS[name.removeprefix("timm/")](timm.models)))
    finally:
        set_fused_attn(bool(before))
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).double()
    return Instance(model, batch_of("images"))
