"""timm's vision transformers: blocks under squared error, whole models under cross entropy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from curvature_reference import draw
from model_zoo import checked, generic, images
from torch import nn

timm = pytest.importorskip("timm")

from timm.models.eva import Eva  # noqa: E402
from timm.models.mlp_mixer import MlpMixer  # noqa: E402
from timm.models.swin_transformer import SwinTransformer  # noqa: E402
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock, VisionTransformer  # noqa: E402

LABELS = torch.tensor([0, 2])
BLOCKS = {  # class, width, options
    "pre-norm": (Block, 4, {"mlp_ratio": 1.25, "qkv_bias": True}),
    "layer scale": (Block, 4, {"mlp_ratio": 1.25, "init_values": 0.1}),
    "query and key norms": (Block, 6, {"mlp_ratio": 0.5, "qk_norm": True}),  # two entries a head would be normed to signs
    "post-norm": (ResPostBlock, 4, {"mlp_ratio": 1.25}),
    "parallel": (ParallelScalingBlock, 4, {"mlp_ratio": 1.25}),
}
MODELS = {
    "class token": {"depth": 2},
    "average of the tokens": {"global_pool": "avg", "class_token": False, "reg_tokens": 1},
    "pooled by attention": {"global_pool": "map", "class_token": False},
}


@pytest.fixture(params=[True, False], ids=["fused", "explicit"])
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(request.param)
    yield request.param
    timm.layers.set_fused_attn(bool(before))


def vision_transformer(**options: object) -> nn.Module:
    sizes = {"img_size": 4, "patch_size": 2, "in_chans": 2, "num_classes": 3, "embed_dim": 4, "num_heads": 2, "mlp_ratio": 1.25}
    return generic(VisionTransformer(**{**sizes, "depth": 1, **options}))


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name, fused):
    kind, width, options = BLOCKS[name]
    checked(generic(kind(width, 2, **options)), draw(2, 3, width), draw(2, 3, width, seed=7))


@pytest.mark.parametrize("name", MODELS)
def test_vision_transformer(name, fused):
    checked(vision_transformer(**MODELS[name]), images(), LABELS, loss="cross_entropy")


OTHERS = {
    "EVA, rotary": (Eva, 4, {"depth": 1, "embed_dim": 8, "num_heads": 2, "use_rot_pos_emb": True, "swiglu_mlp": True}),
    "MLP-Mixer": (MlpMixer, 4, {"num_blocks": 1, "embed_dim": 4}),
    "Swin, shifted windows": (SwinTransformer, 8, {"depths": (2,), "embed_dim": 4, "num_heads": (2,), "window_size": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architecture(name):
    kind, side, options = OTHERS[name]
    model = kind(img_size=side, patch_size=2, in_chans=2, num_classes=3, **options)
    checked(generic(model), draw(2, 2, side, side, seed=3), LABELS, loss="cross_entropy")


def test_all_references_on_a_vision_transformer():
    checked(vision_transformer(), images(), LABELS, loss="cross_entropy", against=("reverse-over-reverse", "central-differences"))
