"""Bounds of Closing the Curvature Gap as printed: what holds of them, and one point where each theorem does not (the ledger has
all)."""

from __future__ import annotations

import math

import pytest
import torch
from bound_problems import (
    ATTENTION_SIZES,
    BLOCK_SIZES,
    F64,
    Problem,
    attention,
    norm,
    normalised,
    post_block,
    problems,
    whole_hessian,
)

from derivations.attention import AttentionAt
from derivations.bounds import attention_printed as attention_in_print
from derivations.bounds import block_printed as block_in_print
from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.transformer import PostNormBlockAt

MAIN, APPENDIX = attention_in_print.theorem_1_printed, attention_in_print.theorem_1_appendix_printed


def sizes_and_norms(p: Problem) -> tuple[float, ...]:
    w = p.weights
    return (*p.X.shape, w["W_Q"].shape[1], *(norm(A) for A in (p.X, w["W_Q"], w["W_K"], w["W_V"], p.target)))


def spectral(matrix) -> float:
    return norm(matrix.dense())


class TestTheorem1:
    @pytest.mark.parametrize("q", [10.0, 100.0])
    def test_violated_at_a_global_minimum(self, q: float) -> None:
        """The true norm is 2 q^2 and M is 24, whichever version."""
        one = torch.ones(1, 1, dtype=F64)
        p = Problem(
            torch.tensor([[1.0], [-1.0]], dtype=F64), {"W_Q": q * one, "W_K": 0 * one, "W_V": one}, torch.zeros(2, 1, dtype=F64)
        )
        true = norm(whole_hessian(attention, p))
        assert true == pytest.approx(2 * q**2, rel=1e-12)
        for theorem in (MAIN, APPENDIX):
            assert true / theorem(*sizes_and_norms(p)).M == pytest.approx(q**2 / 12, rel=1e-12)
            assert true <= theorem(*sizes_and_norms(p), swapped=True).M

    def test_swapped_version_survives_short_random_problems(self) -> None:
        for kind in ("init", "large"):
            for p in problems(kind, ATTENTION_SIZES, 12, seed=4):
                true = norm(whole_hessian(attention, p))
                main, appendix = (theorem(*sizes_and_norms(p), swapped=True).M for theorem in (MAIN, APPENDIX))
                assert true <= appendix <= main
                assert main >= MAIN(*sizes_and_norms(p)).M

    def test_blocks_that_hold_by_slack(self) -> None:
        """Items 11, 14 and 16: H_o(V, V), H_f(Q, Q) and H_f(Q, K)."""
        for p in problems("init", ATTENTION_SIZES, 9, seed=5):
            at = AttentionAt(p.X, *p.weights.values())
            *sizes, x, q, k, v, t = sizes_and_norms(p)
            outer = attention_in_print.outer_printed(*sizes, x, q, k, v)
            m = math.sqrt(min(sizes[:2]))
            functional = attention_in_print.functional_printed(*sizes, x, q, k, v, t, m)
            factor = 2 / p.X.numel()
            residual = (at.F - p.target).reshape(-1)
            assert factor * spectral(at.G_V) ** 2 <= outer.VV
            for a, b, bound in (("Q", "Q", functional.QQ), ("Q", "K", functional.QK)):
                n = p.weights[f"W_{a}"].numel()
                contracted = torch.einsum("o,onm->nm", residual, at.Phi(a, b).dense().reshape(len(residual), n, -1))
                assert factor * norm(contracted) <= bound


class TestSteps:
    def test_those_that_hold(self) -> None:
        for p in problems("large", ATTENTION_SIZES[2:], 4, seed=2):
            at = AttentionAt(p.X, *p.weights.values())
            L, d = p.X.shape
            steps = attention_in_print.theorem_1_steps_printed(L, d, norm(p.X), norm(p.weights["W_V"]), norm(p.target))
            assert norm(at.A) <= steps.A
            assert spectral(at.d2A) <= steps.d2A
            assert spectral(at.Z_2) <= steps.Z_2
            assert spectral(at.S) == pytest.approx(steps.S, rel=1e-12)
            assert float((at.F - p.target).norm()) <= steps.residual


