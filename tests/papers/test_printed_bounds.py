"""Theorems 1 and 6 as printed beside the norms: where they are exceeded, how far off they are, and where they are not defined."""

from __future__ import annotations

import copy

import pytest
import torch

import hessiankit as hk
from hessiankit.blocks import Attention
from papers.curvature_gap.printed_bounds import printed_bounds


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("q", [10.0, 100.0])
def test_the_printed_theorem_1_is_violated_without_limit(q):
    # at a global minimum, with uniform attention: the true norm is 2 q^2, the printed bound 24 for every q
    attention = Attention(1).double()
    with torch.no_grad():
        attention.W_Q.fill_(q)
        attention.W_K.zero_()
        attention.W_V.fill_(1.0)
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    report = printed_bounds(attention, x, torch.zeros_like(x))
    ratios = {(name, kind): ratio for name, kind, ratio in report.violated}
    assert ratios["whole", "printed_theorem_1"] == pytest.approx(q * q / 12)
    assert all(kind.startswith("printed") for _, kind in ratios)
    assert "VIOLATED" in report.table()


def test_the_printed_theorem_6_is_no_measure():
    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 5, affine=False).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    report = printed_bounds(block, x, torch.randn(3, 4, dtype=torch.float64))
    assert report.ratio("printed_theorem_6") > 1e10
    assert report.ratio("structured") < 2 < report.ratio("a_priori")


def test_the_print_of_a_single_precision_block_leaves_the_block_alone():
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(4, 5, affine=False), normal(3, 4).float()
    single, double = printed_bounds(block, x, 0 * x), printed_bounds(copy.deepcopy(block).double(), x.double(), 0 * x.double())
    assert {p.dtype for p in block.parameters()} == {torch.float32}
    for kind in ("printed_theorem_6", "printed_theorem_6_proof"):
        assert single.values["whole"][kind] == pytest.approx(double.values["whole"][kind], rel=1e-12)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (hk.TransformerBlock(4, 5, affine=True), "neither gain nor shift"),
        (hk.TransformerBlock(4, 5, 2), "one head"),
        (hk.TransformerBlock(4, 5, activation="gelu", affine=False), "ReLU"),
    ],
)
def test_where_the_print_defines_nothing(block, message):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = printed_bounds(block.double(), x, x)
    assert any(message in note for note in report.notes)
    assert not any(kind.startswith("printed") for kind in report.kinds)
