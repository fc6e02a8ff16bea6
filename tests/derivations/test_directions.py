"""Directions taken a few at a time give what they give all at once."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import random_point

from derivations import directions
from derivations.loss import CrossEntropy
from derivations.normalization import LayerNorm, RMSNorm
from derivations.softmax import Softmax


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (7, 3), (7, 0), (7, 100)])
def test_parts_cover_every_direction_once(shape, monkeypatch):
    monkeypatch.setattr(directions, "CACHE_ENTRIES", 8)
    covered = [i for part in directions.parts(torch.zeros(shape)) for i in range(part.start, part.stop)]
    assert covered == list(range(shape[0]))


@pytest.mark.parametrize("entries", [1, 24, 10_000])
def test_actions_do_not_depend_on_the_size_of_a_part(entries, monkeypatch):
    monkeypatch.setattr(directions, "CACHE_ENTRIES", entries)
    X, gamma, beta = random_point(70, X=(3, 4), gamma=(4,), beta=(4,)).values()
    labels = torch.tensor([0, -100, 3])

    def layer_norm(X, gamma, beta):
        centred = X - X.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * gamma + beta

    def cross_entropy(X, _):
        log_p = X - X.exp().sum(-1, keepdim=True).log()
        return -(log_p[0, 0] + log_p[2, 3]) / 2

    check_actions(LayerNorm(1, 0.1), layer_norm, (X, gamma, beta), (0, 1, 2), directions=5)
    rms = RMSNorm(1, 0.1)
    check_actions(rms, lambda X, g: X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * g, (X, gamma), (0, 1), directions=5)
    for dim in (0, 1):
        check_actions(Softmax(dim), lambda X, dim=dim: X.exp() / X.exp().sum(dim, keepdim=True), (X,), (0,), directions=5)
    check_actions(CrossEntropy(), cross_entropy, (X, labels), (0,), directions=5)
