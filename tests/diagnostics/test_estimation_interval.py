"""Standard errors and intervals: known by hand, invariant, and covering where the replicates are what they are taken for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from scipy import stats
from sharpness_cases import by_number, drawn_by

from hessiankit.diagnostics.sharpness import replicates, sharpness
from hessiankit.diagnostics.sharpness.estimate import as_weights, estimate, ratio
from hessiankit.diagnostics.sharpness.squares import histogram
from hessiankit.partition import Part

ONE = torch.ones(1).double()


def chi_square(*shape, freedom, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, freedom, generator=generator, dtype=torch.float64).square().sum(-1)


def interval(x, weights=ONE, confidence=0.95):
    return estimate(x, weights, entries=1, confidence=confidence)


def test_micro_batches_add_their_variances():
    x = torch.tensor([[1.0, 3.0], [10.0, 14.0]]).double()
    found = interval(x, as_weights(torch.tensor([1, 3])))
    assert found.value == 0.25 * 2 + 0.75 * 12
    assert found.standard_error == pytest.approx(math.sqrt(0.0625 * 2 / 2 + 0.5625 * 8 / 2))
    assert found.data_standard_error == pytest.approx(math.sqrt(2 * ((0.25 * 7.5) ** 2 + (0.75 * 2.5) ** 2)))


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
    with drawn_by(by_number(places)):
        found = replicates(layer, x, labels, draws=27, micro_batch=1, parts=[part])
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


def test_coverage_of_chi_square_replicates():
    """800 trials: two standard errors are 1.5%; replicates of unequal micro-batches, and quotients of what has a part in common."""
    scales, weights = torch.linspace(0.5, 2.0, 4, dtype=torch.float64).unsqueeze(1), as_weights(torch.arange(1, 5))
    wanted = float(weights @ scales[:, 0]) * 5
    means = [interval(x, weights) for x in scales * chi_square(800, 4, 8, freedom=5)]
    shared, own = chi_square(800, 1, 8, freedom=6), chi_square(800, 1, 8, freedom=6, seed=1)
    pairs = zip(2 * (shared + own), shared + own.flip(0), strict=True)
    quotients = [ratio(a, b, ONE, entries=1, confidence=0.95) for a, b in pairs]
    for found, truth in ((means, wanted), (quotients, 2.0)):
        assert 0.92 <= sum(one.low <= truth <= one.high for one in found) / 800 <= 0.98


def test_quotient_with_zero():
    zeros, ones = torch.zeros(1, 4).double(), torch.ones(1, 4).double()
    assert ratio(ones, zeros, ONE, entries=1, confidence=0.95).value == math.inf
    assert math.isnan(ratio(zeros, zeros, ONE, entries=1, confidence=0.95).value)
    assert ratio(zeros, ones, ONE, entries=1, confidence=0.95).value == 0.0


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
    assert math.isnan(empty.quantile(0.5))
