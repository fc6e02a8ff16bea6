"""Standard errors and intervals, known by hand and covering; the forms that data may have, and those that they may not."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from scipy import stats
from sharpness_cases import tiny, tokens
from torch import nn

from hessiankit.support.errors import InputError
from hessiankit.training.depth import depth_diagnostics
from hessiankit.training.sharpness import sharpness
from hessiankit.training.sharpness.estimate import as_weights, estimate, ratio
from hessiankit.training.sharpness.sharpness_report import histogram

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


@pytest.mark.parametrize(
    ("x", "V", "freedom"),
    [([[9.0, 11.0, 12.0, 8.0, 15.0]], 7.5 / 5, 4), ([[9.0, 11.0, 10.0], [29.0, 31.0, 30.0]], 1 / 6, 6)],
    ids=["one micro-batch", "two"],
)
def test_interval_by_its_formula(x, V, freedom):
    """Student's quantiles from another place; (D + 1) 2 - 2 degrees of freedom of two micro-batches of D draws, less the skewness."""
    mean = statistics.mean(value for own in x for value in own)
    Y = mean / 2  # the draws spread by less than half the mean
    q = V / (Y**2 - V)
    tau, t = math.sqrt(math.log1p(q)), stats.t.ppf(0.95, 1 / (1 / freedom + q))
    found = interval(torch.tensor(x).double(), ONE.repeat(len(x)) / len(x), confidence=0.9)
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


X, Y = tokens(5, 3), tokens(5, 3, seed=2)


class Dictionary(nn.Module):
    """Called by keyword, and returns an object with logits, or a tuple."""

    def __init__(self, form="object"):
        super().__init__()
        self.model, self.form = tiny(), form

    def forward(self, input_ids, attention_mask=None, table=None):
        logits = self.model(input_ids) * (1.0 if table is None else table.sum() / 21)
        if self.form == "tuple":
            return logits, None
        return {"logits": logits} if self.form == "dict" else type("Output", (), {"logits": logits})()


def values(data, target=None, model=None, **options):
    report = sharpness(model or tiny(), data, target, draws=2, **options)
    return {kind: one.value for kind, one in report.types.items()}


def test_all_forms_give_the_same():
    wanted = values(X, Y, micro_batch=2)
    halves = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]
    for data in ((X, Y), [X, Y], halves, iter(halves), torch.utils.data.DataLoader(list(zip(X, Y, strict=True)), 2)):
        assert values(data, micro_batch=2) == pytest.approx(wanted, rel=1e-12)
    assert values((X,), Y, micro_batch=2) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("form", ["object", "tuple", "dict"])
def test_mappings_are_keyword_arguments_whose_labels_are_one_place_later(form):
    mask = torch.ones_like(X)
    model = Dictionary(form)
    later = torch.cat([X[:, 1:], torch.full((5, 1), -100)], 1)
    wanted = values({"input_ids": X, "attention_mask": mask}, later, model)
    batch = {"input_ids": X, "attention_mask": mask, "labels": X}
    assert values(batch, None, model) == pytest.approx(wanted, rel=1e-12)
    shared = {**batch, "table": torch.arange(7)}  # which every micro-batch gets whole
    assert values(shared, None, model, micro_batch=1) == pytest.approx(values(batch, None, model, micro_batch=1), rel=1e-12)
    unshifted = values({"input_ids": X, "attention_mask": mask}, X, model)
    assert values(batch, None, model, shift=False) == pytest.approx(unshifted, rel=1e-12)
    assert unshifted != pytest.approx(wanted, rel=1e-3)
    assert values(({"input_ids": X, "attention_mask": mask}, X), None, model, shift=True) == pytest.approx(wanted, rel=1e-12)


class Mixed(nn.Module):
    """Sums over tokens by a matrix (tokens, tokens) that all sequences share, or over sequences."""

    def __init__(self):
        super().__init__()
        self.model = tiny()

    def forward(self, tokens, mixing=None):
        logits = self.model(tokens)
        return logits - logits.mean(0) if mixing is None else mixing @ logits


def test_a_batch_is_cut_only_where_that_changes_nothing():
    x, y, shared = tokens(3, 3), tokens(3, 3, seed=2), torch.ones(3, 3, dtype=torch.float64).tril()
    for inputs in ((x, shared), x):
        for who, size in ((sharpness, 1), (sharpness, 2), (depth_diagnostics, 1)):
            with pytest.raises(InputError, match="two sequences and each of them alone give other outputs"):
                who(Mixed(), inputs, y, micro_batch=size)
        assert sharpness(Mixed(), inputs, y).types["FFN"].value > 0


@pytest.mark.parametrize(
    ("data", "target", "options", "message"),
    [
        (X, None, {}, "data is a tensor (5, 3) and target is missing; pass target="),
        (3, None, {}, "data is int; expected inputs and target="),
        ([(X, Y), X, X], None, {}, "batch 1 is a Tensor; expected a pair"),
        ({"input_ids": X}, None, {}, "the batch is a mapping without 'labels' (keys: 'input_ids'); add them"),
        (X, Y[:, :2], {}, "target has shape (5, 2), expected (5, 3): one label for each row of the logits (5, 3, 3)"),
        (X, Y.double(), {}, "target is torch.float64; cross entropy needs integer class labels"),
        (X, Y + 2, {}, "labels lie in [2, 4], expected 0 to 2 for 3 classes (or -100 to ignore a position)"),
        (X, Y[:4], {}, "the model's output has shape (5, 3, 3) for 4 sequences; expected those along axis 0"),
        (X, torch.full_like(Y, -100), {}, "every label is -100 (not counted); keep at least one"),
        (X, Y, {"micro_batch": 0}, "micro_batch=0; pass 1 or more sequences"),
        (X, Y, {"draws": 0}, "draws=0 draws no labels; pass 1 or more"),
        (X, Y, {"seed": -1}, "seed=-1; pass a whole number from 0"),
        ([], None, {}, "the data hold no batch"),
        ([(X, Y, Y)], None, {}, "batch 0 is a tuple of 3; expected a pair"),
        (X, [1, 2], {}, "the target of the batch is list; expected a tensor"),
        (X[0], torch.tensor(1), {}, "the target of the batch has shape (); expected at least one sequence along axis 0"),
        (X, Y, {"per": "batch"}, "per='batch' is not known; choose one of token, sequence"),
        (X, Y, {"loss": "hinge"}, "loss='hinge' is not known; choose one of cross_entropy, mse"),
        (X, Y, {"numbers": [0, 1]}, "numbers has 2 entries and the data have 5 sequences"),
        (X.double(), Y, {}, "the token ids are torch.float64; expected torch.int64"),
        (X, Y, {"parts": []}, "no parameter requires a gradient"),
        (X, Y, {"confidence": 95}, "confidence=95; pass a number between 0 and 1"),
        (X, Y, {"numbers": range(6)}, "numbers has 6 entries and the data have 5 sequences"),
        (X, Y, {"numbers": [0, 0, 1, 2, 3]}, "numbers holds a negative or a repeated number"),
        (X, Y, {"loss": "mse"}, "target has shape (5, 3), the module's output has (5, 3, 3); squared error needs equal shapes"),
        (X + 7, Y, {}, "token ids from 7 to 9; expected 0 to 2"),
        (X.to("meta"), Y, {}, "inputs is on meta, the parameters are on cpu; move one of them"),
        (X, Y, {"parts": ["W"]}, "parts holds a str; expected a Part in each place"),
    ],
)  # fmt: skip
def test_one_clear_error(data, target, options, message):
    with pytest.raises(InputError) as caught:
        sharpness(tiny(), data, target, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
