"""Estimates from products: unbiased, inside their intervals as often as these say, exact where products span the matrix."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_reference import draw, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import estimators
from hessiankit.curvature.estimators import ScalarEstimates
from hessiankit.curvature.structures import StructuredOperator, dense_block

SEEDS = 200


def block() -> tuple[nn.Module, Tensor, Tensor]:
    return randomised(hk.TransformerBlock(5, 8, n_heads=1)), draw(2, 4, 5), draw(2, 4, 5, seed=2)


def true_of(matrix: Tensor) -> dict[str, Tensor]:
    return {"trace": matrix.trace(), "frobenius_squared": matrix.square().sum(), "diagonal": matrix.diagonal()}


@pytest.fixture(scope="module")
def found() -> tuple[Tensor, list[ScalarEstimates]]:
    """The exact Hessian by autograd, and estimates with many seeds."""
    module, x, t = block()
    matrix = reverse_over_reverse(module, x, t, mse)
    operator = hk.hessian_operator(module, x, t)
    return matrix, [hk.scalar_estimates(operator, products=40, seed=seed) for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def one() -> ScalarEstimates:
    return hk.scalar_estimates(hk.hessian_operator(*block()), products=40)


@pytest.mark.slow
def test_intervals_hold_the_truth_at_about_their_level(found: tuple[Tensor, list[ScalarEstimates]]) -> None:
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
    sketch = estimators.Sketch(H.matmul, signs, H @ signs)
    trace, squares, diagonal = sketch.trace().values, sketch.squares().values, sketch.diagonal()
    assert (sketch.block(slice(3, 9)).values - diagonal[3:9].sum(0)).abs().max() <= 1e-10 * diagonal.abs().max()
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


SPECTRA = {
    "flat": torch.linspace(1, 2, 300, dtype=torch.float64),
    "of either sign": torch.ones(300, dtype=torch.float64) * (-1.0) ** torch.arange(300),
    **{f"j^-{power}": torch.arange(1, 301, dtype=torch.float64) ** -power for power in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)},
}


@pytest.mark.parametrize("name", SPECTRA)
def test_intervals_are_no_wider_than_those_of_the_mean_over_as_many_signs(name: str) -> None:
    """Girard's and Hutchinson's estimator of the same draws, in a random basis, with Student's interval."""
    Q = torch.linalg.qr(draw(300, 300))[0]
    A = (Q * SPECTRA[name]) @ Q.T
    operator = StructuredOperator(300, [dense_block(torch.arange(300), A)], torch.float64, torch.device("cpu"))
    widths = []
    for seed in range(10):
        found = hk.scalar_estimates(operator, products=40, seed=seed)
        assert found.products == 40
        signs = torch.randint(2, (40, 300), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        values = (signs * (signs @ A)).sum(1)
        plain = 2.0226909 * float(values.std()) / 40**0.5  # Student, 39
        if name in ("flat", "of either sign", "j^-0.25"):
            assert found.trace.value == pytest.approx(float(values.mean()), rel=1e-10)
            assert found.diagonal.tolist() == pytest.approx((signs * (signs @ A)).mean(0).tolist(), abs=1e-10)
            assert found.frobenius_squared.value == pytest.approx(float((signs @ A).square().sum(1).mean()), rel=1e-10)
        widths.append(found.trace.half_width / plain)
    assert max(widths) <= 1 + 1e-6
    assert name not in ("j^-1.5", "j^-2.0") or max(widths) < 0.2


@pytest.mark.parametrize("k", [2, 3])
def test_the_variance_of_a_mean_is_unbiased_over_all_draws(k: int) -> None:
    """Each vector one of four, with mean square I, so that every draw can be listed: k frames in general position, 4^k draws."""
    A = draw(4, 4)
    H, frames = A + A.T, [2 * torch.linalg.qr(draw(4, 4, seed=seed))[0] for seed in range(k)]
    means, variances = [], []
    for choice in itertools.product(range(4), repeat=k):
        omega = torch.stack([frame[:, column] for frame, column in zip(frames, choice, strict=True)], 1)
        sample = estimators.Sketch(H.matmul, omega, H @ omega).block(slice(0, 2))
        means.append(sample.mean)
        variances.append(float(sample.values.var()) / k + sample.covariance)
    assert statistics.mean(means) == pytest.approx(float(H.diagonal()[:2].sum()), rel=1e-10)
    assert statistics.mean(variances) == pytest.approx(statistics.pvariance(means), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_trace_of_a_multiple_of_the_identity_is_inside_its_rounding(dtype: torch.dtype) -> None:
    """Every value is 3 P but for rounding, so nothing but the allowance for that covers."""
    layer = nn.Linear(500, 1, bias=False, dtype=dtype)
    operator = hk.hessian_operator(
        layer, (750**0.5 * torch.eye(500, dtype=torch.float64)).to(dtype), torch.zeros(500, 1, dtype=dtype)
    )
    for seed in range(20):
        trace = hk.scalar_estimates(operator, products=20, seed=seed).trace
        assert abs(trace.value - 1500) <= trace.half_width <= 1e4 * torch.finfo(dtype).eps * 1500


def test_small_matrices_are_taken_whole() -> None:
    """Three sign vectors of seven entries are dependent once in twenty draws, which would show nothing of the rest."""
    layer, x = nn.Linear(7, 1, bias=False, dtype=torch.float64), draw(9, 7)
    operator = hk.hessian_operator(layer, x, draw(9, 1, seed=2))
    trace = 2 / 9 * float(x.square().sum())
    for seed in range(60):
        found = hk.scalar_estimates(operator, products=6, seed=seed)
        assert found.trace.value == pytest.approx(trace, rel=1e-12)
        assert found.products == 7


def test_a_result_says_how_often_its_intervals_hold(one: ScalarEstimates) -> None:
    """The lowest shares of the page's rows of these estimates, over all products and from 20 products on."""
    lines = (Path(__file__).parents[2] / "docs" / "intervals.md").read_text(encoding="utf-8").splitlines()
    names = ("trace", "sum of squares", "trace of a parameter", "entry of the diagonal")
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    lowest = {(row[0], int(row[1].split()[0])): int(row[2].rstrip("%")) for row in cells if row[1].endswith(" products")}
    assert {what for what, _ in lowest} == set(names)
    few = hk.scalar_estimates(hk.hessian_operator(*block()), products=10)
    assert f"held {min(lowest.values())} to 100 % of the time" in repr(few)
    assert f"held {min(value for (_, n), value in lowest.items() if n >= 20)} to 100 % of the time" in repr(one)


@pytest.mark.slow
def test_estimates_are_unbiased(found: tuple[Tensor, list[ScalarEstimates]]) -> None:
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


def test_prints_and_becomes_json(one: ScalarEstimates) -> None:
    assert f"trace {one.trace}" in repr(one)
    assert "ESTIMATES from 40 products, 95 % intervals" in one.table()
    assert json.loads(json.dumps(one.to_dict()))["trace"] == {"value": one.trace.value, "half_width": one.trace.half_width}
    operator, before = hk.hessian_operator(*block()), torch.get_rng_state()
    half = hk.scalar_estimates(operator, products=40, level=0.5)
    assert half.trace.value == one.trace.value
    assert half.trace.half_width == pytest.approx(one.trace.half_width * 0.68762 / 2.09302, rel=1e-4)  # Student, 19
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_used() -> None:
    operator = hk.hessian_operator(*block())
    for options, told in (({"products": 5}, "products=5 leave"), ({"level": 1.0}, "level=1.0 is no share")):
        with pytest.raises(hk.InputError, match=f"scalar_estimates: {told}"):
            hk.scalar_estimates(operator, **options)
    with pytest.raises(hk.InputError, match=r"operator is a Linear; pass what hessian_operator"):
        hk.scalar_estimates(nn.Linear(2, 2))
