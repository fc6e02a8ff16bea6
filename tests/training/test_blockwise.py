"""Parameter groups by block type: every parameter once, the right rate, from presets and measurements, for Muon and Adam-mini."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from blockwise_reference import D, encoder, with_gradients
from torch import nn

import hessiankit as hk
from hessiankit.training.optim import PRESETS, Ratio, block_types, blockwise_lr, check_groups, measured_ratios
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.sharpness import sharpness

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


def test_some_types_alone():
    some = by_name(blockwise_lr(language_model(), 1.0, {"Emb": 10, "FFN": 6, "QK": Ratio(2.0, 1.5, 2.5)}))
    assert {g["block_type"]: g["lr"] for g in some.values()} == {"Emb": 10, "QK": 2, "VO": 1, "FFN": 6, "Norm": 1, "Head": 1}
    assert some["blocks.0.attention.W_Q"]["ratio_high"] == 2.5


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
    with pytest.raises(hk.InputError, match=r"parts= has nothing of 'norm2.weight'; expected every parameter"):
        blockwise_lr(model, 1.0, parts=[part for part in parts if part.parameter != "norm2.weight"])
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
        ({"ratios": {"Emb": 0}}, "the ratio of Emb is 0.0"),
        ({"ratios": "measured"}, "ratios='measured' needs sharpness="),
        ({"sharpness": object()}, "sharpness= is for ratios='measured'"),
        ({"optimizer": "shampoo"}, "optimizer='shampoo'; expected one of adamw"),
        ({"muon_lr": 0.02}, "muon_lr= is for optimizer='muon', not 'adamw'"),
        ({"decay": "norms"}, "decay='norms'; expected 'matrices', 'all' or a mapping"),
        ({"decay": {"Emb": -1.0}}, r"decay=\{'Emb': -1.0\}; expected block types and numbers"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; expected a number of at least 0"),
        ({"guard": "no"}, "guard='no' is not known; choose one of raise, warn, off"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(hk.InputError, match=f"blockwise_lr: {message}"):
        blockwise_lr(language_model(), 1e-3, **options)


def test_a_model_with_nothing_to_train():
    with pytest.raises(hk.InputError, match="no parameter of the model requires a gradient"):
        blockwise_lr(language_model().requires_grad_(False), 1e-3)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_orthogonalises_a_fused_tensor_whole():
    """A slice gets its rate of the whole tensor's step; that is not the step of a tensor of its own."""
    model, plain = encoder(), encoder()
    groups = blockwise_lr(model, 1e-3, {"QK": 2.0, "VO": 1.0}, optimizer="muon")
    assert set(groups.bare()[0]) == {"params", "lr", "weight_decay", "use_muon"}  # what MuonWithAuxAdam of its authors takes
    rated = groups.muon
    fused = [g for g in rated if g["block_type"] == "QK+VO"]
    before = model.self_attn.in_proj_weight.detach().clone()
    for m, optimizer in ((model, torch.optim.Muon(fused)), (plain, torch.optim.Muon([plain.self_attn.in_proj_weight], 2e-3))):
        m.self_attn.in_proj_weight.grad = torch.arange(12.0 * D).reshape(12, D).sin().double()
        optimizer.step()
    step, whole = (m.self_attn.in_proj_weight.detach() - before for m in (model, plain))
    torch.testing.assert_close(step[: 2 * D], whole[: 2 * D], rtol=0, atol=0)
    torch.testing.assert_close(step[2 * D :], whole[2 * D :] / 2, rtol=1e-12, atol=1e-16)


def test_adam_mini_has_a_group_for_each_parameter():
    model = encoder()
    groups = blockwise_lr(model, 1e-3, optimizer="adam-mini")
    assert [g["name"] for g in groups] == [g["param_names"][0] for g in groups] == [name for name, _ in model.named_parameters()]
    rate = {"QK+VO": 4e-3, "VO": 4e-3, "FFN": 4e-3, "Norm": 1e-3}
    assert all(g["lr"] == rate[g["block_type"]] for g in groups)
    qk, _, vo = groups[0]["slices"][0]["pieces"]
    assert (qk["factor"], vo["factor"]) == (0.25, 1.0)
    bare = [
        {"name": name, "params": p, "weight_decay": 0.1} for name, p in groups.named_parameters()
    ]  # as Adam_mini 1.1 has them
    optimizer = groups.apply(torch.optim.AdamW(bare))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in groups]
    before = model.self_attn.in_proj_weight.detach().clone()
    with_gradients(model)
    optimizer.step()
    moved = (model.self_attn.in_proj_weight.detach() - before * (1 - 4e-3 * 0.1)).abs().mean(1)
    assert moved[-1] == pytest.approx(4e-3, rel=1e-4)
    check_groups(optimizer)


