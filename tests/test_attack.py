"""The attacks on the bounds: no bound is exceeded, a planted fault is found, and 80 digits decide where float64 has too few."""

from __future__ import annotations

import json

import pytest
import torch

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS, Attention
from hessiankit.blocks.attention import rotate
from hessiankit.bounding import attack as attacks
from hessiankit.bounding.a_priori import _on_a_sphere, a_priori
from hessiankit.bounding.attack import attack
from hessiankit.bounding.bounds import BOUNDS, Bound
from hessiankit.bounding.high_precision import norm_from_below
from hessiankit.bounding.problems import BoundProblem, draw_problem
from hessiankit.bounding.rules import BoundedParameter, affine, constant, mixed, norm
from hessiankit.bounding.structured import structured
from hessiankit.cli.main import main
from hessiankit.engine.problem.own_call import make_task
from hessiankit.support.errors import InputError


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
    assert f"--attack 1 --seed {seed}" in report.table()


def test_problems_cover_what_they_say():
    drawn = [draw_problem(seed) for seed in range(300)]
    assert {p.name for p in drawn} == {"attention", *PLACEMENTS}
    assert {p.regime for p in drawn} == {"plain", "peaked", "constant", "pair", "fitted", "lopsided"}
    assert {len(p.x) for p in drawn} >= {1, 2, 5}
    assert {p.loss for p in drawn} == {"mse", "cross_entropy"}
    assert any(p.loss == "mse" and not p.target.any() for p in drawn)
    assert torch.equal(draw_problem(7).x, drawn[7].x)


@pytest.mark.parametrize("placement", ["post", "hybridnorm", "group-ln", "admin"])
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


def test_an_interrupt_keeps_what_is_found(monkeypatch, capsys, tmp_path):
    real, calls = attacks.draw_problem, []

    def interrupted(seed):
        calls.append(seed)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(seed)

    monkeypatch.setattr(attacks, "draw_problem", interrupted)
    path = tmp_path / "attack.json"
    assert main(["bounds", "--attack", "9", "--seed", "40", "--json", str(path)]) == 130
    assert "of 2 of 9 problems, interrupted" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["problems"], found["asked"]) == (2, 9)
    assert found["interrupted"]
    assert calls == [40, 41, 42]


def test_errors():
    with pytest.raises(InputError, match="1 or more"):
        attack(0)


def test_gainless_norms_at_the_end_need_no_gauss_newton_term():
    # ||Z||_F is all but constant on the output of LayerNorm, so only the target's part in the tangent space counts
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    block = hk.TransformerBlock(4, 3, affine=False, eps=0.0).double()
    assert a_priori(block, x, torch.zeros_like(x)).whole < 1e-8
    assert hk.hessian(block, x[None], torch.zeros_like(x)[None]).spectral_norm() < 1e-12
    t = torch.randn(3, 4, dtype=torch.float64)
    shifted = t + torch.tensor([[1.0], [-30.0], [5.0]], dtype=torch.float64)
    assert a_priori(block, x, shifted).whole < 10 * a_priori(block, x, t).whole
    for eps in (1e-3, 1.0, 30.0):
        block = hk.TransformerBlock(4, 3, affine=False, eps=eps, activation="gelu").double()
        for target in (torch.zeros_like(x), t):
            assert hk.hessian(block, x[None], target[None]).spectral_norm() <= a_priori(block, x, target).whole


def test_an_attention_that_hardly_moves():
    # the logits' gap lets one softmax weight underflow, so that a factor of a product has derivatives of 1e-160
    problem = draw_problem(100038)
    own = structured(make_task("bounds", problem.module, problem.x[None], problem.target[None], problem.loss))
    assert problem.hessian.spectral_norm() <= own.whole < 10 * problem.hessian.spectral_norm()


def test_rotations_may_line_keys_up(monkeypatch):
    # keys that are one vector turned back by their positions: rotation makes them equal, and the spectral norm sqrt(2) times
    seen = []
    monkeypatch.setattr(
        "hessiankit.bounding.a_priori.mixed", lambda Q, K, *rest, **more: seen.append(K) or mixed(Q, K, *rest, **more)
    )
    part = Attention(2, d_k=2, rotary=True).double()
    angle = torch.arange(40, dtype=torch.float64)
    x = torch.stack([angle.cos(), -angle.sin()], 1)
    with torch.no_grad():
        part.W_K.copy_(torch.eye(2))
    a_priori(part, x, torch.zeros_like(x))
    before, after = (float(torch.linalg.matrix_norm(A, 2)) for A in (x, rotate(x)))
    assert after > 1.39 * before
    assert seen[0].spectral >= after
    assert seen[0].range >= float(torch.cdist(rotate(x), rotate(x)).max())


@pytest.mark.parametrize("seed", range(5))
def test_ranges_and_rows_bound_what_they_say(seed):
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 3.0
    W = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + 9), dtype=torch.float64)
    b = torch.ones(3, dtype=torch.float64)
    Y = affine(constant(X), BoundedParameter("W", W, 0.0), BoundedParameter("b", b, 0.0))
    assert float(torch.cdist(Y.centre, Y.centre).max()) <= Y.range <= 2 * Y.row
    assert Y.row_jacobians() == {"W": pytest.approx(float(X.norm(dim=1).max())), "b": 1.0}
    twice = affine(Y, BoundedParameter("V", torch.eye(3, dtype=torch.float64) * 2, 0.0))
    assert twice.row_jacobians()["b"] == pytest.approx(2.0)
    assert twice.jacobian["b"] == pytest.approx(2 * 5**0.5)


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("layernorm", [True, False])
def test_the_end_on_a_sphere_is_nearly_sharp(eps, layernorm):
    # Z = norm(x W) of one token x of length 1: every direction of the row is reached, so the constants show
    d, draw = 4, torch.Generator().manual_seed(3)
    x = torch.nn.functional.normalize(torch.randn(1, 3, generator=draw, dtype=torch.float64))
    W, ratios = torch.randn(3, d, generator=draw, dtype=torch.float64), []
    for size in (0.0, 1.0, 10.0):
        for _ in range(6):
            T = size * torch.randn(1, d, generator=draw, dtype=torch.float64)

            def loss(W, T=T):
                m = x @ W
                m = m - m.mean(1, keepdim=True) if layernorm else m
                return ((m / ((m * m).mean(1, keepdim=True) + eps).sqrt() - T) ** 2).mean()

            H = torch.autograd.functional.hessian(loss, W).reshape(3 * d, 3 * d)
            Z = norm(affine(constant(x), BoundedParameter("W", W, 0.0)), layernorm=layernorm, eps=eps)
            limit = float(_on_a_sphere(Z, Z.sphere, T, ("W",)))
            true = float(torch.linalg.matrix_norm(H, 2))
            assert true <= limit * (1 + 1e-9) + 1e-12
            ratios.append(true / limit if limit else 0.0)
    assert max(ratios) > 0.3
