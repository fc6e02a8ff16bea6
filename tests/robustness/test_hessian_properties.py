"""What holds for the Hessian at every point, also at hard ones: inputs, weights and targets from 1e-8 to 1e8, saturated softmax,
rows that are nearly constant, any eps. ``HYPOTHESIS_PROFILE=search`` tries other examples than the fixed ones.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from curvature_reference import mse, reverse_over_reverse
from hessian_points import ALWAYS_SMOOTH, LOSS, SCALES, TOLERANCE, Point, assert_exact, blocks, chains, exact
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hessiankit as hk

SEEDS = st.integers(0, 2**16)
ROUNDING = 2.0**-52
"""Of the whole matrix's largest entry: attention makes blocks of terms that cancel between operations, and no float64 keeps them."""


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Of equal matrices, to a tolerance of the largest entry."""
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(blocks(), SEEDS)
def test_a_block_at_any_point_is_exact_and_symmetric(point, also):
    found = exact(point)
    assert torch.equal(found.matrix, found.matrix.T)
    assert_exact(found, point, also=also, floor=ROUNDING)


@settings(max_examples=2 * settings.default.max_examples)
@given(chains(), SEEDS)
def test_a_chain_at_any_point_is_exact_and_symmetric(point, also):
    found = exact(point)
    assert torch.equal(found.matrix, found.matrix.T)
    assert_exact(found, point, also=also)


@given(st.one_of(blocks(), chains()))
def test_gauss_newton_and_functional_part_add_up_and_the_first_is_positive(point):
    found = exact(point)
    outer, functional = found.outer(), found.functional()
    assert_close(outer + functional, found.matrix, 1e-14)
    assert float(torch.linalg.eigvalsh(outer)[0]) >= -1e-13 * float(outer.abs().max())


@given(st.one_of(blocks(), chains()), SEEDS)
def test_products_and_the_diagonal_are_those_of_the_matrix(point, seed):
    found = exact(point)
    request = {"loss": point.loss}
    operator = hk.hessian_operator(point.module, point.inputs, point.target, **request)
    vectors = normal(seed, len(found.matrix), 3)
    scale = float(found.matrix.abs().max())
    assert float((operator @ vectors - found.matrix @ vectors).abs().max()) <= TOLERANCE * scale * len(found.matrix) ** 0.5
    diagonal = hk.hessian_diagonal(point.module, point.inputs, point.target, **request)
    values = torch.cat([diagonal.values[name].reshape(-1) for name in found.names])
    assert float((values - found.matrix.diagonal()).abs().max()) <= TOLERANCE * scale


@pytest.mark.slow
@given(
    st.one_of(blocks(**ALWAYS_SMOOTH), chains(scales=st.just(1.0), weights=st.just(1.0))),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_lower_precision_is_as_far_off_as_its_rounding(point, dtype):
    """The same numbers in both: 100 roundings of the largest entry, and 10 times what moving every number by one rounding does."""
    rounded = point.target.to(dtype) if point.loss == "mse" else point.target
    low = Point(point.module.to(dtype), point.inputs.to(dtype), rounded, point.loss, point.made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the precision is low
        found = exact(low).matrix
    assert found.dtype == torch.float32  # of half precision too
    assert torch.equal(found, found.T)
    target = low.target.double() if point.loss == "mse" else low.target
    high = Point(point.module.double(), low.inputs.double(), target, point.loss, point.made)
    expected, eps = high.reference, torch.finfo(dtype).eps
    conditioned = max(float((moved(high, eps, seed) - expected).abs().max()) for seed in (1, 2, 3))
    assert float((found.double() - expected).abs().max()) <= 100 * eps * float(expected.abs().max()) + 10 * conditioned


def moved(point: Point, size: float, seed: int) -> Tensor:
    """The reference where every number is changed by up to ``size`` of it."""
    generator = torch.Generator().manual_seed(seed)

    def shaken(x: Tensor) -> Tensor:
        return x * (1 + size * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    kept = [p.detach().clone() for p in point.module.parameters()]
    with torch.no_grad():
        for p in point.module.parameters():
            p.copy_(shaken(p))
    try:
        return reverse_over_reverse(point.module, shaken(point.inputs), point.target, LOSS[point.loss])
    finally:
        with torch.no_grad():
            for p, old in zip(point.module.parameters(), kept, strict=True):
                p.copy_(old)


# Laws of scale and of shift ---------------------------------------------------------------------------------------------


@given(SCALES, SEEDS)
def test_weights_before_a_norm_without_eps_have_curvature_of_degree_minus_two(scale, seed):
    """f(c W) = f(W), so that H(c W) = H(W) / c^2, and by Euler H(W) W = - grad f(W)."""
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4, eps=0.0, elementwise_affine=False)).double()
    x, target, W = normal(seed, 3, 3), normal(seed + 1, 3, 4), module[0].weight
    one = hk.hessian(module, x, target).matrix
    (slope,) = torch.autograd.grad(mse(module(x), target), W)
    assert float((one @ W.detach().reshape(-1) + slope.reshape(-1)).abs().max()) <= TOLERANCE * float(one.abs().max())
    with torch.no_grad():
        W.mul_(scale)
    assert_close(hk.hessian(module, x, target).matrix * scale**2, one)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_constant_row_is_refused_without_eps_alone(kind):
    """By name where the derivative does not exist; with the smallest eps it does."""
    row = torch.zeros(2, 3, dtype=torch.float64)
    for eps in (0.0, 1e-30, 1e-5):
        module = nn.Sequential(kind(3, eps=eps), nn.Linear(3, 2)).double()
        if eps:
            assert torch.isfinite(hk.hessian(module, row, torch.ones(2, 2, dtype=torch.float64)).matrix).all()
        else:
            with pytest.raises(hk.InputError, match=r"with eps = 0; the norm is not differentiable there"):
                hk.hessian(module, row, torch.ones(2, 2, dtype=torch.float64))
