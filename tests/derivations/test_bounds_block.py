"""The post-norm block's bounds against exact Hessians by autograd twice."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bound_problems import (
    BLOCK_SIZES,
    F64,
    Problem,
    draw_weights,
    hessian_blocks,
    norm,
    post_block,
    problems,
    whole_hessian,
)
from torch import Tensor
from transformer_reference import normalised

from derivations.bounds import AttentionNorms, PostBlockNorms, block_norms, post_block_a_priori, post_block_structured
from derivations.bounds.norm_rows import NormRows

ROUNDING = 1 + 1e-9
GAINS = ("gamma_1", "gamma_2")


def draw(L: int, d: int, d_K: int, d_ff: int, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    weights = draw_weights(L, d, d_K, d_ff, g)
    return Problem(torch.randn(L, d, generator=g, dtype=F64), weights, torch.randn(L, d, generator=g, dtype=F64))


def fixed_of(d: int, d_ff: int, *names: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(d)
    return {name: torch.randn(d_ff if name == "b_1" else d, generator=g, dtype=F64) for name in names}


def check(
    p: Problem,
    *,
    eps: float = 0.0,
    kind: str = "layernorm",
    activation: str = "relu",
    act: Callable[[Tensor], Tensor] = torch.relu,
    fixed: dict[str, Tensor] | None = None,
    a_priori: bool = True,
    mask: Tensor | None = None,
    exact: bool = True,
) -> None:
    fixed = fixed or {}

    def f(X: Tensor, w: dict[str, Tensor]) -> Tensor:
        return post_block(X, w, eps=eps, norm=kind, act=act, fixed=fixed, mask=mask)

    blocks, whole = hessian_blocks(f, p), norm(whole_hessian(f, p))
    options: dict[str, Any] = {"eps": eps, "norm": kind, "mask": mask}
    bounds = [post_block_structured(p.X, *arrays(p), activation=activation, **fixed, **options)]
    if exact:
        for pair, block in blocks.items():
            assert bounds[0].block(*pair) == pytest.approx(norm(block), rel=1e-8, abs=1e-12 * (1 + whole)), pair
    if a_priori:
        gains = {name: value for name, value in fixed.items() if name in GAINS}
        known = PostBlockNorms.measured(p.X, *arrays(p), **gains, **options)
        bounds.append(post_block_a_priori(known, activation=activation))
        bounds.append(post_block_a_priori(dataclasses.replace(known, attention=known.attention.spectral_only())))
    for bound in bounds:
        assert whole <= bound.whole * ROUNDING + 1e-13
        for (i, j), block in blocks.items():
            assert norm(block) <= bound.block(i, j) * ROUNDING + 1e-12 * (1 + whole), (i, j)


def arrays(p: Problem) -> tuple[Tensor, ...]:
    w = p.weights
    return (w["W_Q"], w["W_K"], w["W_V"], w["W_1"], w["W_2"], p.target)


PLAIN = draw(3, 4, 2, 5)
FLAT = dataclasses.replace(PLAIN, X=1.0 + 1e-4 * PLAIN.X).scaled(W_V=1e-4)
KINDS = ("layernorm", "rmsnorm")
HELD: dict[str, tuple[Problem, dict[str, Any]]] = {
    **{
        f"{name} times {factor}": (PLAIN.scaled(W_Q=0.3).scaled(**{name: factor}), {})
        for name, factor in itertools.product(("W_V", "W_1", "W_2", "target", "X"), (1e-3, 30.0))
    },
    **{f"sizes {sizes}": (draw(*sizes), {}) for sizes in ((1, 3, 2, 4), (2, 3, 5, 2), (5, 3, 1, 1), (2, 7, 2, 3))},
    **{
        f"{kind}, eps {eps}, target times {factor}": (PLAIN.scaled(target=factor), {"eps": eps, "kind": kind})
        for kind, eps, factor in itertools.product(KINDS, (0.0, 1e-3, 2.0), (0.0, 1.0))
    },
    **{
        f"{kind}, eps {eps}, gains": (PLAIN, {"kind": kind, "eps": eps, "fixed": fixed_of(4, 5, *GAINS)})
        for kind, eps in itertools.product(KINDS, (0.0, 0.1))
    },
    "a last gain of -2": (PLAIN, {"fixed": {"gamma_2": torch.full((4,), -2.0, dtype=F64)}}),
    "biases and shifts": (PLAIN, {"fixed": fixed_of(4, 5, *GAINS, "beta_1", "beta_2", "b_1", "b_2"), "a_priori": False}),
    "gelu": (PLAIN, {"activation": "gelu", "act": torch.nn.functional.gelu, "a_priori": False}),
    "causal": (draw(4, 3, 2, 5), {"mask": torch.ones(4, 4, dtype=torch.bool).tril()}),
    "rows that are almost constant": (FLAT, {"eps": 1e-5}),
    "constant rows": (dataclasses.replace(FLAT, X=torch.ones(3, 4, dtype=F64)), {"eps": 1e-2}),
}


@pytest.mark.parametrize("name", HELD)
def test_no_block_exceeds_its_bound(name: str) -> None:
    p, options = HELD[name]
    check(p, **options)


class TestHolds:
    @pytest.mark.parametrize("kind", ["init", "large"])
    def test_on_the_problems_of_the_table(self, kind: str) -> None:
        for p in problems(kind, BLOCK_SIZES, 3, seed=1):
            check(p)

    @pytest.mark.parametrize(("kind", "leak"), [("leaky_relu", 0.01), ("identity", 1.0)])
    def test_piecewise_linear_activations(self, kind: str, leak: float) -> None:
        p = draw(3, 4, 2, 5)
        true = norm(whole_hessian(lambda X, w: post_block(X, w, act=lambda a: torch.where(a > 0, a, leak * a)), p))
        assert true <= post_block_structured(p.X, *arrays(p), activation=kind).whole <= 3 * true
        assert true <= post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p), leak=leak), activation=kind).whole

    def test_large_blocks_keep_to_the_space_of_their_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wider than long: bounds that are not exact, yet hold."""
        p = draw(2, 5, 3, 6)
        exact = post_block_structured(p.X, *arrays(p))
        monkeypatch.setattr(block_norms, "EXACT_ENTRIES", 0)
        check(p, exact=False)
        reduced = post_block_structured(p.X, *arrays(p))
        assert bool((reduced.matrix >= exact.matrix * (1 - 1e-12)).all())
        assert reduced.whole > 1.001 * exact.whole

    def test_heads_and_output_projection(self) -> None:
        p = draw(3, 4, 4, 5)
        p = dataclasses.replace(
            p, weights={**p.weights, "W_O": torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=F64)}
        )
        options: dict[str, Any] = {"W_O": p.weights["W_O"], "heads": 2, "eps": 0.1}
        true = norm(whole_hessian(lambda X, w: post_block(X, w, eps=0.1, heads=2), p))
        structured = post_block_structured(p.X, *arrays(p), **options)
        assert structured.names[:4] == ("W_Q.0", "W_K.0", "W_V.0", "W_O.0")
        assert true <= structured.whole <= 3 * true
        assert true <= post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p), **options)).whole


