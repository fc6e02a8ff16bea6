"""The forms that data may have, and what is said about those that they may not have."""

from __future__ import annotations

import pytest
import torch
from sharpness_cases import tiny, tokens
from torch import nn

from hessiankit.diagnostics.depth import depth_diagnostics
from hessiankit.diagnostics.sharpness import sharpness
from hessiankit.support.errors import InputError

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
    for data in (
        (X, Y),
        [X, Y],
        halves,
        [list(pair) for pair in halves],
        iter(halves),
        torch.utils.data.DataLoader(list(zip(X, Y, strict=True)), 2),
    ):
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
    parts = [{key: x[rows] for key, x in batch.items()} for rows in (slice(0, 2), slice(2, 5))]
    shared = {**batch, "table": torch.arange(7)}  # which every micro-batch gets whole
    for data in (parts, shared):
        assert values(data, None, model, micro_batch=1) == pytest.approx(values(batch, None, model, micro_batch=1), rel=1e-12)
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
        ("text", None, {}, "data is str; expected"),
        ([], None, {}, "the data hold no batch"),
        ([(X, Y), X, X], None, {}, "batch 1 is a Tensor; expected a pair"),
        ([(X, Y, Y)], None, {}, "batch 0 is a tuple of 3; expected a pair"),
        ({"input_ids": X}, None, {}, "the batch is a mapping without 'labels' (keys: 'input_ids'); add them"),
        (X, [1, 2], {}, "the target of the batch is list; expected a tensor"),
        (X[0], torch.tensor(1), {}, "the target of the batch has shape (); expected at least one sequence along axis 0"),
        (X, Y[:, :2], {}, "target has shape (5, 2), expected (5, 3): one label for each row of the logits (5, 3, 3)"),
        (X, Y.double(), {}, "target is torch.float64; cross entropy needs integer class labels"),
        (X, Y + 2, {}, "labels lie in [2, 4], expected 0 to 2 for 3 classes (or -100 to ignore a position)"),
        (X, Y[:4], {}, "the model's output has shape (5, 3, 3) for 4 sequences; expected those along axis 0"),
        (X, torch.full_like(Y, -100), {}, "every label is -100 (not counted); keep at least one"),
        (X, Y, {"micro_batch": 0}, "micro_batch=0; pass 1 or more sequences"),
        (X, Y, {"draws": 0}, "draws=0 draws no labels; pass 1 or more"),
        (X, Y, {"seed": -1}, "seed=-1; pass a whole number from 0"),
        (X, Y, {"per": "batch"}, "per='batch' is not known; choose one of token, sequence"),
        (X, Y, {"loss": "hinge"}, "loss='hinge' is not known; choose one of cross_entropy, mse"),
        (X, Y, {"confidence": 95}, "confidence=95; pass a number between 0 and 1"),
        (X, Y, {"numbers": [0, 1]}, "numbers has 2 entries and the data have more sequences"),
        (X, Y, {"numbers": range(6)}, "numbers has 6 entries and the data have 5 sequences"),
        (X, Y, {"numbers": [0, 0, 1, 2, 3]}, "numbers holds a negative or a repeated number"),
        (X, Y, {"loss": "mse"}, "target has shape (5, 3), the module's output has (5, 3, 3); squared error needs equal shapes"),
        (X + 7, Y, {}, "token ids from 7 to 9; expected 0 to 2"),
        (X.double(), Y, {}, "the token ids are torch.float64; expected torch.int64"),
        (X.to("meta"), Y, {}, "inputs is on meta, the parameters are on cpu; move one of them"),
        (X, Y, {"parts": ["W"]}, "parts holds a str; pass Parts"),
        (X, Y, {"parts": []}, "no parameter requires a gradient"),
    ],
)  # fmt: skip
def test_one_clear_error(data, target, options, message):
    with pytest.raises(InputError) as caught:
        sharpness(tiny(), data, target, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
