"""Losses written with torch's functions: every option, inside a module and as the loss itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw
from operation_cases import check_closed_form

import hessiankit as hk

OTHER, WEIGHT = draw(2, 3, 4, seed=13), draw(4, seed=11).abs()
P, LABELS = OTHER.softmax(-1), torch.tensor([[1, 0, 3], [2, -100, 1]])

CASES = {
    "cross_entropy": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.flatten()),
    "cross_entropy, smoothed": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "cross_entropy, weighted": lambda y: F.cross_entropy(y.flatten(0, 1), LABELS.flatten(), WEIGHT, label_smoothing=0.1),
    "cross_entropy, ignoring": lambda y: F.cross_entropy(y.mT, LABELS.clamp(0), ignore_index=1, label_smoothing=0.2),
    "cross_entropy, summed": lambda y: F.cross_entropy(y.mT, LABELS, reduction="sum", label_smoothing=0.1),
    "cross_entropy, each": lambda y: F.cross_entropy(y.mT, LABELS, WEIGHT, reduction="none", label_smoothing=0.1),
    "cross_entropy, each row": lambda y: F.cross_entropy(y[0], LABELS[0], reduction="none"),
    "cross_entropy, classes in the middle": lambda y: F.cross_entropy(y.mT, LABELS),
    "cross_entropy of one": lambda y: F.cross_entropy(y[0, 0], LABELS[0, 0], WEIGHT),
    "cross_entropy, probabilities": lambda y: F.cross_entropy(y.mT, P.mT, WEIGHT, label_smoothing=0.1),
    "cross_entropy, moving probabilities": lambda y: F.cross_entropy(y[0], y[1].softmax(-1)),
    "cross_entropy, probabilities, each": lambda y: F.cross_entropy(y.mT, P.mT, reduction="none"),
    "nll_loss": lambda y: F.nll_loss(y.flatten(0, 1), LABELS.flatten(), WEIGHT),
    "nll_loss, each": lambda y: F.nll_loss(y.mT, LABELS, reduction="none"),
    "nll_loss, summed": lambda y: F.nll_loss(y.mT, LABELS, reduction="sum"),
    "kl_div": lambda y: F.kl_div(y.log_softmax(-1), P, reduction="batchmean"),
    "kl_div, logarithms": lambda y: F.kl_div(y, y.log_softmax(1), log_target=True, reduction="none"),
    "kl_div, moving target": lambda y: F.kl_div(y, y.softmax(-1), reduction="sum"),
    "binary_cross_entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), P, WEIGHT),
    "binary_cross_entropy, logits": lambda y: F.binary_cross_entropy_with_logits(y, P, WEIGHT, pos_weight=WEIGHT.exp()),
    "binary_cross_entropy, logits, each": lambda y: F.binary_cross_entropy_with_logits(y, P, reduction="none"),
    "huber": lambda y: F.huber_loss(y, OTHER, delta=0.7),
    "smooth_l1": lambda y: F.smooth_l1_loss(y, OTHER, beta=0.7, reduction="sum"),
    "smooth_l1 without a bend": lambda y: F.smooth_l1_loss(y, OTHER, beta=0.0, reduction="none"),
    "l1": lambda y: F.l1_loss(y, OTHER),
    "gaussian_nll": lambda y: F.gaussian_nll_loss(y, OTHER, P),
    "poisson_nll": lambda y: F.poisson_nll_loss(y, P),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_form(name):
    check_closed_form(CASES[name])


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
def test_as_the_loss_of_a_module(options):
    module, labels = Formula(lambda s, x: torch.tanh(x @ s.W), W=(5, 4)), torch.tensor([2, 0, 3])
    found = assert_exact(module, draw(3, 5), labels, loss=lambda z, t: F.cross_entropy(z, t, **options))
    assert found.fallbacks == ()


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.1}], ids=str)
def test_a_mean_over_no_labels_is_not_a_number(options):
    module, ignored = Formula(lambda s, x: torch.tanh(x @ s.W), W=(5, 4)), torch.full((3,), -100)
    traced = hk.trace_module(
        lambda p, x: F.cross_entropy(torch.func.functional_call(module, p, x), ignored, **options),
        dict(module.named_parameters()),
        (draw(3, 5),),
    )
    assert traced.fallbacks == ()
    assert math.isnan(traced.values[traced.output])