def test_groups_that_cannot_be_applied():
    model = language_model()
    groups = blockwise_lr(model, 1e-3)
    with pytest.raises(hk.InputError, match="apply: a group of the AdamW mixes parameters of Emb and FFN and Head"):
        groups.apply(torch.optim.AdamW(model.parameters()))
    some = [p for name, p in model.named_parameters() if name != "head.W_C"]
    with pytest.raises(hk.InputError, match=r"apply: the AdamW has no 'head.W_C'; expected the parameters"):
        groups.apply(torch.optim.AdamW([{"params": [p]} for p in some]))
    with pytest.raises(hk.InputError, match="has 1 parameters that are in no group"):
        groups.apply(torch.optim.AdamW([{"params": [p]} for p in [*model.parameters(), nn.Parameter(torch.ones(1))]]))


def report(**quotients):
    """A report with S_Norm / S = (low, value, high) by type; of another base, the inverse."""
    found = {kind: SimpleNamespace(low=a, value=b, high=c) for kind, (a, b, c) in quotients.items()}
    return SimpleNamespace(types={**found, "Norm": None}, ratio=lambda kind, base: found[kind])


def test_power_cap_and_interval():
    seen = measured_ratios(report(Emb=(81.0, 100.0, 144.0), QK=(4.0, 9.0, 12.0), VO=(0.5, 1.2, 2.0), Head=(0.16, 0.2, 0.25)))
    assert seen["Emb"].value == 4.0  # the cap
    assert seen["QK"].value == 2.0  # the end of [2, 3.46] that is nearest to 1
    assert seen["VO"].value == 1.0  # cannot be told from the norms
    assert seen["Head"].value == 0.5  # sharper than the norms
    assert (seen["QK"].low, seen["QK"].high) == (2.0, math.sqrt(12))
    assert (seen["VO"].low, seen["VO"].high) == (math.sqrt(0.5), math.sqrt(2))
    assert seen["Norm"].value == 1.0
    free = measured_ratios(report(Emb=(81.0, 100.0, 144.0), FFN=(0.0, 1e-9, 1e-8)), power=1.0, cap=1000.0)
    assert free["Emb"].value == 81.0
    assert free["FFN"].value == free["FFN"].low == 1e-3


@pytest.mark.parametrize("given", [{"QK": 2.0}, SimpleNamespace(ratio=2.0), SimpleNamespace(types={})])
def test_what_is_no_report(given):
    with pytest.raises(hk.InputError, match=f"sharpness is a {type(given).__name__}; pass what"):
        measured_ratios(given)


@pytest.mark.parametrize(
    ("quotients", "options", "message"),
    [
        ({}, {"power": 0.0}, r"power=0.0; expected a number in \(0, 1\]"),
        ({}, {"cap": 0.5}, "cap=0.5; expected a number of at least 1"),
        ({}, {"base": "Other"}, "the report has no 'Other' to compare with, only Norm"),
        ({"Emb": (0.0, math.inf, math.inf)}, {}, r"S\(Norm\) / S\(Emb\) is inf; expected a positive number"),
        ({"Emb": (math.nan, 2.0, math.nan)}, {}, r".* = 2 has the interval \[nan, nan\]; measure with more draws"),
    ],
)
def test_what_a_report_cannot_give(quotients, options, message):
    with pytest.raises(hk.InputError, match=f"measured_ratios: {message}"):
        measured_ratios(report(**quotients), **options)


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = hk.Transformer(11, 8, 12, 1, 2, tied=False, seed=0)
    x = torch.randint(11, (4, 6))
    return model, sharpness(model, x, x.roll(-1, 1), draws=4)


def test_from_a_measurement_to_groups(measured):
    model, found = measured
    groups = blockwise_lr(model, 1e-3, "measured", sharpness=found)
    assert {g["block_type"] for g in groups} == {"Emb", "QK", "VO", "FFN", "Norm", "Head"}
    for group in groups:
        kind = group["block_type"]
        if kind == "Norm":
            assert group["ratio"] == 1.0
            continue
        quotient = found.ratio(kind)
        low, high = (min(4.0, max(0.25, x**0.5)) for x in (quotient.low, quotient.high))
        assert (group["ratio_low"], group["ratio_high"]) == (low, high)
        assert group["ratio"] == sorted((low, 1.0, high))[1]
        assert group["lr"] == 1e-3 * group["ratio"]
    assert f"[{groups[0]['ratio_low']:.3g}, {groups[0]['ratio_high']:.3g}]" in str(groups)
    assert "(S_Norm / S)^0.5 within [0.25, 4]" in str(groups)
    assert "sharpness at initialisation is not that of training" in str(groups)
    by_hand = blockwise_lr(model, 1e-3, "measured", sharpness=found, head_ratio=1.5)
    assert next(g["ratio"] for g in by_hand if g["block_type"] == "Head") == 1.5
    given = blockwise_lr(model, 1e-3, measured_ratios(found))
    assert [g["lr"] for g in given] == [g["lr"] for g in groups]


def test_a_type_that_was_not_measured(measured):
    model, found = measured
    with pytest.raises(hk.InputError, match="the report has no 'Other', which the model has; measure with the same parts"):
        blockwise_lr(model, 1e-3, "measured", sharpness=found, overrides={"W_C": "Other"})
