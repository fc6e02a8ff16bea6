"""A block removed, against a model that was built without it."""

from __future__ import annotations

import copy

import pytest
import torch
from depth_reference import language_model, tokens
from torch import nn

import hessiankit as hk
from hessiankit.diagnostics.depth import depth_diagnostics
from hessiankit.support.errors import InputError

IDS, LABELS = tokens(3, 5), tokens(3, 5, seed=1)
LABELS[0, :3] = -100


def score(model: nn.Module) -> tuple[float, float]:
    with torch.no_grad():
        logits = model(IDS)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    return float(loss), float((logits.argmax(-1) == LABELS)[LABELS != -100].double().mean())


def without(model: hk.Transformer, k: int) -> hk.Transformer:
    cut = copy.deepcopy(model)
    del cut.blocks[k]
    return cut


@pytest.mark.parametrize("placement", ["pre", "post", "lns", "hybridnorm*", "deepnorm"])
def test_drop_equals_that_of_the_shorter_model(placement):
    model = language_model(3, placement)
    found = depth_diagnostics(model, IDS, LABELS, what="drop").drop
    loss, accuracy = score(model)
    assert (found.loss, found.accuracy) == (pytest.approx(loss, rel=1e-13), pytest.approx(accuracy, rel=1e-13))
    for k in range(3):
        less, right = score(without(model, k))
        assert found.loss_change[k] == pytest.approx(less - loss, abs=1e-13)
        assert found.accuracy_change[k] == pytest.approx(right - accuracy, abs=1e-13)
    assert max(map(abs, found.loss_change)) > 1e-3


def test_renumbered_factors_are_those_of_a_model_with_one_block_less():
    model = language_model(4, "lns")
    frozen = depth_diagnostics(model, IDS, LABELS, what="drop").drop
    moved = depth_diagnostics(model, IDS, LABELS, what="drop", renumber=True).drop
    loss, _ = score(model)
    for k in range(4):
        cut = without(model, k)
        for layer, block in enumerate(cut.blocks, 1):
            block.factor = layer**-0.5
        assert moved.loss_change[k] == pytest.approx(score(cut)[0] - loss, abs=1e-13)
    assert moved.loss_change[3] == frozen.loss_change[3]  # nothing lies behind the last block
    assert abs(moved.loss_change[0] - frozen.loss_change[0]) > 1e-4
    assert "renumbered" in str(depth_diagnostics(model, IDS, LABELS, what="drop", renumber=True))
    pre = [depth_diagnostics(language_model(2), IDS, LABELS, what="drop", renumber=yes).drop for yes in (False, True)]
    assert pre[0].loss_change == pre[1].loss_change  # a placement without factors


def test_what_cannot_be_renumbered():
    with pytest.raises(InputError, match="depend on the layer"):
        depth_diagnostics(language_model(4, "mix-ln"), IDS, LABELS, what="drop", renumber=True)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    with pytest.raises(InputError, match="layer number is not known"):
        depth_diagnostics(encoder, torch.randn(2, 3, 4), tokens(2, 3, vocabulary=4), what="drop", renumber=True)
