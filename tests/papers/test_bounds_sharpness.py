"""Theorems 4.1-4.3 corrected: against the gradients of autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bound_problems import F64
from sharpness_layers import (
    ACTIVATIONS,
    NORMS,
    ROUNDING,
    assert_loose,
    attention,
    causal_mask,
    draw,
    feedforward,
    gated,
    gradients,
    hold,
    normed,
)
from torch import Tensor

from papers.sharpness_disparity.attention_bounds import AttentionGradientNorms, theorem_4_2
from papers.sharpness_disparity.embedding_bounds import EmbeddingNorms, theorem_4_3
from papers.sharpness_disparity.feedforward_bounds import FeedForwardNorms, GatedNorms, theorem_4_1, theorem_4_1_gated
from papers.sharpness_disparity.gradient_bounds import GradientBounds, NormedInput


def hold_near_and_far(theorem: Callable[..., GradientBounds], near: Any, far: Any, found: dict[str, Tensor]) -> dict[str, float]:
    """Assert that both bounds hold, and that measured norms give the closer one; return true / closer."""
    closer, wider = hold(theorem(near), found), hold(theorem(far), found)
    assert all(closer[letter] >= wider[letter] / ROUNDING for letter in found)
    return closer


class TestFeedForward:
    @staticmethod
    def point(seed: int, n: int = 4, D: int = 5, M: int = 7) -> tuple[dict[str, Tensor], Tensor]:
        shapes = {"X": (n, D), "gamma": (D,), "W_1": (D, M), "W_2": (M, D)}
        return {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}, draw(n, D, seed=10 * seed + 9)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_between_its_bounds(self, activation: str, norm: str) -> None:
        for seed, sizes in enumerate([(1, 3, 1), (4, 5, 7), (7, 3, 2)]):
            leaves, G = self.point(seed, *sizes)
            found = gradients(partial(feedforward, activation=activation, norm=norm), leaves, G)
            near = FeedForwardNorms.measured(**leaves, gradient=G, activation=activation, norm=norm)
            hold_near_and_far(theorem_4_1, near, replace(near, inputs=_a_priori(near.inputs, norm), slope=None, a=None), found)

    def test_lower_bounds_are_euler_identities(self) -> None:
        """<theta, dQ/dtheta> = <dQ/dY, F> for ReLU (ours/ffn-euler); for the smooth ones in W_2 alone."""
        leaves, G = self.point(3)
        for activation in ("relu", "gelu"):
            found = gradients(partial(feedforward, activation=activation, norm="layernorm"), leaves, G)
            lower = theorem_4_1(FeedForwardNorms.measured(**leaves, gradient=G, activation=activation)).lower
            assert set(lower) == ({"W_1", "W_2", "gamma"} if activation == "relu" else {"W_2"})
            for letter, bound in lower.items():
                inner = abs(float((leaves[letter] * found[letter]).sum()))
                assert bound * float(leaves[letter].norm()) == pytest.approx(inner, rel=1e-10)

    def test_looseness(self) -> None:
        """n = D = 64, M = 256, standard deviation 0.02: how loose the bounds are, measured and a priori."""
        leaves, G = self.point(1, 64, 64, 256)
        leaves |= {"gamma": torch.ones(64, dtype=F64), "W_1": 0.02 * leaves["W_1"], "W_2": 0.02 * leaves["W_2"]}
        true = gradients(partial(feedforward, activation="relu", norm="layernorm"), leaves, G)
        near = FeedForwardNorms.measured(**leaves, gradient=G)
        far = replace(near, inputs=_a_priori(near.inputs, "layernorm"), slope=None, a=None)
        assert_loose(true, theorem_4_1(near), theorem_4_1(far), {"W_1": (6, 20), "W_2": (6, 20), "gamma": (60, 400)})


class TestGated:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
    def test_between_its_bounds(self, activation: str, norm: str) -> None:
        for seed, (n, D, M) in enumerate([(1, 3, 1), (4, 5, 7)]):
            shapes = {"X": (n, D), "gamma": (D,), "W_gate": (D, M), "W_up": (D, M), "W_down": (M, D)}
            leaves = {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}
            G = draw(n, D, seed=99)
            found = gradients(partial(gated, activation=activation, norm=norm), leaves, G)
            near = GatedNorms.measured(**leaves, gradient=G, activation=activation, norm=norm)
            far = replace(near, inputs=_a_priori(near.inputs, norm), gate=None, up=None, h=None)
            hold_near_and_far(theorem_4_1_gated, near, far, found)
            assert set(near.lower) == {"W_up", "W_down"} | ({"W_gate"} if activation == "relu" else set())


class TestAttention:
    @staticmethod
    def point(seed: int, n: int, D: int, heads: int, kv_heads: int, d_k: int, d_v: int) -> tuple[dict[str, Tensor], Tensor]:
        shapes = {"X": (n, D), "gamma": (D,), "W_Q": (D, heads * d_k), "W_K": (D, kv_heads * d_k)}
        shapes |= {"W_V": (D, kv_heads * d_v), "W_O": (heads * d_v, D)}
        return {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}, draw(n, D, seed=10 * seed + 9)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (4, 2), (4, 1)])
    def test_between_its_bounds(self, heads: int, kv_heads: int, causal: bool, norm: str) -> None:
        """Several heads, shared keys and values, a mask; sizes of their own for keys and values."""
        for seed, (n, D, d_k, d_v) in enumerate([(1, 3, 2, 1), (5, 4, 3, 2), (3, 6, 1, 4)]):
            leaves, G = self.point(seed, n, D, heads, kv_heads, d_k, d_v)
            shared = {"heads": heads, "kv_heads": kv_heads, "norm": norm}
            found = gradients(partial(attention, **shared, causal=causal), leaves, G)
            mask = causal_mask(n) if causal else None
            near = AttentionGradientNorms.measured(**leaves, gradient=G, mask=mask, **shared)
            hold_near_and_far(theorem_4_2, near, replace(near, inputs=_a_priori(near.inputs, norm), heads=None), found)
            hold(theorem_4_2(replace(near, heads=None)), found)
            assert set(near.lower) == {"W_V", "W_O"}

    def test_types_pool_squares_and_entries(self) -> None:
        """Grouped keys are fewer: S(QK) is not the mean of S(W_Q) and S(W_K)."""
        leaves, G = self.point(2, 4, 4, 4, 1, 2, 2)
        bounds = theorem_4_2(AttentionGradientNorms.measured(**leaves, gradient=G, heads=4, kv_heads=1))
        q, k = (bounds.sharpness(letter)[1] for letter in ("W_Q", "W_K"))
        assert bounds.sharpness("W_Q", "W_K")[1] == pytest.approx((4 * q + k) / 5, rel=1e-12)

    def test_looseness(self) -> None:
        """n = D = 64, causal, standard deviation 0.02: how loose the bounds are, measured and a priori."""
        leaves, G = self.point(1, 64, 64, 1, 1, 64, 64)
        leaves |= {name: 0.02 * W for name, W in leaves.items() if name.startswith("W")} | {"gamma": torch.ones(64, dtype=F64)}
        shared = {"heads": 1, "kv_heads": 1, "norm": "layernorm"}
        true = gradients(partial(attention, **shared, causal=True), leaves, G)
        near = AttentionGradientNorms.measured(**leaves, gradient=G, mask=causal_mask(64), **shared)
        far = replace(near, inputs=_a_priori(near.inputs, "layernorm"), heads=None)
        limits = {name: (20, 100) if name in ("W_V", "W_O") else (300, 3e3) for name in ("W_Q", "W_K", "W_V", "W_O", "gamma")}
        assert_loose(true, theorem_4_2(near), theorem_4_2(far), limits)

    def test_heads_that_cannot_be_shared_out(self) -> None:
        leaves, G = self.point(0, 2, 4, 2, 2, 2, 2)
        with pytest.raises(ValueError, match=r"array 6 has shape \(4, 3\); expected \(O, D\) with .*D = 4"):
            AttentionGradientNorms.measured(**{**leaves, "W_O": leaves["W_O"][:, :3]}, gradient=G, heads=2)
        with pytest.raises(ValueError, match="2 and 3 heads for W_Q"):
            AttentionGradientNorms.measured(**leaves, gradient=G, heads=2, kv_heads=3)
        with pytest.raises(ValueError, match="3 of queries, 2 of keys"):
            AttentionGradientNorms(NormedInput.a_priori(2, 4, 1.0), 1.0, 2, q=(1.0,) * 3, k=(1.0,) * 2, v=(1.0,) * 2, o=1.0)


class TestEmbedding:
    @pytest.mark.parametrize("positions", [False, True])
    @pytest.mark.parametrize("norm", NORMS)
    def test_between_its_bounds(self, norm: str, positions: bool) -> None:
        """sharpness-disparity/b3-bound: repeated tokens, rows that do not occur, and positions, for which the printed minimum
        fails (D4)."""
        tokens, G, gamma, W_E = torch.tensor([0, 2, 2, 1, 2]), draw(5, 4, seed=1), draw(4, seed=2), draw(6, 4, seed=3)
        W_E[5] *= 1e-6  # a token that does not occur: of no account
        P = draw(5, 4, seed=4) if positions else torch.zeros(5, 4, dtype=F64)

        def layer(X: Tensor, gamma: Tensor, W_E: Tensor) -> Tensor:
            return normed(W_E[X] + P, gamma, norm)

        arrays = {"gamma": gamma.clone().requires_grad_(), "W_E": W_E.clone().requires_grad_()}
        found = dict(zip(arrays, torch.autograd.grad((G * layer(tokens, **arrays)).sum(), arrays.values()), strict=True))
        near = EmbeddingNorms.measured(tokens, W_E, gamma, G, positions=P if positions else None, norm=norm)
        rows = W_E[tokens] + P
        least = float((rows - rows.mean(1, keepdim=True) if norm == "layernorm" else rows).norm(dim=1).min())
        far = EmbeddingNorms.a_priori(_a_priori(near.inputs, norm), 6, near.gradient, least_row=least, most=3)
        assert hold_near_and_far(theorem_4_3, near, far, found)["W_E"] > 0.1
        assert set(near.lower) == {"gamma"}

    def test_w_e_is_attained(self) -> None:
        """A gain of ones, one token four times, and a gradient orthogonal to its row and to 1."""
        W_E = torch.tensor([[3.0, -3.0, 0.0, 0.0], [9.0, 0.0, 0.0, -9.0]], dtype=F64).requires_grad_()
        tokens, gamma, G = torch.tensor([0, 0, 1, 0, 0]), torch.ones(4, dtype=F64), torch.zeros(5, 4, dtype=F64)
        G[tokens == 0] = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=F64)
        (true,) = torch.autograd.grad((G * normed(W_E[tokens], gamma, "layernorm")).sum(), W_E)
        bound = theorem_4_3(EmbeddingNorms.measured(tokens, W_E, gamma, G)).upper["W_E"]
        assert float(true.norm()) == pytest.approx(bound, rel=1e-12)

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="expected positive"):
            EmbeddingNorms.a_priori(NormedInput.a_priori(2, 4, 1.0), 3, 1.0, least_row=0.0)
        with pytest.raises(ValueError, match="row 1 has variance 0 and eps = 0"):
            NormedInput.measured(torch.tensor([[1.0, 2.0], [1.0, 1.0]]), torch.ones(2))
        with pytest.raises(ValueError, match="unknown norm 'batchnorm'"):
            NormedInput.a_priori(2, 3, 1.0, norm="batchnorm")
        with pytest.raises(ValueError, match="one or more of W_E, gamma"):
            theorem_4_3(EmbeddingNorms.a_priori(NormedInput.a_priori(2, 4, 1.0), 3, 1.0, least_row=1.0)).sharpness("W_Q")


@pytest.mark.parametrize("norm", NORMS)
def test_one_hot_rows_attain_the_a_priori_norms(norm: str) -> None:
    axis = torch.eye(5, dtype=F64)[0]
    near, far = NormedInput.measured(axis.expand(4, 5), 3 * axis, norm=norm), NormedInput.a_priori(4, 5, 3.0, norm=norm)
    for name in ("gamma", "gamma_max", "x", "rho", "entry", "column"):
        assert getattr(near, name) == pytest.approx(getattr(far, name), rel=1e-12), name


def test_eps_and_gains_only_lower_the_norms() -> None:
    for norm in NORMS:
        for seed in range(5):
            X, gamma = draw(4, 5, seed=seed), draw(5, seed=seed + 9)
            far = NormedInput.a_priori(4, 5, float(gamma.norm()), float(gamma.abs().max()), norm=norm)
            for eps in (0.0, 0.1):
                near = NormedInput.measured(X, gamma, eps=eps, norm=norm)
                assert near.x <= far.x
                assert near.rho <= far.rho
                assert near.column <= far.column


def _a_priori(inputs: NormedInput, norm: str) -> NormedInput:
    return NormedInput.a_priori(inputs.n, inputs.D, inputs.gamma, inputs.gamma_max, norm=norm)
