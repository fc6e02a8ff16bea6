"""Closing the Curvature Gap as printed: violated where the review says so, by the ratios it states, and not elsewhere."""

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
    hessian_blocks,
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
        """CE1: the true norm is 2 q^2 and M is 24, whichever version."""
        one = torch.ones(1, 1, dtype=F64)
        p = Problem(
            torch.tensor([[1.0], [-1.0]], dtype=F64), {"W_Q": q * one, "W_K": 0 * one, "W_V": one}, torch.zeros(2, 1, dtype=F64)
        )
        true = norm(whole_hessian(attention, p))
        assert true == pytest.approx(2 * q**2, rel=1e-12)
        for theorem in (MAIN, APPENDIX):
            assert true / theorem(*sizes_and_norms(p)).M == pytest.approx(q**2 / 12, rel=1e-12)
            assert true <= theorem(*sizes_and_norms(p), swapped=True).M

    @pytest.mark.parametrize(("L", "main", "appendix"), [(10, None, 1.18), (18, 1.06, None), (24, 1.41, None), (40, 2.36, None)])
    def test_swapped_blocks_do_not_mend_it(self, L: int, main: float | None, appendix: float | None) -> None:
        """CE2: row 1 of the softmax puts 1/2 on its own token."""
        X = torch.zeros(L, 1, dtype=F64)
        X[0] = 1.0
        w = math.sqrt(math.log(L - 1)) * torch.ones(1, 1, dtype=F64)
        p = Problem(X, {"W_Q": w, "W_K": w, "W_V": 0 * w}, 1e6 * X)
        true = norm(whole_hessian(attention, p))
        for theorem, ratio in ((MAIN, main), (APPENDIX, appendix)):
            if ratio is not None:
                assert true / theorem(*sizes_and_norms(p), swapped=True).M == pytest.approx(ratio, rel=0.006)

    @pytest.mark.parametrize(("L", "ratio"), [(4, 2.67), (8, 10.7)])
    def test_appendix_with_the_rank(self, L: int, ratio: float) -> None:
        """CE3: target = output, hence rank 0; two tokens share the attention of rows 1 and 2."""
        p = self.shared(L)
        true = norm(whole_hessian(attention, p))
        assert true / APPENDIX(*sizes_and_norms(p), rank=0, swapped=True).M == pytest.approx(ratio, rel=0.01)
        outer = attention_in_print.outer_printed(*sizes_and_norms(p)[:-1])
        assert norm(hessian_blocks(attention, p)["W_Q", "W_Q"]) / outer.QQ == pytest.approx(L**2 / 4, rel=0.01)

    @staticmethod
    def shared(L: int) -> Problem:
        X = torch.zeros(L, 2, dtype=F64)
        X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
        identity = torch.eye(2, dtype=F64)
        weights = {"W_Q": torch.diag(torch.tensor([0.0, 4.0], dtype=F64)), "W_K": 4 * identity, "W_V": 30 * identity}
        return Problem(X, weights, attention(X, weights))

    @pytest.mark.parametrize("L", [5, 8])
    def test_functional_block_of_values_and_queries(self, L: int) -> None:
        """CE4: the printed H_f(V, Q) is too small by L/4; W_V = 0 leaves no outer product."""
        X = torch.zeros(L, 1, dtype=F64)
        X[0] = 1.0
        w = math.sqrt(math.log(L - 1)) * torch.ones(1, 1, dtype=F64)
        p = Problem(X, {"W_Q": w, "W_K": w, "W_V": 0 * w}, X)
        printed = attention_in_print.functional_printed(*sizes_and_norms(p), 1.0)
        assert norm(hessian_blocks(attention, p)["W_V", "W_Q"]) / printed.VQ == pytest.approx(L / 4, rel=1e-12)

    def test_outer_block_of_values_and_queries(self) -> None:
        """CE5: 32 rows attend the same two tokens; too small by sqrt(2) at L = 34."""
        X = torch.zeros(34, 3, dtype=F64)
        X[:2, 1], X[0, 0], X[1, 0], X[2:, 2] = 1 / math.sqrt(2), 1.0, -1.0, 0.25
        W_Q = torch.zeros(3, 3, dtype=F64)
        W_Q[2, 1] = 1e3
        weights = {"W_Q": W_Q, "W_K": torch.eye(3, dtype=F64), "W_V": torch.eye(3, dtype=F64)}
        p = Problem(X, weights, attention(X, weights))
        printed = attention_in_print.outer_printed(*sizes_and_norms(p)[:-1])
        assert norm(hessian_blocks(attention, p)["W_V", "W_Q"]) / printed.VQ == pytest.approx(math.sqrt(2), rel=1e-4)

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
    def test_uniform_attention_only(self) -> None:
        """Items 4 and 7: L/2 too small where two of L tokens share the attention."""
        for L in (4, 8):
            p = TestTheorem1.shared(L)
            at = AttentionAt(p.X, *p.weights.values())
            steps = attention_in_print.theorem_1_steps_printed(L, 2, norm(p.X), norm(p.weights["W_V"]), norm(p.target))
            assert spectral(at.dA) / steps.dA == pytest.approx(L / 2, rel=1e-3)
            assert spectral(at.Z_1) / steps.Z_1 > 0.2 * L
            Q, _, _ = block_in_print.attention_jacobians_printed(L, 2, norm(p.X), 4.0, 4.0, 30.0)
            assert spectral(at.G_Q) / Q > 0.2 * L
            uniform = AttentionAt(p.X, 0 * p.weights["W_Q"], p.weights["W_K"], p.weights["W_V"])
            assert spectral(uniform.dA) == pytest.approx(steps.dA, rel=1e-12)
            assert spectral(uniform.Z_1) <= steps.Z_1 * (1 + 1e-12)

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
    def test_violated_with_its_own_M(self) -> None:
        """CE12: CE1 as sample k + 1, the others have X = 0 and no loss; W_K moves from 0 to 0.01."""
        M = MAIN(2, 1, 1, math.sqrt(2), 100.0, 0.0, 1.0, 0.0).M
        k, moved = 4, 0.01
        difference = math.tanh(100 * moved) ** 2 / (k + 1)
        assert difference / attention_in_print.theorem_7_printed(k, 0.0, M, moved) == pytest.approx(242, rel=0.01)

    def test_violated_with_the_true_norm(self) -> None:
        """CE13: the Hessian at w* = 0 is zero, so that the right side is; the loss at (1, 1, 1) is tanh(1)^2."""
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
    @pytest.mark.parametrize(("n", "jacobian"), [(3, 1.098), (4, 1.33), (8, 2.09)])
    def test_violated_as_stated(self, n: int, jacobian: float) -> None:
        """CE9: the row (1, -1, 0, ...)."""
        X = torch.zeros(1, n, dtype=F64)
        X[0, 0], X[0, 1] = 1.0, -1.0
        s, x = block_in_print.sigma_min_printed(X), norm(X)
        assert norm_jacobian_norm(X) / block_in_print.lemma_4_jacobian_printed(x, s, n) == pytest.approx(jacobian, rel=0.03)
        small = 1e-3 * X
        ratio = norm_hessian_norm(small) / block_in_print.lemma_4_hessian_printed(1e-3 * x, 1e-3 * s, 1, n)
        assert ratio == pytest.approx({3: 0.95, 4: 1.26, 8: 4.0}[n], rel=0.1)

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

    @pytest.mark.parametrize(("d", "least"), [(5, 1.1), (8, 3.5), (12, 9.5)])
    def test_violated_with_sigma_as_stated(self, d: int, least: float) -> None:
        """CE10: one token of unit deviation, tiny weights, target = output, a global minimum."""
        X = normalised(torch.cat([torch.tensor([[1.0, -1.0]], dtype=F64), torch.zeros(1, d - 2, dtype=F64)], 1))
        g = torch.Generator().manual_seed(0)
        shapes = {"W_Q": (d, 2), "W_K": (d, 2), "W_V": (d, d), "W_1": (d, 2 * d), "W_2": (2 * d, d)}
        weights = {name: 1e-6 * torch.randn(*s, generator=g, dtype=F64) for name, s in shapes.items()}
        p = Problem(X, weights, torch.zeros_like(X))
        p = Problem(X, weights, post_block(X, weights))
        true = norm(whole_hessian(post_block, p))
        assert true / self.closed(p, "stated") > least
        assert true <= self.closed(p, "proof")

    def test_holds_with_that_of_the_proof(self) -> None:
        for kind in ("init", "large"):
            for p in problems(kind, BLOCK_SIZES, 3, seed=7):
                assert norm(whole_hessian(post_block, p)) <= self.closed(p, "proof")

    def test_xi_21_does_not_grow_with_W_2(self) -> None:
        """CE11: the print has sqrt(d_ff) ||W_2||."""
        (p,) = problems("init", BLOCK_SIZES[:1], 1, seed=3)
        small = p.scaled(W_2=1e-6)
        at = PostNormBlockAt(small.X, *small.weights.values())
        printed = math.sqrt(small.weights["W_1"].shape[1]) * norm(small.weights["W_2"])
        assert spectral(at.xi("2", "1")) > 1e5 * printed
        assert spectral(at.xi("1", "2")) <= math.sqrt(small.X.shape[1]) * norm(at.Y)

    @pytest.mark.parametrize("n", [2, 3, 4])
    def test_phi_under_uniform_attention(self, n: int) -> None:
        """CE6: at L = d_V = n the print of Phi_VQ is too small by n^2 / 2, that of Phi_QK by n^(3/2) / 2."""
        X = torch.zeros(n, n, dtype=F64)
        X[0, 0], X[1, 0] = 1.0, -1.0
        first = torch.eye(n, dtype=F64)[:, :1]
        at = AttentionAt(X, 0 * first, first, torch.eye(n, dtype=F64))
        phi = block_in_print.phi_printed(n, n, 1, norm(X), 0.0, 1.0, 1.0)
        assert spectral(at.Phi("V", "Q")) / phi["VQ"] == pytest.approx(n**2 / 2, rel=1e-12)
        assert spectral(at.Phi("Q", "K")) / phi["QK"] == pytest.approx(n**1.5 / 2, rel=1e-12)

    def test_phi_of_queries_on_wide_problems(self) -> None:
        """CE7: L = d_V = 7, one row of the attention where the third cumulant is largest: too small by sqrt(6)/9 * 49/12."""
        identity, A = torch.eye(7, dtype=F64), torch.eye(7, dtype=F64)
        A[0, 0], A[0, 1] = (1 + 1 / math.sqrt(3)) / 2, (1 - 1 / math.sqrt(3)) / 2
        at = AttentionAt(identity, identity, identity, identity, weights=A)
        printed = block_in_print.phi_printed(7, 7, 7, 1.0, 1.0, 1.0, 1.0)
        assert spectral(at.Phi("Q", "Q")) / printed["QQ"] == pytest.approx(math.sqrt(6) / 9 * 49 / 12, rel=1e-10)

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
