"""Block types of hessiankit's own models; stated choices and what users override; how block types print and are stored."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from nano_gpt import NanoGPT
from torch import nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS
from hessiankit.training.partition import TYPES, BlockTypes, Part, model_parts


def model(tied: bool = True) -> nn.Module:
    gpt = NanoGPT(2, True)
    if not tied:
        gpt.lm_head.weight = nn.Parameter(torch.randn(7, 4))
    return gpt


def changed(**options: object) -> dict[str, str]:
    """What an option changes, by the part."""
    before, after = hk.block_types(model()), hk.block_types(model(), **options)
    assert list(before) == list(after)
    return {name: kind for name, kind in after.items() if before[name] != kind}


def test_ties() -> None:
    assert hk.block_types(model())["wte.weight"] == "Emb"
    assert changed(tied="Head") == {"wte.weight": "Head"}
    (part,) = (part for part in model_parts(model()) if part.parameter == "wte.weight")
    assert "tied to the head" in part.reason
    untied = hk.block_types(model(tied=False))
    assert (untied["wte.weight"], untied["lm_head.weight"]) == ("Emb", "Head")


def test_biases() -> None:
    moved = changed(biases="Other")
    assert set(moved.values()) == {"Other"}
    names = {f"h.{k}.{layer}.bias" for k in range(2) for layer in ("attn.c_proj", "mlp.0", "mlp.2")}
    names |= {f"h.{k}.attn.c_attn.bias[{cut}]" for k in range(2) for cut in ("0:4", "4:8", "8:12")}
    assert set(moved) == names  # those of norms stay: the paper's norms have them


@pytest.mark.parametrize("kind", ["Other", "Head"])
def test_the_final_norm(kind: str) -> None:
    assert changed(final_norm=kind) == {"ln_f.weight": kind, "ln_f.bias": kind}


def test_overrides_are_searched_in_names_of_parts_and_parameters() -> None:
    assert changed(overrides={r"wpe": "Other"}) == {"wpe.weight": "Other"}
    assert changed(overrides={r"^h\.0\.attn\.c_attn\.weight\[4:8\]$": "Other"}) == {"h.0.attn.c_attn.weight[4:8]": "Other"}
    everything = hk.block_types(model(), overrides={"": "FFN"})
    assert set(everything.values()) == {"FFN"}
    twice = changed(overrides={r"wpe": "Other", r"wp.\.weight": "Other"})
    assert twice == {"wpe.weight": "Other"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"wpe": "embedding"}, r"overrides\['wpe'\] is 'embedding'; expected one of Emb, QK, VO, FFN, Norm, Head, Other"),
        ({"wpx": "Emb"}, "override 'wpx' matches no part"),
        ({"(": "Emb"}, r"override '\(' is no regular expression"),
        ({"wpe": "Emb", r"^w": "Other"}, r"overrides give 'wpe.weight' different types \('wpe': 'Emb', '\^w': 'Other'\)"),
    ],
)
def test_overrides_that_cannot_be(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(hk.InputError, match=message):
        model_parts(model(), overrides=overrides)


@pytest.mark.parametrize("option", [{"tied": "FFN"}, {"biases": "none"}, {"final_norm": "FFN"}])
def test_choices_that_there_are_not(option: dict[str, str]) -> None:
    with pytest.raises(hk.InputError, match=rf"model_parts: {next(iter(option))}=.* is not known; choose one of"):
        model_parts(model(), **option)


def test_block_types_are_a_plain_dict_that_prints_as_a_table() -> None:
    types = hk.block_types(model())
    assert json.loads(json.dumps(types)) == types == {part.name: part.type for part in types.parts}
    assert list(types.entries) == [kind for kind in TYPES if kind in types.values()]
    assert sum(types.entries.values()) == sum(p.numel() for p in model().parameters())
    text = types.table()
    for part in types.parts:
        line = next(line for line in text.splitlines() if line.split()[:2] == [part.name.split(" ")[0], part.type])
        assert f"{part.size:,}" in line
    assert ["FFN", "8", str(2 * (4 * 5 + 5 + 5 * 4 + 4)), "28.0", "%"] in [line.split() for line in text.splitlines()]
    assert "<td>wte.weight</td>" in types._repr_html_()
    copy = pickle.loads(pickle.dumps(types))
    assert (copy, copy.parts) == (types, types.parts)
    assert [part.parameter for part in types.of_type("Emb")] == ["wte.weight", "wpe.weight"]


def test_no_parameters() -> None:
    assert hk.block_types(nn.Identity()) == {}
    assert str(BlockTypes())


def test_a_part_of_a_gradient() -> None:
    part = Part("w", "QK", "query", 0, "by hand", 6, 1, ((0, 1), (3, 4)))
    w = torch.arange(12.0).reshape(3, 4)
    views = part.of(w)
    assert [view.flatten().tolist() for view in views] == [[0, 4, 8], [3, 7, 11]]
    assert float(part.squared_norm(w)) == sum(x * x for x in (0, 4, 8, 3, 7, 11))
    views[0].zero_()
    assert w[:, 0].tolist() == [0, 0, 0]  # views, not copies


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