class TestKeyIdentity:
    """All rows of Z have the norm sqrt(d): the loss is linear in Z, and a target of zero leaves nothing."""

    def test_zero_target(self) -> None:
        p = draw(3, 4, 2, 5).scaled(target=0.0)
        assert norm(whole_hessian(post_block, p)) < 1e-13
        assert post_block_structured(p.X, *arrays(p)).whole == 0
        assert post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p))).whole == 0

    @pytest.mark.parametrize(("kind", "eps", "gains"), itertools.product(("layernorm", "rmsnorm"), (0.0, 0.4), (False, True)))
    def test_row_hessian_of_the_loss(self, kind: str, eps: float, gains: bool) -> None:
        g = torch.Generator().manual_seed(0)
        X, target, gamma, beta = (torch.randn(*s, generator=g, dtype=F64) for s in ((3, 4), (3, 4), (4,), (4,)))
        gamma = gamma if gains else torch.full((4,), 1.5, dtype=F64)

        def loss(row: Tensor, t: Tensor) -> Tensor:
            return (normalised(row.unsqueeze(0), eps, kind)[0] * gamma + beta - t).square().sum() / 2

        gradient, hessian = NormRows(X, gamma, beta, eps, kind).squared_error(target)
        for i in range(3):
            true = torch.autograd.functional.hessian(lambda row, i=i: loss(row, target[i]), X[i])
            slope = torch.autograd.functional.jacobian(lambda row, i=i: loss(row, target[i]), X[i])
            assert torch.allclose(hessian[i], true, rtol=0, atol=1e-12 * float(true.abs().max()))
            assert torch.allclose(gradient[i], slope, rtol=0, atol=1e-12 * float(slope.abs().max() + 1))


class TestTight:
    @pytest.mark.parametrize("sigma", [0.5, 3.0])
    def test_what_eps_leaves_of_a_row_without_a_target_is_attained(self, sigma: float) -> None:
        """g^2 |M|^2 / (2 s^2) of a row M of root mean square sigma, which is constant but for eps; d = 3, s^2 = sigma^2 + eps."""
        eps, gain, d = 1e-7, 1.5, 3
        M = sigma * torch.tensor([1.0, -1.0, 1.0], dtype=F64)

        def loss(row: Tensor) -> Tensor:
            return (gain * row / (row.square().mean() + eps).sqrt()).square().sum() / 2

        slope = torch.autograd.functional.jacobian(loss, M)
        curvature = torch.autograd.functional.hessian(loss, M)
        attention = AttentionNorms(2, 1, 1.0, (1.0,), (1.0,), (1.0,), 0.0, d_out=d)
        parts = post_block_a_priori(PostBlockNorms(attention, 1.0, 1.0, 1.0, sigma, eps=eps, gain_2=gain)).parts
        assert parts["gradient_S"] == pytest.approx(float(slope.norm()), rel=1e-5)
        assert parts["hessian_S"] == pytest.approx(float(torch.linalg.matrix_norm(curvature, 2)), rel=1e-5)

    def test_the_two_weights_of_the_feedforward_exchange_their_places(self) -> None:
        """Of ReLU, the bound is symmetric in W_1 and W_2: with their norms exchanged, so are their rows and columns."""
        attention = AttentionNorms(3, 1, 1.0, (1.0,), (1.0,), (1.0,), 0.5, d_out=4)
        one, other = (post_block_a_priori(PostBlockNorms(attention, w, v, 1.0, 1.0)) for w, v in ((2.0, 5.0), (5.0, 2.0)))
        for i in (*one.names[:-2], "W_1"):
            assert one.block(i, "W_1") != pytest.approx(one.block(i, "W_2"))
        exchanged = {"W_1": "W_2", "W_2": "W_1"}
        for i in one.names:
            for j in one.names:
                assert one.block(i, j) == pytest.approx(other.block(exchanged.get(i, i), exchanged.get(j, j))), (i, j)


