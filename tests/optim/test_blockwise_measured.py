"""Ratios from a measurement: the power, the cap, and what the interval does."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import hessiankit as hk
from hessiankit.diagnostics.sharpness import sharpness
from hessiankit.optim import blockwise_lr, measured_ratios


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
    with pytest.raises(hk.InputError, match=f"sharpness is a {type(given).__name__}; pass what hessiankit.sharpness returned"):
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
    assert "initialisation" not in str(blockwise_lr(model, 1e-3))
    by_hand = blockwise_lr(model, 1e-3, "measured", sharpness=found, head_ratio=1.5)
    assert next(g["ratio"] for g in by_hand if g["block_type"] == "Head") == 1.5
    given = blockwise_lr(model, 1e-3, measured_ratios(found))
    assert [g["lr"] for g in given] == [g["lr"] for g in groups]


def test_a_type_that_was_not_measured(measured):
    model, found = measured
    with pytest.raises(hk.InputError, match="the report has no 'Other', which the model has; measure with the same parts"):
        blockwise_lr(model, 1e-3, "measured", sharpness=found, overrides={"W_C": "Other"})
