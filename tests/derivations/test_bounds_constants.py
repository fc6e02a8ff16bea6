"""Sharp constants against norms found by autograd with singular values, and by alternating maximisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformer_reference import ACTIVATIONS, normalised

from derivations import bounds
from derivations.activation_functions import SMOOTH

F64 = torch.float64
Function = Callable[[Tensor], Tensor]


def normalization(norm: str, eps: float) -> Function:
    """LayerNorm or RMSNorm without gain, spelled out (torch's own has second derivatives that forward mode gets wrong)."""
    return partial(normalised, eps=eps, norm=norm)


def jacobian(f: Function, X: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(f, X).reshape(-1, X.numel())


def second_derivative(f: Function, X: Tensor) -> Tensor:
    """The tensor of shape (out, n, n), reverse over reverse."""

    def first(X: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(f, X, create_graph=True)

    return torch.autograd.functional.jacobian(first, X).reshape(f(X).numel(), X.numel(), X.numel())


def spectral(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A, 2))


def map_norm(T: Tensor, starts: int = 8, polish: int = 3000) -> float:
    """The largest ||T[a, b]||: for fixed a it is a spectral norm, and alternating over a and b can only climb."""
    generator = torch.Generator().manual_seed(0)

    def climb(a: Tensor, steps: int) -> tuple[float, Tensor]:
        value = -1.0
        for _ in range(steps):
            previous, (_, singular, right) = value, torch.linalg.svd(torch.einsum("oab,a->ob", T, a))
            value, a = float(singular[0]), right[0]
            if value - previous <= 1e-15 * value:
                break
        return value, a

    found = [climb(torch.randn(T.shape[1], generator=generator, dtype=F64), 20) for _ in range(starts)]
    return climb(max(found, key=lambda pair: pair[0])[1], polish)[0]


NORMALIZATIONS = [
    (norm, *size, eps)
    for norm, sizes in {"layernorm": ((2, 3), (1, 8), (2, 2)), "rmsnorm": ((3, 3), (2, 1))}.items()
    for size in sizes
    for eps in (0.0, 0.3, 20.0)
]


@pytest.mark.parametrize(("norm", "L", "d", "eps"), NORMALIZATIONS)
class TestNormalization:
    """The exact norms at a point, for rows on both sides of rho^2 = 1/3 and for every small width."""

    def rows(self, L: int, d: int) -> Tensor:
        scales = torch.tensor([[1.0], [4.0], [0.4]], dtype=F64)[:L]
        return scales * torch.randn(L, d, generator=torch.Generator().manual_seed(d), dtype=F64) + 0.5

    def test_jacobian_norm(self, norm: str, L: int, d: int, eps: float) -> None:
        X = self.rows(L, d)
        true = spectral(jacobian(normalization(norm, eps), X))
        assert bounds.norm_jacobian_norm(X, eps, norm=norm) == pytest.approx(true, rel=1e-12, abs=1e-13)

    def test_hessian_norms(self, norm: str, L: int, d: int, eps: float) -> None:
        """Of the matrix of the paper, and of the bilinear map."""
        X = self.rows(L, d)
        T = second_derivative(normalization(norm, eps), X)
        true = spectral(T.reshape(-1, X.numel()))
        assert bounds.norm_hessian_norm(X, eps, norm=norm) == pytest.approx(true, rel=1e-12, abs=1e-12)
        assert bounds.norm_hessian_map_norm(X, eps, norm=norm) == pytest.approx(map_norm(T), rel=1e-9, abs=1e-12)

    def test_constants_for_every_input(self, norm: str, L: int, d: int, eps: float) -> None:
        if eps == 0:
            with pytest.raises(ValueError, match="eps > 0"):
                bounds.norm_constants(d, eps)
            return
        constants = bounds.norm_constants(d, eps)
        for scale in (0.01, 0.3, 1.0, 5.0):
            X = scale * self.rows(L, d)[:1]
            assert spectral(jacobian(normalization(norm, eps), X)) <= constants.jacobian * (1 + 1e-12)
            assert map_norm(second_derivative(normalization(norm, eps), X), 2, 20) <= constants.hessian_map * (1 + 1e-12)


class TestNormalizationAttained:
    @pytest.mark.parametrize(("norm", "d"), [("layernorm", 2), ("layernorm", 6), ("rmsnorm", 1), ("rmsnorm", 5)])
    def test_constants_are_attained(self, norm: str, d: int) -> None:
        eps = 0.7
        constants = bounds.norm_constants(d, eps)
        flat = torch.zeros(1, d, dtype=F64) + (2.0 if norm == "layernorm" else 0.0)
        assert spectral(jacobian(normalization(norm, eps), flat)) == pytest.approx(constants.jacobian, rel=1e-12)
        assert bounds.norm_jacobian_norm(flat, eps, norm=norm) == pytest.approx(constants.jacobian, rel=1e-12)
        x = torch.arange(1.0, d + 1, dtype=F64).reshape(1, d)
        x = x - x.mean() if norm == "layernorm" else x
        x = x * math.sqrt(eps / 4 / float((x**2).mean()))
        true = map_norm(second_derivative(normalization(norm, eps), x))
        assert true == pytest.approx(constants.hessian_map, rel=1e-10)
        assert bounds.norm_hessian_map_norm(x, eps, norm=norm) == pytest.approx(constants.hessian_map, rel=1e-12)

    @pytest.mark.parametrize("function", [bounds.norm_jacobian_norm, bounds.norm_hessian_norm, bounds.norm_hessian_map_norm])
    def test_errors(self, function: Callable[..., float]) -> None:
        X = torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
        with pytest.raises(ValueError, match=r"row 1 has variance 0.*Pass eps > 0"):
            function(X)
        with pytest.raises(ValueError, match="row 0 has mean square 0"):
            function(0 * X, norm="rmsnorm")
        with pytest.raises(ValueError, match="expected rows"):
            function(X[0])
        with pytest.raises(ValueError, match="unknown norm 'batchnorm'"):
            function(X, norm="batchnorm")


class TestSoftmax:
    def logits(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(9)
        found = [scale * torch.randn(1, L, generator=generator, dtype=F64) for L in (2, 3, 6) for scale in (0.1, 1.0, 4.0)]
        return [*found, torch.zeros(1, 5, dtype=F64)]

    def test_jacobian_bound_holds(self) -> None:
        for T in self.logits():
            A = torch.softmax(T, 1)
            true = spectral(jacobian(lambda T: torch.softmax(T, 1), T))
            assert true <= bounds.softmax_jacobian_bound(A) * (1 + 1e-12)
            assert bounds.softmax_jacobian_bound(A) <= bounds.softmax_jacobian_bound() == 0.5

    @pytest.mark.parametrize("L", [2, 6])
    def test_jacobian_bound_is_attained(self, L: int) -> None:
        """Two tokens share the attention: 1/2, where the printed bound is 1/L (claim b:dA/dT<=1/L)."""
        T = torch.full((1, L), -1000.0, dtype=F64)
        T[0, :2] = 0
        true = spectral(jacobian(lambda T: torch.softmax(T, 1), T))
        assert true == pytest.approx(0.5, rel=1e-14)
        assert bounds.softmax_jacobian_bound(torch.softmax(T, 1)) == pytest.approx(0.5, rel=1e-14)

    def test_hessian_bounds_hold(self) -> None:
        for T in self.logits():
            tensor = second_derivative(lambda T: torch.softmax(T, 1), T)
            assert map_norm(tensor, 5) <= bounds.softmax_hessian_map_bound() * (1 + 1e-12)
            assert spectral(tensor.reshape(-1, T.numel())) <= bounds.softmax_hessian_stacked_bound() * (1 + 1e-12)

    @pytest.mark.parametrize("L", [2, 5])
    def test_hessian_map_bound_is_attained(self, L: int) -> None:
        T = torch.full((1, L), -1000.0, dtype=F64)
        T[0, 0], T[0, 1] = math.log((1 + 1 / math.sqrt(3)) / 2), math.log((1 - 1 / math.sqrt(3)) / 2)
        tensor = second_derivative(lambda T: torch.softmax(T, 1), T)
        assert map_norm(tensor) == pytest.approx(bounds.softmax_hessian_map_bound(), rel=1e-12)
        stacked = spectral(tensor.reshape(-1, L))
        assert bounds.softmax_hessian_map_bound() * (1 - 1e-12) <= stacked <= bounds.softmax_hessian_stacked_bound()


@pytest.mark.parametrize("A", [torch.tensor([[0.5, 0.6]]), torch.tensor([[1.5, -0.5]]), torch.tensor([1.0])])
def test_rows_are_probabilities(A: Tensor) -> None:
    for function in (bounds.softmax_jacobian_bound, bounds.row_stochastic_norm_bound):
        with pytest.raises(ValueError, match="nonnegative and sum to 1"):
            function(A)


def test_rows_that_read_one_value_attain_their_bound() -> None:
    A = torch.zeros(6, 4, dtype=F64)
    A[:, 2] = 1
    assert spectral(A) == pytest.approx(bounds.row_stochastic_norm_bound(6), rel=1e-14)
    assert bounds.row_stochastic_norm_bound(A) == bounds.row_stochastic_norm_bound(6)


class TestTokens:
    """Covariance and third cumulant of tokens under any probabilities, from norms of the tokens."""

    @pytest.mark.parametrize(("L", "d"), [(1, 3), (2, 1), (5, 3), (3, 7)])
    def test_hold(self, L: int, d: int) -> None:
        generator = torch.Generator().manual_seed(L)
        for scale in (0.1, 1.0, 10.0):
            X = torch.randn(L, d, generator=generator, dtype=F64)
            p = torch.softmax(scale * torch.randn(L, generator=generator, dtype=F64), 0)
            centred = X - p @ X
            covariance = centred.mT @ (p.unsqueeze(1) * centred)
            third = torch.einsum("j,ja,jb,jc->abc", p, centred, centred, centred)
            x, rho = spectral(X), float(X.norm(dim=1).max())
            diameter = float((X.unsqueeze(0) - X.unsqueeze(1)).norm(dim=2).max())
            for known in ((x,), (x, rho), (x, rho, diameter), (x, None, diameter)):
                assert spectral(covariance) <= bounds.token_covariance_bound(*known) + 1e-14
                assert map_norm(third, 4) <= bounds.token_cumulant_bound(*known) + 1e-14

    def test_attained(self) -> None:
        """Two opposite tokens, of equal weight and of the weights (1 +- 1/sqrt(3)) / 2."""
        X = torch.tensor([[0.6, 0.8], [-0.6, -0.8]], dtype=F64)
        for known in ((math.sqrt(2),), (9.0, 1.0), (9.0, 9.0, 2.0)):
            assert spectral(X.mT @ X / 2) == pytest.approx(bounds.token_covariance_bound(*known), rel=1e-14)
            p = torch.tensor([1 + 1 / math.sqrt(3), 1 - 1 / math.sqrt(3)], dtype=F64) / 2
            centred = X - p @ X
            third = torch.einsum("j,ja,jb,jc->abc", p, centred, centred, centred)
            assert map_norm(third) == pytest.approx(bounds.token_cumulant_bound(*known), rel=1e-12)


@pytest.mark.parametrize("kind", bounds.STEEPNESS)
def test_steepness_is_attained_and_not_exceeded(kind: str) -> None:
    z = torch.linspace(-9, 9, 360_001, dtype=F64).requires_grad_()
    value = ACTIVATIONS[kind](z)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    suprema = bounds.STEEPNESS[kind]
    pairs = [(slope, suprema.slope), ((value / z).nan_to_num(), suprema.chord)]
    if slope.requires_grad and suprema.second:
        pairs += [(torch.autograd.grad(slope.sum(), z)[0], suprema.second)]
    assert len(pairs) == 2 + (kind in SMOOTH)
    for seen, bound in pairs:
        assert 1 - 1e-3 < float(seen.detach().abs().max()) / bound <= 1 + 1e-12
