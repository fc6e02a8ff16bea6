"""Parameter groups by block type: every parameter once, the right rate, decay and table, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
from blockwise_reference import encoder

import hessiankit as hk
from hessiankit.optim import PRESETS, Ratio, block_types, blockwise_lr
from hessiankit.partition import TYPES, Part, model_parts

EQ_5 = {"Emb": 10, "QK": 8, "FFN": 6, "VO": 4, "Norm": 1}


def language_model(**options):
    return hk.Transformer(7, 4, 6, 2, 2, bias=True, attention_bias=True, seed=0, **{"tied": False, **options})


def by_name(groups):
    return {name: group for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "adam_mini", "muon"])
def test_every_trainable_parameter_is_in_exactly_one_group(tied, optimizer):
    model = language_model(tied=tied)
    model.blocks[1].norm_1.weight.requires_grad_(False)
    groups = blockwise_lr(model, 1e-3, optimizer=optimizer)
    seen = [id(p) for group in groups for p in group["params"]]
    assert len(seen) == len(set(seen))
    assert set(seen) == {id(p) for p in model.parameters() if p.requires_grad}
    names = dict(model.named_parameters())
    assert all(names[name] is p for g in groups for name, p in zip(g["param_names"], g["params"], strict=True))
    assert groups.frozen == ("blocks.1.norm_1.weight",)
    assert "frozen, in no group: blocks.1.norm_1.weight" in str(groups)
    assert "frozen, in no group: blocks.1.norm_1.weight" in groups._repr_html_()


def test_the_rates_of_equation_5():
    model = language_model()
    types = block_types(model)
    for name, group in by_name(blockwise_lr(model, 2e-3)).items():
        assert group["block_type"] == types[name]
        assert group["lr"] == 2e-3 * {**EQ_5, "Head": 1}[types[name]]
        assert group["weight_decay"] == (0.1 if dict(model.named_parameters())[name].ndim >= 2 else 0.0)
    assert by_name(blockwise_lr(model, 1.0, head_ratio=3.0))["head.W_C"]["lr"] == 3.0
    tied = language_model(tied=True)
    assert by_name(blockwise_lr(tied, 1.0))["embedding.W_E"]["lr"] == 10.0
    assert by_name(blockwise_lr(tied, 1.0, head_ratio=3.0))["embedding.W_E"]["lr"] == 10.0


def test_presets_are_the_papers():
    assert PRESETS["paper"] == EQ_5
    assert [PRESETS["8/6/4/3"][t] for t in EQ_5] == [8, 6, 4, 3, 1]
    assert [PRESETS["6/4/3/2"][t] for t in EQ_5] == [6, 4, 3, 2, 1]
    assert [PRESETS["adam-mini"][t] for t in EQ_5] == [4, 1, 4, 4, 1]
    assert all(abs(r - PRESETS["paper"][t] ** 0.5) < 0.2 for t, r in PRESETS["conservative"].items())
    assert {g["lr"] for g in blockwise_lr(language_model(), 0.5, "none")} == {0.5}
    with pytest.raises(TypeError):
        PRESETS["paper"]["Emb"] = 1.0


def test_controls_of_the_paper_and_those_it_lacks():
    """Table 2 has some types alone and Norm x 2; all x r is a larger learning rate."""
    model = language_model()
    some = by_name(blockwise_lr(model, 1.0, {"Emb": 10, "FFN": 6}))
    assert {g["block_type"]: g["lr"] for g in some.values()} == {"Emb": 10, "QK": 1, "VO": 1, "FFN": 6, "Norm": 1, "Head": 1}
    assert {g["lr"] for g in blockwise_lr(model, 1.0, {"Norm": 2}) if g["block_type"] == "Norm"} == {2.0}
    assert {g["lr"] for g in blockwise_lr(model, 1.0, dict.fromkeys(TYPES, 5))} == {5.0}
    assert by_name(blockwise_lr(model, 1.0, {"QK": Ratio(2.0, 1.5, 2.5)}))["blocks.0.attention.W_Q"]["ratio_high"] == 2.5


def test_weight_decay():
    """sharpness-disparity/weight-decay: AdamW shrinks by lr x decay, so that r multiplies it; the released code decays norms
    too."""
    model = language_model()
    shrinkage = {g["block_type"]: g["lr"] * g["weight_decay"] for g in blockwise_lr(model, 1e-3, decay="all")}
    assert shrinkage == pytest.approx({k: 1e-4 * {**EQ_5, "Head": 1}[k] for k in shrinkage}, rel=1e-14)
    even = blockwise_lr(model, 1e-3, decay="all", couple_decay=False)
    assert {g["block_type"]: g["lr"] * g["weight_decay"] for g in even} == pytest.approx(
        dict.fromkeys(shrinkage, 1e-4), rel=1e-14
    )
    own = by_name(blockwise_lr(model, 1e-3, decay={"Emb": 0.0, "Norm": 0.2}))
    assert own["embedding.W_E"]["weight_decay"] == 0.0
    assert own["blocks.0.norm_1.bias"]["weight_decay"] == 0.2
    assert own["blocks.0.attention.W_Q"]["weight_decay"] == 0.1
    assert own["blocks.0.attention.b_Q"]["weight_decay"] == 0.0


def test_policies_go_to_the_parts():
    model = language_model()
    assert by_name(blockwise_lr(model, 1.0, biases="Other"))["blocks.0.attention.b_Q"]["lr"] == 1.0
    assert by_name(blockwise_lr(model, 1.0, overrides={r"embedding\.": "FFN"}))["embedding.W_E"]["lr"] == 6.0
    parts = model_parts(model, biases="Other")
    assert str(blockwise_lr(model, 1.0, parts=parts)) == str(blockwise_lr(model, 1.0, biases="Other"))
    with pytest.raises(hk.InputError, match="parts= and biases= both"):
        blockwise_lr(model, 1.0, parts=parts, biases="Other")


def test_parts_must_cover_every_parameter_once():
    model = encoder()
    parts = model_parts(model)
    fused = [part for part in parts if part.axis is not None]
    rest = [part for part in parts if part.axis is None]
    with pytest.raises(
        hk.InputError, match=r"parts= has nothing of 'norm2.weight'; expected every parameter, or it is never trained"
    ):
        blockwise_lr(model, 1.0, parts=[part for part in parts if part.parameter != "norm2.weight"])
    with pytest.raises(hk.InputError, match=r"do not cover 'self_attn.in_proj_weight' of shape \(12, 4\) exactly once"):
        blockwise_lr(model, 1.0, parts=[*rest, *fused[:-1]])
    with pytest.raises(hk.InputError, match=r"the model has no parameter 'norm3.weight'"):
        blockwise_lr(model, 1.0, parts=[*parts, Part("norm3.weight", "Norm", "gain", 0, "", 4)])


def test_the_table():
    groups = blockwise_lr(encoder(), 1e-3)
    rows = [line.split() for line in str(groups).splitlines()]
    assert rows[0] == ["ratios", "'paper',", "base", "lr", "0.001"]
    assert ["VO", "1", "16", "4", "0.004", "0.1", "0.0004"] in rows
    assert ["Norm", "2", "8", "1", "0.001", "0", "0"] in rows
    assert ["QK+VO", "1", "48", "8", "0.008", "0.1", "0.0008"] in rows
    assert ["QK,", "slices", "32", "8", "0.008", "0.1", "0.0008"] in rows
    assert ["VO,", "slices", "16", "4", "0.004", "0.1", "0.0004"] in rows
    assert repr(groups) == "<ParameterGroups: 4 groups; ratios 'paper', base lr 0.001>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": "papers"}, "ratios='papers' is no preset; expected one of paper, 8/6/4/3"),
        ({"ratios": {"Embedding": 10}}, "ratios has 'Embedding', which is no block type"),
        ({"ratios": {"Emb": 0}}, "the ratio of Emb is 0.0; expected a positive number"),
        ({"ratios": "measured"}, "ratios='measured' needs sharpness="),
        ({"sharpness": object()}, "sharpness= is for ratios='measured'"),
        ({"optimizer": "shampoo"}, "optimizer='shampoo'; expected one of adamw"),
        ({"muon_lr": 0.02}, "muon_lr= is for optimizer='muon', not 'adamw'"),
        ({"decay": "norms"}, "decay='norms'; expected 'matrices', 'all' or a mapping"),
        ({"decay": {"Emb": -1.0}}, r"decay=\{'Emb': -1.0\}; expected block types and numbers"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; expected a number of at least 0"),
        ({"muon_lr": torch.tensor(0.02), "optimizer": "muon"}, r"muon_lr=0\.0.*; expected a number of at least 0"),
        ({"guard": "no"}, "guard='no' is not known; choose one of raise, warn, off"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(hk.InputError, match=f"blockwise_lr: {message}"):
        blockwise_lr(language_model(), 1e-3, **options)


def test_a_model_with_nothing_to_train():
    with pytest.raises(hk.InputError, match="no parameter of the model requires a gradient"):
        blockwise_lr(language_model().requires_grad_(False), 1e-3)
