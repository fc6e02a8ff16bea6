"""Exact Hessians of the blocks: no operation is left to autograd, and reverse-over-reverse agrees."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import assert_exact, draw, randomised
from torch import nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS

MODERN = {"norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": 1, "rotary": True, "causal": True}


def generic(module: nn.Module) -> nn.Module:
    """Generic parameters, small enough that a stack's softmaxes are not saturated."""
    for p in randomised(module).parameters():
        p.data *= 0.5
    return module


@pytest.mark.parametrize("placement", {p.equation: name for name, p in PLACEMENTS.items()}.values())  # one of each equation
def test_no_operation_is_left_to_autograd(placement):
    block = generic(hk.TransformerBlock(4, 3, 2, placement, **MODERN, layer=2, n_layers=3))
    hessian = hk.hessian(block, draw(3, 4), draw(3, 4, seed=2))
    assert hessian.fallbacks == ()
    assert torch.isfinite(hessian.matrix).all()


@pytest.mark.parametrize(("tied", "n_layers"), [(False, 1), (True, 2)])
def test_language_model(tied, n_layers):
    model = generic(hk.Transformer(5, 4, 2, n_layers, 2, "hybridnorm*", tied=tied, **MODERN))
    ids = torch.tensor([[3, 0, 1, 4], [2, 2, 4, 1]])
    labels = torch.tensor([[0, 1, 4, -100], [2, 4, 1, 0]])
    found = assert_exact(model, ids, labels, loss="cross_entropy", tolerance=1e-10)
    assert found.fallbacks == ()
    assert ("head.W_C" in found.names) is not tied


@pytest.mark.parametrize("head", ["mean", "class"])
def test_classifier_with_padding_and_learned_positions(head):
    model = generic(hk.Transformer(5, 4, 3, 1, 2, "deepnorm", max_len=4, head=head, n_classes=3, causal=head == "class"))
    ids, padding = torch.tensor([[3, 0, 1, 4], [2, 2, 4, 1]]), torch.tensor([[False] * 4, [False, False, True, True]])
    found = assert_exact(model, (ids, padding), torch.tensor([2, 0]), loss="cross_entropy", tolerance=1e-10)
    assert found.fallbacks == ()
