"""Bounds of Theorem A.3: never violated by automatic differentiation, attained where the proofs say, invariant in scale."""

from __future__ import annotations

import math

import pytest
import torch

from papers.hybridnorm.gradient_bounds import largest_gain, pre_norm_gradient_bounds, qkv_norm_gradient_bounds

NAMES = ("W_Q", "W_K", "W_V", "W_O")


def draw(seed: int, s: int, d: int, d_k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((s, d), (d, d_k), (d, d_k), (d, d_k), (d_k, d))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def rms(X):
    return X / X.square().mean(-1, keepdim=True).sqrt()


def pre(X, Q, K, V, out):
    N = rms(X)
    return (N @ Q @ (N @ K).T / math.sqrt(Q.shape[1])).softmax(-1) @ N @ V @ out


def qkv(X, Q, K, V, out):
    return (rms(X @ Q) @ rms(X @ K).T / math.sqrt(Q.shape[1])).softmax(-1) @ rms(X @ V) @ out


def norms(head, X, *weights):
    jacobians = torch.autograd.functional.jacobian(lambda *w: head(X, *w), tuple(weights))
    return [float(J.norm()) for J in jacobians]


def bounds(head, X, *weights):
    return pre_norm_gradient_bounds(len(X), *weights) if head is pre else qkv_norm_gradient_bounds(X, *weights)


@pytest.mark.parametrize("head", [pre, qkv])
@pytest.mark.parametrize("seed", range(12))
def test_never_violated(head, seed):
    point = draw(seed, 1 + seed % 4, 2 + seed % 3, 2 + seed % 2)
    assert all(norm <= bound * (1 + 1e-12) for norm, bound in zip(norms(head, *point), bounds(head, *point), strict=True))


@pytest.mark.parametrize("head", [pre, qkv])
def test_attained_by_two_opposite_tokens(head):
    """x and -x, attention uniform because queries and keys are at right angles, W_O along the value."""
    x = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    X = torch.stack([x, -x, x, -x])
    Q, K, V, out = (torch.zeros(shape, dtype=torch.float64) for shape in ((3, 2), (3, 2), (3, 2), (2, 3)))
    Q[0, 0], K[0, 1], V[0, 0], out[0, 2] = 1, 3, 0.5, 2
    found = norms(head, X, Q, K, V, out)
    for k in (0, 1):
        assert found[k] == pytest.approx(bounds(head, X, Q, K, V, out)[k], rel=1e-12)


@pytest.mark.parametrize("head", [pre, qkv])
def test_attained_by_equal_tokens(head):
    X = torch.ones(3, 2, dtype=torch.float64)
    V = torch.ones(2, 2, dtype=torch.float64)
    out = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)  # its columns are at right angles to the value
    found = norms(head, X, V, V, V, out)
    for k in (2, 3):
        assert found[k] == pytest.approx(bounds(head, X, V, V, V, out)[k], rel=1e-12)


def test_the_bounds_of_qkv_norm_do_not_see_the_scale_of_the_tokens():
    X, *weights = draw(3, 4, 3, 2)
    assert qkv_norm_gradient_bounds(1000 * X, *weights) == pytest.approx(qkv_norm_gradient_bounds(X, *weights), rel=1e-12)


def test_a_zero_row_is_refused():
    with pytest.raises(ValueError, match="row 1 of X W is zero"):
        largest_gain(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0], [0.0]]))
