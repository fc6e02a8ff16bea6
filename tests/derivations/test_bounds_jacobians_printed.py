"""HybridNorm A.3, Sharpness Disparity 4.1-4.3 and the Curse of Depth as printed, against Jacobians by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from bound_problems import F64, norm, normalised
from torch import Tensor

from derivations.bounds import depth_printed, hybridnorm_printed, sharpness_printed
from derivations.bounds.sharpness_bounds import EmbeddingNorms, NormedInput, theorem_4_3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class TestTheoremA3:
    """Frobenius norms of the Jacobians of one head."""

    @staticmethod
    def jacobians(X: Tensor, weights: tuple[Tensor, ...], *, qkv_norm: bool) -> list[float]:
        def head(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
            if qkv_norm:
                Q, K, V = (normalised(X @ w, norm="rmsnorm") for w in (q, k, v))
            else:
                Q, K, V = (normalised(X, norm="rmsnorm") @ w for w in (q, k, v))
            return torch.softmax(Q @ K.mT / math.sqrt(q.shape[1]), 1) @ V @ o

        return [float(J.norm()) for J in torch.autograd.functional.jacobian(head, weights)]

    @pytest.mark.parametrize(("s", "d", "d_k"), [(1, 3, 2), (2, 4, 2), (5, 3, 3), (4, 2, 6)])
    def test_pre_norm_holds(self, s: int, d: int, d_k: int) -> None:
        for scale in (1e-2, 1.0, 3.0):
            weights = tuple(scale * draw(*shape, seed=n) for n, shape in enumerate([(d, d_k)] * 3 + [(d_k, d)]))
            norms = [norm(W) for W in weights]
            bounds = hybridnorm_printed.theorem_a3_pre_norm_printed(s, d, d_k, *norms, float(weights[3].norm()))
            for true, bound in zip(self.jacobians(draw(s, d, seed=9), weights, qkv_norm=False), bounds, strict=True):
                assert true <= bound * (1 + 1e-12)

    def test_query_bound_is_attained_at_two_tokens(self) -> None:
        """Tokens +-x and uniform attention."""
        one = torch.ones(1, 1, dtype=F64)
        true = self.jacobians(torch.tensor([[2.0], [-2.0]], dtype=F64), (0 * one, one, one, one), qkv_norm=False)[0]
        assert true == pytest.approx(hybridnorm_printed.theorem_a3_pre_norm_printed(2, 1, 1, 0, 1, 1, 1, 1).W_Q, rel=1e-12)

    def test_qkv_norm_is_violated_by_the_scale_of_the_input(self) -> None:
        """The left side does not feel X -> 1000 X; the right one is divided by 1000."""
        X, weights = draw(4, 4, seed=7), tuple(draw(4, 4, seed=n) for n in range(4))
        true = self.jacobians(X, weights, qkv_norm=True)
        ratios = []
        for c in (1.0, 1e3):
            assert self.jacobians(c * X, weights, qkv_norm=True) == pytest.approx(true, rel=1e-10)
            least = [float(torch.linalg.svdvals(c * X @ W)[-1]) for W in weights[:3]]
            sigmas = dict(zip(("sigma_Q", "sigma_K", "sigma_V"), least, strict=True))
            bounds = hybridnorm_printed.theorem_a3_qkv_norm_printed(4, 4, 4, norm(weights[3]), **sigmas)
            ratios.append([a / b for a, b in zip(true, bounds, strict=True)])
        for near, far in list(zip(*ratios, strict=True))[:3]:
            assert far == pytest.approx(1e3 * near, rel=1e-8)
            assert far > 1

    def test_output_bound_needs_heads_of_moderate_width(self) -> None:
        """Eq. 30 at s = 1, d = 2, d_k = 8: ratio 2."""
        weights = (*(draw(2, 8, seed=n) for n in range(3)), draw(8, 2, seed=3))
        true = self.jacobians(draw(1, 2), weights, qkv_norm=True)[3]
        bound = hybridnorm_printed.theorem_a3_qkv_norm_printed(1, 2, 8, 1.0, sigma_Q=1, sigma_K=1, sigma_V=1).W_O
        assert true / bound == pytest.approx(2, rel=1e-12)


class TestSharpness:
    @pytest.mark.parametrize("seed", range(4))
    def test_feedforward_holds(self, seed: int) -> None:
        n, D, M = 3, 4, 5
        X, g_Y = draw(n, D, seed=seed), draw(n, D, seed=seed + 50)
        leaves = [draw(*shape, seed=seed + k).requires_grad_() for k, shape in enumerate([(D, M), (M, D), (D,)], start=10)]
        w1, w2, gamma = leaves
        A = (normalised(X) * gamma) @ w1
        grads = torch.autograd.grad((torch.relu(A) @ w2 * g_Y).sum(), leaves)
        slopes = float((A > 0).to(F64).sum().sqrt())
        bound = sharpness_printed.theorem_4_1_printed(
            n, D, float(g_Y.norm()), slopes, *(float(t.detach().norm()) for t in leaves)
        )
        for grad, value in zip(grads, bound[1:], strict=True):
            assert float(grad.norm()) <= value

    @pytest.mark.parametrize("seed", range(4))
    def test_attention_holds(self, seed: int) -> None:
        n, D = 3, 4
        X, g_Y = draw(n, D, seed=seed), draw(n, D, seed=seed + 50)
        leaves = [draw(*shape, seed=seed + k).requires_grad_() for k, shape in enumerate([(D, D)] * 4 + [(D,)], start=10)]
        q, k, v, o, gamma = leaves
        Z = normalised(X) * gamma
        logits = Z @ q @ (Z @ k).mT / math.sqrt(D)
        A = torch.softmax(logits, 1)
        grads = torch.autograd.grad((A @ Z @ v @ o * g_Y).sum(), leaves)
        slopes = float((torch.diag_embed(A) - A.unsqueeze(2) * A.unsqueeze(1)).detach().norm())
        sizes = [float(t.detach().norm()) for t in leaves]
        bound = sharpness_printed.theorem_4_2_printed(n, D, float(g_Y.norm()), slopes, float(A.detach().norm()), *sizes)
        for grad, value in zip(grads, bound[2:], strict=True):
            assert float(grad.norm()) <= value

    def test_embedding_is_violated_by_the_scale_of_the_loss(self) -> None:
        """Claim D6: Psi leaves out the gradient at the output."""
        n, D, tokens = 4, 5, torch.tensor([0, 2, 2, 1])
        embedding, gamma = draw(3, D, seed=1).requires_grad_(), draw(D, seed=2).requires_grad_()
        g_Y = draw(n, D, seed=3)
        centred = embedding.detach() - embedding.detach().mean(1, keepdim=True)
        sizes = (n, D, float(gamma.detach().norm()), float(centred.norm(dim=1).min()))
        for c in (1.0, 1e3):
            grads = torch.autograd.grad((normalised(embedding[tokens]) * gamma * c * g_Y).sum(), [embedding, gamma])
            printed = sharpness_printed.theorem_4_3_printed(*sizes)
            norms = EmbeddingNorms.a_priori(NormedInput.a_priori(n, D, sizes[2]), 3, c * float(g_Y.norm()), least_row=sizes[3])
            for grad, wrong, right in zip(grads, printed[1:], theorem_4_3(norms).upper.values(), strict=True):
                assert float(grad.norm()) <= right
                if c > 1:
                    assert float(grad.norm()) > 10 * wrong


class TestDepth:
    @staticmethod
    def branch(X: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return X + torch.relu(normalised(X) @ w1) @ w2

    def layers(self, d: int, d_ff: int, sigma: float, depth: int) -> tuple[float, list[float]]:
        """The norm of dy_L/dx_1 and the deviations of the inputs, for feed-forward layers alone."""
        X = draw(1, d)
        J, deviations = torch.eye(d, dtype=F64), []
        for layer in range(depth):
            w1, w2 = sigma * draw(d, d_ff, seed=2 * layer + 1), sigma * draw(d_ff, d, seed=2 * layer + 2)
            deviations.append(float(X.std(1, unbiased=False)))
            J = torch.autograd.functional.jacobian(lambda x, a=w1, b=w2: self.branch(x, a, b), X).reshape(d, d) @ J
            X = self.branch(X, w1, w2)
        return norm(J), deviations

    def test_the_product_lacks_a_layer(self) -> None:
        """Eq. 9 as printed is an empty product for one layer."""
        true, deviations = self.layers(8, 32, 0.3, 1)
        constants = depth_printed.equation_9_constants(8, 32, 1, 1, 0.3)
        assert true > 1 == depth_printed.equation_9_printed(deviations, constants)
        assert true <= depth_printed.equation_9_corrected(deviations, constants)

    def test_corrected_product_holds(self) -> None:
        true, deviations = self.layers(8, 32, 0.2, 6)
        assert true <= depth_printed.equation_9_corrected(deviations, depth_printed.equation_9_constants(8, 32, 1, 1, 0.2))

    def test_feedforward_factor_of_the_print_is_violated(self) -> None:
        """Eq. 41 divides by (sqrt(d) + sqrt(d_ff))^2 where it should multiply."""
        true, (deviation,) = self.layers(16, 64, 0.2, 1)
        assert true > 1.5 > 1 + 0.2**2 / (deviation * (4 + 8) ** 2)

    def test_scaling_divides_by_the_root(self) -> None:
        """A branch C x / (s sqrt(l)) has Jacobians of norm 1 / (s sqrt(l)): layer 4 alone violates 1 / (l s)."""
        X = draw(1, 6)
        s = float(X.std(1, unbiased=False))
        J = torch.autograd.functional.jacobian(lambda x: x + normalised(x) / math.sqrt(4), X).reshape(6, 6)
        far, constants = [1e9] * 3, depth_printed.DepthConstants(1.0, 0.0)
        assert norm(J) > depth_printed.equation_15_printed([*far, s, 1.0], constants) * 1.1
        assert norm(J) == pytest.approx(depth_printed.equation_15_corrected([*far, s], constants), rel=1e-8)

    def test_lower_bound_of_the_growth(self) -> None:
        """Independent branches of variance 1/l: sigma_L^2 = 1 + H_{L-1} is of order log L, below Theta(L)."""
        growth = [sum(1 / n for n in range(1, L)) for L in (10, 100, 1000, 10000)]
        lower = [depth_printed.equation_14_printed(L, 0.5)[0] for L in (10, 100, 1000, 10000)]
        ratios = [g / low for g, low in zip(growth, lower, strict=True)]
        assert ratios[-1] < ratios[0] / 100
        with pytest.raises(ValueError, match="expected 1/2 <= epsilon < 1"):
            depth_printed.equation_14_printed(10, 0.2)