class TestByHand:
    def test_both_norms_curve(self) -> None:
        """L = 1, d = 3, s = tau = 1 and no weights: c = 2/3 for the last norm and as much for the first, times 2/d."""
        attention = AttentionNorms(1, 1, 1.0, (0.0,), (0.0,), (0.0,), 1.0, d_out=3)
        bound = post_block_a_priori(PostBlockNorms(attention, 0.0, 0.0, 1.0, 1.0))
        assert bound.block("W_V", "W_V") == pytest.approx(2 / 3 * (2 / 3 + 2 / 3), rel=1e-14)
        assert bound.block("W_1", "W_2") == pytest.approx(2 / 3 * math.sqrt(3), rel=1e-14)


class TestRegion:
    @pytest.mark.parametrize(("last", "equal"), [(None, True), ([-2.0, -2.0, -2.0], True), ([2.0, 2.0, 1.0], False)])
    def test_gains_are_equal_only_if_all_are(self, last: list[float] | None, equal: bool) -> None:
        p = draw(3, 3, 2, 4)
        gains = {} if last is None else {"gamma_2": torch.tensor(last, dtype=torch.float64)}
        assert PostBlockNorms.measured(p.X, *arrays(p), **gains).uniform is equal

    @pytest.mark.parametrize("eps", [0.0, 0.05])
    def test_holds_over_a_ball(self, eps: float) -> None:
        p, radius, g = draw(3, 4, 2, 5), 1e-3, torch.Generator().manual_seed(3)
        known = PostBlockNorms.measured(p.X, *arrays(p), eps=eps)
        near = known.inflated(radius)
        assert 0 < near.sigma_2 < known.sigma_2
        bound = post_block_a_priori(near).whole
        assert bound > post_block_a_priori(known).whole
        for _ in range(15):
            steps = {name: torch.randn(W.shape, generator=g, dtype=F64) for name, W in p.weights.items()}
            length = math.sqrt(sum(float(s.square().sum()) for s in steps.values()))
            moved = dataclasses.replace(p, weights={name: W + radius / length * steps[name] for name, W in p.weights.items()})
            at = PostBlockNorms.measured(moved.X, *arrays(moved), eps=eps)
            assert at.sigma_1 >= near.sigma_1
            assert at.sigma_2 >= near.sigma_2
            assert norm(whole_hessian(lambda X, w: post_block(X, w, eps=eps), moved)) <= bound

    def test_infinite_where_a_row_may_become_constant(self) -> None:
        p = draw(3, 4, 2, 5)
        assert post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p)).inflated(10.0)).whole == math.inf
        assert post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p), eps=1e-3).inflated(10.0)).whole < math.inf

    @pytest.mark.parametrize("field", ["w_1", "w_2", "gain_1", "gain_2"])
    def test_monotone(self, field: str) -> None:
        p = draw(3, 4, 2, 5)
        known = PostBlockNorms.measured(p.X, *arrays(p), eps=0.1)
        grown = dataclasses.replace(known, **{field: 1.1 * getattr(known, field)})
        assert bool((post_block_a_priori(grown).matrix >= post_block_a_priori(known).matrix).all())
        for sigma in ("sigma_1", "sigma_2"):
            lower = dataclasses.replace(known, **{sigma: 0.9 * getattr(known, sigma)})
            assert bool((post_block_a_priori(lower).matrix >= post_block_a_priori(known).matrix).all())


def test_errors() -> None:
    p = draw(3, 4, 2, 5)
    with pytest.raises(ValueError, match=r"post_block_structured: the target has shape \(2, 4\); expected that of X, \(3, 4\)"):
        post_block_structured(p.X, *arrays(p)[:-1], p.target[:2])
    with pytest.raises(ValueError, match="row 0 has variance 0 and eps = 0"):
        post_block_structured(torch.zeros(3, 4, dtype=F64), *arrays(p))
    with pytest.raises(ValueError, match="'gelu', whose second derivative"):
        post_block_a_priori(PostBlockNorms.measured(p.X, *arrays(p)), activation="gelu")
    with pytest.raises(ValueError, match="the leak is 2"):
        PostBlockNorms.measured(p.X, *arrays(p), leak=2.0)
    with pytest.raises(ValueError, match="unknown norm"):
        post_block_structured(p.X, *arrays(p), norm="batchnorm")
