"""Standard errors and intervals: known by hand, invariant, and covering where the replicates are what they are taken for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from scipy import stats

from hessiankit.diagnostics.sharpness import replicates, sharpness
from hessiankit.diagnostics.sharpness.estimate import SharpnessEstimate, as_weights, estimate, ratio
from hessiankit.diagnostics.sharpness.squares import histogram
from hessiankit.partition import Part

ONE = torch.ones(1).double()


def chi_square(*shape, freedom, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, freedom, generator=generator, dtype=torch.float64).square().sum(-1)


def interval(x, weights=ONE, confidence=0.95):
    return estimate(x, weights, entries=1, confidence=confidence)


def test_value_and_standard_error():
    found = interval(torch.tensor([[1.0, 2.0, 6.0]]).double())
    assert found.value == 3.0
    assert found.standard_error == pytest.approx(math.sqrt(7 / 3))
    assert found.data_standard_error is None


def test_micro_batches_add_their_variances():
    x = torch.tensor([[1.0, 3.0], [10.0, 14.0]]).double()
    found = interval(x, as_weights(torch.tensor([1, 3])))
    assert found.value == 0.25 * 2 + 0.75 * 12
    assert found.standard_error == pytest.approx(math.sqrt(0.0625 * 2 / 2 + 0.5625 * 8 / 2))
    assert found.data_standard_error == pytest.approx(math.sqrt(2 * ((0.25 * 7.5) ** 2 + (0.75 * 2.5) ** 2)))


def test_differences_between_micro_batches_are_no_noise():
    near = interval(torch.tensor([[1.0, 1.25], [1.0, 1.25]]).double(), ONE.repeat(2) / 2)
    far = interval(torch.tensor([[1.0, 1.25], [91.0, 91.25]]).double(), ONE.repeat(2) / 2)
    assert far.standard_error == pytest.approx(near.standard_error)
    assert far.data_standard_error > 40


def test_one_draw_has_no_error_and_no_noise_has_none():
    single = interval(torch.tensor([[2.0]]).double())
    assert math.isnan(single.standard_error)
    assert math.isnan(single.low)
    assert single.to_dict()["low"] is None
    same = interval(torch.tensor([[2.0, 2.0]]).double())
    assert (same.standard_error, same.low, same.high) == (0.0, 2.0, 2.0)
    exact = estimate(torch.tensor([[2.0]]).double(), ONE, entries=1, confidence=0.95, exact=True)
    assert (exact.standard_error, exact.low, exact.high) == (0.0, 2.0, 2.0)
    assert str(exact) == "2"


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_scale(factor):
    x = chi_square(3, 4, freedom=5)
    plain, scaled = interval(x, ONE.repeat(3) / 3), interval(factor * x, ONE.repeat(3) / 3)
    for name in ("value", "standard_error", "low", "high", "data_standard_error"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name), rel=1e-9, abs=0)


def test_interval_lies_around_the_value_and_grows_with_confidence():
    x = chi_square(2, 8, freedom=4)
    narrow, wide = (interval(x, ONE.repeat(2) / 2, confidence) for confidence in (0.5, 0.99))
    assert 0 < wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert wide.high - wide.value > wide.value - wide.low  # skewed upwards


def test_interval_by_its_formula():
    """The micro-batch's five numbers, with Student's quantiles from another place."""
    x = [9.0, 11.0, 12.0, 8.0, 15.0]
    mean, V = statistics.mean(x), statistics.variance(x) / 5
    Y = mean / 2  # sqrt(5 V) is less than half the mean
    q = V / (Y**2 - V)
    tau, t = math.sqrt(math.log1p(q)), stats.t.ppf(0.95, 1 / (1 / 4 + q))
    found = interval(torch.tensor([x]).double(), confidence=0.9)
    for end, sign in ((found.low, -1), (found.high, 1)):
        assert end == pytest.approx(mean - Y + Y * math.exp(tau**2 / 2 + sign * t * tau), rel=1e-9)


def test_quotient_by_its_formula():
    a, b = [9.0, 11.0, 12.0, 8.0], [3.0, 2.0, 4.0, 3.0]
    A, B = statistics.mean(a), statistics.mean(b)
    V = statistics.variance([i / A - j / B for i, j in zip(a, b, strict=True)]) / 4
    q, r = (v / (1 - v) for v in (statistics.variance(a) / 4 / A**2, statistics.variance(b) / 4 / B**2))
    half = stats.t.ppf(0.975, 1 / (1 / 3 + 3 * max(q, r))) * math.sqrt(V)
    centre = math.log(A / B) + (math.log1p(q) - math.log1p(r)) / 2
    found = ratio(torch.tensor([a]).double(), torch.tensor([b]).double(), ONE, entries=1, confidence=0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(centre - half), math.exp(centre + half)), rel=1e-9)
    assert found.standard_error == pytest.approx(A / B * math.sqrt(V))


def all_label_vectors():
    """Replicates of every label vector of two sequences, a micro-batch each of 2 and 1 labels, and their probabilities."""
    layer = torch.nn.Linear(2, 3, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([[0, 0], [0, -100]])
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))  # of positions (0, 0), (0, 1), (1, 0)
    places = torch.cat([every, every[:, :1]], 1).reshape(27, 2, 2)
    part = Part("weight", "Head", "head", None, "the only one", 6)
    found = replicates(
        layer, x, labels, draws=27, micro_batch=1, parts=[part], sampler=lambda logits, numbers, draws: places[:, list(numbers)]
    )
    p = torch.softmax(layer(x).detach(), -1).flatten(0, 1)
    exact = sharpness(layer, x, labels, parts=[part], exact=True).types["Head"].value
    return found.values[:, :, 0] / 6, as_weights(found.terms), p[torch.arange(3), every].prod(1), exact


def test_value_and_squared_error_are_unbiased_over_all_pairs_of_draws():
    """Two draws of three labels of three classes: 729 pairs with their probabilities, against the closed form and the variance."""
    x, weights, p, exact = all_label_vectors()
    assert float(p.sum()) == pytest.approx(1.0, rel=1e-12)
    mean, square, claimed = 0.0, 0.0, 0.0
    for a, b in itertools.product(range(27), repeat=2):
        found, share = interval(x[:, [a, b]], weights), float(p[a] * p[b])
        mean, square = mean + share * found.value, square + share * found.value**2
        claimed += share * found.standard_error**2
    assert mean == pytest.approx(exact, rel=1e-10)
    assert claimed == pytest.approx(square - mean**2, rel=1e-9)


def test_the_squared_error_over_micro_batches_is_unbiased_over_all_samples_of_two():
    population = [1.0, 2.0, 6.0, 4.5]
    samples = [torch.tensor([[a, a], [b, b]]).double() for a, b in itertools.product(population, repeat=2)]
    squares = [interval(x, ONE.repeat(2) / 2).data_standard_error ** 2 for x in samples]
    assert statistics.mean(squares) == pytest.approx(statistics.pvariance(population) / 2, rel=1e-12)


def test_degrees_of_freedom_of_two_micro_batches_by_their_formula():
    """Equal sample variances s^2: V = s^2 / (2 D), and (D + 1) 2 - 2 degrees of freedom, of which the skewness takes 1 / q."""
    x = torch.tensor([[9.0, 11.0, 10.0], [29.0, 31.0, 30.0]]).double()  # s = 1, D = 3, mean 20
    V, Y = 1 / 6, 20 / 2
    q = V / (Y**2 - V)
    tau, t = math.sqrt(math.log1p(q)), stats.t.ppf(0.975, 1 / (1 / 6 + q))
    found = interval(x, ONE.repeat(2) / 2)
    for end, sign in ((found.low, -1), (found.high, 1)):
        assert end == pytest.approx(20 - Y + Y * math.exp(tau**2 / 2 + sign * t * tau), rel=1e-9)


def test_many_draws_give_the_normal_interval():
    x = 100 + torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = interval(x)
    assert found.low == pytest.approx(found.value - 1.96 * found.standard_error, abs=2e-4)
    assert found.high == pytest.approx(found.value + 1.96 * found.standard_error, abs=2e-4)


@pytest.mark.parametrize(("freedom", "micro_batches", "draws"), [(4, 1, 8), (20, 1, 4), (5, 4, 8)])
def test_coverage_of_chi_square_replicates(freedom, micro_batches, draws):
    """800 trials: two standard errors are 1.5%; replicates of unequal micro-batches."""
    scales = torch.linspace(0.5, 2.0, micro_batches, dtype=torch.float64).unsqueeze(1)
    weights = as_weights(torch.arange(1, micro_batches + 1))
    wanted = float(weights @ scales[:, 0]) * freedom
    trials = scales * chi_square(800, micro_batches, draws, freedom=freedom)
    inside = [found.low <= wanted <= found.high for x in trials for found in [interval(x, weights)]]
    assert 0.92 <= sum(inside) / len(inside) <= 0.985


def test_coverage_of_a_quotient():
    common, own = chi_square(800, 1, 8, freedom=6), chi_square(800, 1, 8, freedom=6, seed=1)
    inside = []
    for a, b in zip(common + own, common + own.flip(0), strict=True):
        found = ratio(2 * a, b, ONE, entries=1, confidence=0.95)
        inside.append(found.low <= 2.0 <= found.high)
    assert 0.92 <= sum(inside) / len(inside) <= 0.98


def test_quotient_uses_that_the_draws_are_the_same():
    x = chi_square(1, 8, freedom=5)
    noise = 0.01 * chi_square(1, 8, freedom=5, seed=1)
    together = ratio(x + noise, x, ONE, entries=1, confidence=0.95)
    assert together.standard_error < 0.05 * interval(x).standard_error / interval(x).value
    turned, value = ratio(x, x + noise, ONE, entries=1, confidence=0.95), together.value
    assert (turned.value, turned.low, turned.high) == pytest.approx((1 / value, 1 / together.high, 1 / together.low))


def test_quotient_with_zero():
    zeros, ones = torch.zeros(1, 4).double(), torch.ones(1, 4).double()
    assert ratio(ones, zeros, ONE, entries=1, confidence=0.95).value == math.inf
    assert math.isnan(ratio(zeros, zeros, ONE, entries=1, confidence=0.95).value)
    assert ratio(zeros, ones, ONE, entries=1, confidence=0.95).value == 0.0


def test_estimate_prints_what_it_is():
    assert str(SharpnessEstimate(0.01234, 0.0021, 0.0093, 0.0188, 5, 0.95)) == "0.0123 +- 0.002 (95%: 0.0093 to 0.0188)"


def test_histogram():
    x = torch.tensor([0.0, 0.0, 1e-40, 1.0, 1.7, 1.9, 10.0, -3.0], dtype=torch.float64)
    found = histogram([x[:4], x[4:]])
    assert (found.zeros, found.negative, found.entries, sum(found.counts)) == (2, 1, 8, 5)
    assert found.edges[0] == -40.0
    assert len(found.edges) == len(found.counts) + 1
    assert found.counts[0] == 1
    assert found.counts[-5:] == (2, 1, 0, 0, 1)  # [1, 1.78), [1.78, 3.16), ...
    assert found.quantile(1.0) == pytest.approx(10**1.25)
    empty = histogram([torch.zeros(3)])
    assert (empty.counts, empty.zeros) == ((), 3)
    assert math.isnan(empty.median)
