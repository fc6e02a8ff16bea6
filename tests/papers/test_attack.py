"""The attacks on the bounds: no bound is exceeded, a planted fault is found, and 80 digits decide where float64 has too few."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import mse, reverse_over_reverse

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS, Attention
from hessiankit.theory.bounding.bounds import BOUNDS, Bound
from papers.curvature_gap.attack import attack
from papers.curvature_gap.high_precision import norm_from_below
from papers.curvature_gap.problems import BoundProblem, draw_problem


def test_nothing_is_violated():
    report = attack(5, seed=100, steps=2)
    assert report, report
    assert report.problems == 5
    assert {"a priori", "structured", "structured, blocks", "certified, cholesky"} <= set(report.largest)
    assert 0.9 < report.largest["structured"].ratio <= 1 + 1e-9


@pytest.mark.slow
def test_a_planted_fault_is_found_and_comes_back_by_its_seed(monkeypatch):
    right = BOUNDS["a_priori"]

    def too_small(at):
        whole, pairs = right.norms(at)
        return 1e-9 * whole, {pair: 1e-9 * value for pair, value in pairs.items()}

    monkeypatch.setitem(BOUNDS, "a_priori", Bound("a_priori", too_small))
    seed = next(s for s in range(100) if (draw_problem(s).name, draw_problem(s).regime) == ("attention", "plain"))
    report = attack(1, seed=seed)
    assert report.violations == attack(1, seed=seed).violations
    found = {v.bound: v for v in report.violations}["a priori"]
    assert found.ratio > 1
    assert found.refereed == pytest.approx(found.ratio, rel=1e-6)
    assert f"attack 1 --seed {seed}" in report.table()


@pytest.mark.parametrize("placement", ["post", "hybridnorm", "group-ln"])
def test_the_referee_agrees_where_float64_is_right(placement):
    for seed in range(200):
        problem = draw_problem(seed, placement=placement)
        if problem.regime == "plain" and len(problem.x) == 2:
            break
    H = problem.hessian
    pairs = list(H.pairs())
    i, j = pairs[len(pairs) // 2]
    _, s, Vh = torch.linalg.svd(H.block(i, j), full_matrices=False)
    found = norm_from_below(problem, H.slices[i], H.slices[j], Vh[0], rounds=0)
    assert found == pytest.approx(float(s[0]), rel=1e-9, abs=1e-13 * float(H.matrix.abs().max()))


def test_the_referee_by_hand():
    # One token attends to itself: Z = X W_V with x = 2, loss Z^2, whose only curvature is 2 x^2 = 8 along W_V.
    part = Attention(1).double()
    problem = BoundProblem(0, "attention", "plain", part, torch.full((1, 1), 2.0).double(), torch.zeros(1, 1).double(), "mse")
    v = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert norm_from_below(problem, slice(0, 3), slice(0, 3), v) == pytest.approx(8.0, rel=1e-15)
    assert norm_from_below(problem, slice(0, 1), slice(0, 1), v[2:]) == 0.0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_referee_knows_every_activation(activation):
    """A block of the Hessian in 80 digits and by reverse over reverse; relu has no second derivative of its own."""
    torch.manual_seed(0)
    block, x, t = hk.TransformerBlock(2, 3, activation=activation, eps=0.1).double(), *torch.randn(2, 2, 2, dtype=torch.float64)
    problem = BoundProblem(0, "post", "", block, x, t, "mse")
    H, (rows, name) = (
        reverse_over_reverse(block, x.unsqueeze(0), t.unsqueeze(0), mse),
        (problem.hessian.slices, "feedforward.W_1"),
    )
    B = H[rows[name], rows[name]]
    vector = torch.linalg.svd(B).Vh[0]
    assert norm_from_below(problem, rows[name], rows[name], vector, rounds=0) == pytest.approx(
        float((B @ vector).norm()), rel=1e-10
    )
