"""Estimates from products: unbiased, inside their intervals as often as these say, exact where products span the matrix."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from curvature_reference import draw, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import estimators

SEEDS = 200


def block() -> tuple[nn.Module, Tensor, Tensor]:
    return randomised(hk.TransformerBlock(5, 8, n_heads=1)), draw(2, 4, 5), draw(2, 4, 5, seed=2)


def true_of(matrix: Tensor) -> dict[str, Tensor]:
    return {"trace": matrix.trace(), "frobenius_squared": matrix.square().sum(), "diagonal": matrix.diagonal()}


@pytest.fixture(scope="module")
def found() -> tuple[Tensor, list[hk.ScalarEstimates]]:
    """The exact Hessian by autograd, and estimates with many seeds."""
    module, x, t = block()
    matrix = reverse_over_reverse(module, x, t, mse)
    operator = hk.hessian_operator(module, x, t)
    return matrix, [hk.scalar_estimates(operator, products=40, seed=seed) for seed in range(SEEDS)]


def test_intervals_hold_the_truth_at_about_their_level(found: tuple[Tensor, list[hk.ScalarEstimates]]) -> None:
    """At 95 %: from 91 %, three standard deviations of a share of 200 below, to less than always."""
    matrix, drawn = found
    assert float(torch.linalg.eigvalsh(matrix)[0]) < -0.01 * float(torch.linalg.eigvalsh(matrix)[-1])  # indefinite
    true = true_of(matrix)
    for name in ("trace", "frobenius_squared"):
        estimates = [getattr(e, name) for e in drawn]
        inside = sum(abs(e.value - float(true[name])) <= e.half_width for e in estimates) / SEEDS
        assert 0.91 <= inside < 1, name
        near = sum(abs(e.value - float(true[name])) <= e.half_width / 3 for e in estimates) / SEEDS
        assert near < 0.8, name  # intervals three times as narrow would not do
    inside = torch.stack([(e.diagonal - true["diagonal"]).abs() <= e.half_widths for e in drawn]).double().mean()
    assert 0.91 <= inside < 1


def test_leave_one_out_values_are_those_of_bases_made_without_one_vector() -> None:
    """From the definition: a basis of H times the other vectors, and what it leaves of H, by the vector left out."""
    H, k = draw(12, 12), 4
    H = H + H.T
    signs = draw(12, k, seed=3).sign()
    trace, squares, diagonal = estimators.leave_one_out(H.matmul, signs, 2e-16)
    for i in range(k):
        Q, _ = torch.linalg.qr(H @ signs[:, [j for j in range(k) if j != i]])
        omega = signs[:, i]
        P = Q @ Q.T
        rest = omega - P @ omega
        scale = (12 - (k - 1)) / rest.square().sum()  # the squared length that it has on average
        assert trace[i] == pytest.approx(float((Q.T @ H @ Q).trace() + scale * rest @ H @ rest), rel=1e-10)
        assert squares[i] == pytest.approx(float((H @ Q).square().sum() + scale * (H @ rest).square().sum()), rel=1e-10)
        expected = (P @ H).diagonal() + omega * (H @ omega - P @ H @ omega)
        assert (diagonal[:, i] - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_estimates_are_unbiased(found: tuple[Tensor, list[hk.ScalarEstimates]]) -> None:
    """The mean over seeds, within four of its standard errors; traces add up to the diagonal's."""
    matrix, drawn = found
    true = true_of(matrix)
    for name in ("trace", "frobenius_squared"):
        values = torch.tensor([getattr(e, name).value for e in drawn], dtype=torch.float64)
        assert abs(values.mean() - true[name]) <= 4 * values.std() / SEEDS**0.5
    D = torch.stack([e.diagonal for e in drawn])
    near = (D.mean(0) - true["diagonal"]).abs() <= 3 * D.std(0) / SEEDS**0.5 + 1e-14
    assert near.double().mean() > 0.98
    one = drawn[0]
    assert sum(e.value for e in one.traces.values()) == pytest.approx(float(one.diagonal.sum()), rel=1e-12)


def test_intervals_of_another_level(found: tuple[Tensor, list[hk.ScalarEstimates]]) -> None:
    module, x, t = block()
    half = hk.scalar_estimates(hk.hessian_operator(module, x, t), products=40, level=0.5)
    assert half.trace.value == found[1][0].trace.value
    assert half.trace.half_width == pytest.approx(found[1][0].trace.half_width * 0.68762 / 2.09302, rel=1e-4)  # Student, 19


CASES: dict[str, Any] = {
    "all columns": (hk.hessian_operator, {"products": 10_000}),
    "more products than the rank": (hk.hessian_operator, {"products": 40}),
    "of a Gauss-Newton part": (lambda *a: hk.hessian_operator(*a, kind="ggn"), {"products": 40}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_where_products_span_the_matrix(name: str, dtype: torch.dtype) -> None:
    """A linear layer on three rows: rank 3 x 3 of 60."""
    module, x, t = randomised(nn.Linear(20, 3, bias=False)).to(dtype), draw(3, 20).to(dtype), draw(3, 3).to(dtype)
    matrix = hk.hessian(module.double(), x.double(), t.double()).matrix
    make, options = CASES[name]
    found = hk.scalar_estimates(make(module.to(dtype), x, t), **options)
    true = true_of(matrix)
    eps = torch.finfo(dtype).eps
    for key in ("trace", "frobenius_squared"):
        estimate = getattr(found, key)
        assert abs(estimate.value - float(true[key])) <= estimate.half_width <= 1000 * eps * float(true[key])
    assert ((found.diagonal - true["diagonal"]).abs() <= found.half_widths).all()
    assert ("exact up to rounding" in found.table()) == (name == "all columns")


def test_prints_and_becomes_json(found: tuple[Tensor, list[hk.ScalarEstimates]]) -> None:
    one = found[1][0]
    assert f"trace {one.trace}" in repr(one)
    assert "ESTIMATES from 40 products, 95 % intervals" in one.table()
    assert json.loads(json.dumps(one.to_dict()))["trace"] == {"value": one.trace.value, "half_width": one.trace.half_width}


def test_what_cannot_be_used() -> None:
    operator = hk.hessian_operator(*block())
    for options, told in (({"products": 5}, "products=5 leave"), ({"level": 1.0}, "level=1.0 is no share")):
        with pytest.raises(hk.InputError, match=f"scalar_estimates: {told}"):
            hk.scalar_estimates(operator, **options)
    with pytest.raises(hk.InputError, match=r"operator is a Linear; pass what hessian_operator"):
        hk.scalar_estimates(nn.Linear(2, 2))


def test_the_random_numbers_of_the_user_are_left_alone() -> None:
    operator, before = hk.hessian_operator(*block()), torch.get_rng_state()
    hk.scalar_estimates(operator, products=10)
    assert torch.equal(torch.get_rng_state(), before)
    assert estimators.scalar_estimates is hk.scalar_estimates
