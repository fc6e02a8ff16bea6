"""Theorem 7 repaired: it holds where the printed one fails, and its terms are what they say."""

from __future__ import annotations

import pytest
import torch

import hessiankit as hk
from hessiankit.blocks import Attention
from papers.curvature_gap.loss_surface import loss_surface_bound


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("placement", ["pre", "post", "hybridnorm", "lns"])
def test_it_holds_at_any_distance(size, placement):
    torch.manual_seed(1)
    block = hk.TransformerBlock(4, 3, placement=placement, activation="gelu", eps=0.1).double()
    w = {name: p + size * normal(*p.shape, seed=k) for k, (name, p) in enumerate(block.named_parameters())}
    report = loss_surface_bound(block, normal(5, 3, 4, seed=2), normal(5, 3, 4, seed=3), w)
    assert report
    assert all(step.change > 0 for step in report.steps)


def test_where_the_print_fails():
    # at w* = 0 the Hessian and the loss vanish, and the printed right-hand side with them; the loss at w does not.
    attention = Attention(1).double()
    with torch.no_grad():
        for p in attention.parameters():
            p.zero_()
    x = torch.zeros(2, 2, 1, dtype=torch.float64)
    x[1, :, 0] = torch.tensor([1.0, -1.0])
    w = {name: torch.ones_like(p) for name, p in attention.named_parameters()}
    at_star = hk.hessian(attention, x[1:], torch.zeros_like(x[1:])).spectral_norm()
    report = loss_surface_bound(attention, x, torch.zeros_like(x), w)
    assert at_star == 0.0
    assert report.gradient_norm == 0.0  # Assumption 1 holds
    assert report.steps[0].change * 2 == pytest.approx(torch.tanh(torch.tensor(1.0, dtype=torch.float64)).item() ** 2)
    assert report


def test_the_terms():
    torch.manual_seed(0)
    attention = Attention(3).double()
    x, t = normal(4, 2, 3), normal(4, 2, 3, seed=1)
    w = {"W_V": attention.W_V.detach() + 0.5}
    report = loss_surface_bound(attention, x, t, w)
    losses = [((attention(a) - b) ** 2).mean().item() for a, b in zip(x, t, strict=True)]
    assert report.distance == pytest.approx(1.5)
    assert report.steps[1].loss_term == pytest.approx(abs(losses[2] - (losses[0] + losses[1]) / 2))
    gradients = [
        torch.autograd.grad(((attention(a) - b) ** 2).mean(), list(attention.parameters())) for a, b in zip(x, t, strict=True)
    ]
    norms = [torch.cat([g.reshape(-1) for g in gradient]).norm().item() for gradient in gradients]
    assert report.gradient_norm == pytest.approx(max(norms))
    assert report.steps[2].curvature_term == pytest.approx(report.curvature * 2.25)
    assert "holds" in report.table()
    assert report.to_dict()["steps"][0]["k"] == 1
