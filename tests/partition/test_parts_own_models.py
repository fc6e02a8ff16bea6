"""Block types of hessiankit's own models: every parameter gets exactly one, by the module that owns it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS
from hessiankit.partition import TYPES


def full_model() -> hk.VisionTransformer:
    """A model with every parameter that the modules can have."""
    return hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, n_blocks=2, n_heads=2, bias=True, attention_bias=True)


def test_types_follow_from_the_owner():
    model = full_model()
    types = hk.block_types(model)
    assert list(types) == [name for name, _ in model.named_parameters()]
    of = {kind: {name.removeprefix("blocks.1.") for name, seen in types.items() if seen == kind} for kind in TYPES}
    block = {
        "QK": {"attention.W_Q", "attention.W_K", "attention.b_Q", "attention.b_K"},
        "VO": {"attention.W_V", "attention.W_O", "attention.b_V", "attention.b_O"},
        "FFN": {"feedforward.W_1", "feedforward.b_1", "feedforward.W_2", "feedforward.b_2"},
        "Norm": {"norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias"},
    }
    for kind, names in block.items():
        assert of[kind] == names | {f"blocks.0.{name}" for name in names}
    assert of["Emb"] == {"embedding.W_E", "embedding.b_E", "embedding.P"}
    assert of["Head"] == {"head.W_C", "head.b_C"}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_block_alone_and_a_stack(norm):
    block = hk.TransformerBlock(4, 5, norm=norm)
    assert set(hk.block_types(block).values()) == {"QK", "VO", "FFN", "Norm"}
    stack = nn.Sequential(block, nn.LayerNorm(4), nn.Dropout(0.1))
    types = hk.block_types(stack)
    assert list(types) == [name for name, _ in stack.named_parameters()]
    assert types["1.weight"] == "Norm"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_of_every_placement(placement, tied):
    model = hk.Transformer(5, 6, 4, 2, 2, placement, activation="swiglu", bias=True, max_len=3, tied=tied)
    types = hk.block_types(model)
    assert list(types) == [name for name, _ in model.named_parameters()]
    assert set(types.values()) == set(TYPES) - {"Other"} - ({"Head"} if tied else set())
    assert types["blocks.1.feedforward.W_G"] == types["blocks.0.feedforward.b_G"] == "FFN"
    assert types["embedding.W_E"] == types["embedding.P"] == "Emb"
    assert {kind for name, kind in types.items() if "norm" in name or "lambda" in name or "omega" in name} == {"Norm"}


@pytest.mark.parametrize("head", ["mean", "class"])
def test_a_classifier(head):
    types = hk.block_types(hk.Transformer(5, 4, 6, 1, head=head, n_classes=3))
    assert {name for name, kind in types.items() if kind == "Head"} == {"head.W_C", "head.b_C"}


def test_a_shared_parameter_is_listed_once():
    model = nn.Sequential(hk.TransformerBlock(4, 5), hk.TransformerBlock(4, 5))
    model[1].attention.W_V = model[0].attention.W_V
    types = hk.block_types(model)
    assert list(types) == [name for name, _ in model.named_parameters()]
    assert "1.attention.W_V" not in types
    shared = nn.Sequential(model[0], model[0])
    assert list(hk.block_types(shared)) == [name for name, _ in shared.named_parameters()]


def test_a_linear_map_after_the_blocks_is_the_head():
    types = hk.block_types(nn.Sequential(hk.TransformerBlock(4, 5), nn.Linear(4, 2)))
    assert types["1.weight"] == types["1.bias"] == "Head"


def test_every_unknown_parameter_is_named():
    block = hk.TransformerBlock(4, 5)
    block.strange, block.odd = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    with pytest.raises(
        hk.InputError, match=r"not recognised: 'strange' \(TransformerBlock\), 'odd' \(TransformerBlock\); pass inputs="
    ):
        hk.block_types(block)
    types = hk.block_types(block, overrides={"strange|odd": "Other"})
    assert types["strange"] == types["odd"] == "Other"
