"""Theorems 1, 6 and 7 and Proposition 10 as printed: where they are exceeded, how far off, not defined; and Theorem 7 repaired."""

from __future__ import annotations

import pytest
import torch
from bound_problems import norm, post_block, problems, whole_hessian

import hessiankit as hk
from derivations.transformer import PostNormBlockAt
from hessiankit.blocks import Attention
from papers.curvature_gap import block_printed as block_in_print
from papers.curvature_gap.loss_surface import loss_surface_bound
from papers.curvature_gap.printed_bounds import printed_bounds


def generic(*shape: int) -> torch.Tensor:
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


def spectral(matrix) -> float:
    return norm(matrix.dense())


def test_theorem_6_with_exact_factors() -> None:
    """Eqs. 8, 13-16, 20, 22 and 23 hold with the true norms of their factors, and so does Eq. 9 for the normalised loss."""
    (p,) = problems("init", ((3, 4, 2, 4),), 1, seed=6)
    at = PostNormBlockAt(p.X, *p.weights.values())
    w1, w2 = norm(p.weights["W_1"]), norm(p.weights["W_2"])
    G = {f"G_{k}": spectral(at.G(k)) for k in "QKV"}
    outer = {"J_Z": spectral(at.J_Z), "H_Z": spectral(at.H_Z), "J_Y": spectral(at.J_Y), "H_Y": spectral(at.H_Y)}
    hidden = norm(torch.relu(at.Y @ p.weights["W_1"]))
    factors = block_in_print.PrintedFactors(**outer, Y=norm(at.Y), hidden=hidden, **G)
    phi = {k + ell: spectral(at.Phi(k, ell)) for k, ell in ("QQ", "KK", "VV", "VQ", "VK", "QK")}
    bound = block_in_print.theorem_6_printed(3, 4, 4, factors, phi, w1, w2, float((at.Z - p.target).norm()))
    names = block_in_print.NAMES
    for i, a in enumerate(names):
        assert spectral(at.B(a)) <= float(bound.B[i]) * (1 + 1e-12)
        for j, b in enumerate(names[i:], start=i):
            true = spectral(at.xi(a, b))
            assert true <= float(bound.xi[i, j]) * (1 + 1e-12), (a, b)
            assert spectral(at.H_tr(a, b)) <= float(bound.H_tr[i, j]) * (1 + 1e-12), (a, b)
    assert norm(whole_hessian(post_block, p)) <= bound.whole


# Theorem 7 repaired: it holds where the printed one fails, and its terms are what they say ----------------------------


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