class TestTheorem7:
    def test_violated_with_the_true_norm(self) -> None:
        """The Hessian at w* = 0 is zero, so that the right side is; the loss at (1, 1, 1) is tanh(1)^2."""
        one = torch.ones(1, 1, dtype=F64)
        p = Problem(
            torch.tensor([[1.0], [-1.0]], dtype=F64), dict.fromkeys(("W_Q", "W_K", "W_V"), 0 * one), torch.zeros(2, 1, dtype=F64)
        )
        M = norm(whole_hessian(attention, p))
        assert attention_in_print.theorem_7_printed(1, 0.0, M, math.sqrt(3)) == 0
        loss = float(attention(p.X, dict.fromkeys(p.weights, one)).square().mean())
        assert loss == pytest.approx(math.tanh(1) ** 2, rel=1e-12)
        on_segment = max(
            norm(whole_hessian(attention, Problem(p.X, dict.fromkeys(p.weights, s * one), p.target)))
            for s in torch.linspace(0, 1, 21)
        )
        assert loss / 2 <= attention_in_print.theorem_7_corrected(1, 0.0, on_segment, math.sqrt(3))


class TestLemma4:
    def test_holds_with_the_deviations_of_the_proof(self) -> None:
        g = torch.Generator().manual_seed(0)
        for m, n in ((1, 3), (4, 5), (2, 16)):
            for scale in (1e-3, 1.0, 1e3):
                X = scale * torch.randn(m, n, generator=g, dtype=F64)
                s, x = block_in_print.sigma_min_printed(X, reading="proof"), norm(X)
                assert norm_jacobian_norm(X) <= block_in_print.lemma_4_jacobian_printed(x, s, n)
                assert norm_hessian_norm(X) <= block_in_print.lemma_4_hessian_printed(x, s, m, n)
        with pytest.raises(ValueError, match="unknown reading"):
            block_in_print.sigma_min_printed(X, reading="other")


class TestTheorem6:
    @staticmethod
    def closed(p: Problem, reading: str) -> float:
        L, d = p.X.shape
        w = p.weights
        S0 = p.X + attention(p.X, w)
        Y = normalised(S0)
        S = Y + torch.relu(Y @ w["W_1"]) @ w["W_2"]
        q, k, v, w1, w2 = (norm(W) for W in w.values())
        sizes, x = (L, d, w["W_Q"].shape[1]), norm(p.X)
        sigmas = {name: block_in_print.sigma_min_printed(A, reading=reading) for name, A in (("sigma", S0), ("sigma_prime", S))}
        factors = block_in_print.theorem_6_factors_printed(*sizes, w["W_1"].shape[1], x, q, k, v, w1, w2, **sigmas)
        phi, residual = block_in_print.phi_printed(*sizes, x, q, k, v), float((normalised(S) - p.target).norm())
        return block_in_print.theorem_6_printed(L, d, w["W_1"].shape[1], factors, phi, w1, w2, residual).whole

    def test_holds_with_that_of_the_proof(self) -> None:
        for kind in ("init", "large"):
            for p in problems(kind, BLOCK_SIZES, 3, seed=7):
                assert norm(whole_hessian(post_block, p)) <= self.closed(p, "proof")

    def test_exact_factors(self) -> None:
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

    def test_proposition_10(self) -> None:
        for p in problems("large", BLOCK_SIZES, 3, seed=2):
            at = PostNormBlockAt(p.X, *p.weights.values())
            w1, w2 = norm(p.weights["W_1"]), norm(p.weights["W_2"])
            bound = block_in_print.proposition_10_printed(*p.X.shape, p.weights["W_1"].shape[1], w1, w2)
            assert float(at.Y.norm()) == pytest.approx(bound.Y, rel=1e-12)
            assert norm(at.S - at.Y) <= bound.FFN
            assert norm(at.S) <= bound.S
