"""Columns of parameters, where rows have met: depth, ties, cuts, and values whose entries are entries of others."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
from torch.nn.functional import layer_norm, linear

from hessiankit.engine import column_blocks, reverse_accumulation
from hessiankit.engine.column_blocks import ColumnBlocks
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.peak_memory import columns_are_cheaper, peak_entries, rows_coupled
from hessiankit.engine.problem.loss_trace import loss_trace
from hessiankit.engine.problem.own_call import make_task
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.engine.tangents import Vertex


def attend(x, heads=1):
    B, L, d = x.shape
    z = x.reshape(B, L, heads, d // heads).transpose(1, 2)
    return (torch.softmax(z @ z.mT, -1) @ z).transpose(1, 2).reshape(B, L, d)


def deep(s, x):
    return attend(torch.tanh(attend(torch.tanh(x @ s.U), 2) @ s.V), 2) @ s.W


MODULES = {
    "two attentions": (deep, {"U": (3, 4), "V": (4, 4), "W": (4, 2)}),
    "weights stored the other way": (
        lambda s, x: linear(attend(torch.tanh(linear(attend(torch.tanh(linear(x, s.U, s.a))), s.V, s.b))), s.W),
        {"U": (4, 3), "a": (4,), "V": (5, 4), "b": (5,), "W": (2, 5)},
    ),
    "one weight in two layers": (
        lambda s, x: attend(torch.tanh(attend(torch.tanh(attend(torch.tanh(x @ s.U)) @ s.V + s.a)) @ s.V + s.a)),
        {"U": (3, 4), "V": (4, 4), "a": (4,)},
    ),
    "gain and bias in one": (
        lambda s, x: attend(layer_norm(attend(torch.tanh(x @ s.U)), (4,), s.a, s.a)) @ s.W,
        {"U": (3, 4), "a": (4,), "W": (4, 2)},
    ),
    "pooled, then a wide head": (
        lambda s, x: torch.tanh(attend(torch.tanh(x @ s.U)).mean(1) @ s.V) @ s.W,
        {"U": (3, 4), "V": (4, 9), "W": (9, 2)},
    ),
    "one token": (lambda s, x: torch.tanh(attend(torch.tanh(x @ s.U))[:, 1] @ s.V), {"U": (3, 4), "V": (4, 3)}),
    "samples meet": (
        lambda s, x: torch.tanh(attend(torch.tanh(x @ s.U).transpose(0, 1)) @ s.V),
        {"U": (3, 4), "V": (4, 2)},
    ),
    "rows and columns change places": (
        lambda s, x: torch.tanh(torch.tanh(attend(torch.tanh(x @ s.U)).mT @ s.T).mT @ s.V),
        {"U": (3, 4), "T": (5, 5), "V": (4, 2)},
    ),
}


@pytest.mark.parametrize("entries", [column_blocks.ENTRIES, 40])
@pytest.mark.parametrize("name", MODULES)
def test_exact(name, entries, monkeypatch):
    """IdentityJacobian parameters at once, and a few columns of each."""
    monkeypatch.setattr(column_blocks, "ENTRIES", entries)
    formula, shapes = MODULES[name]
    assert_exact(Formula(formula, **shapes), draw(2, 5, 3))


@pytest.mark.parametrize("name", MODULES)
def test_all_of_them_have_panels(name, monkeypatch):
    """All but what is pooled at once."""
    found = []
    seed = ColumnBlocks.seed
    monkeypatch.setattr(ColumnBlocks, "seed", lambda self, t, r, K: (found.append((t, r)), seed(self, t, r, K))[1])
    formula, shapes = MODULES[name]
    assert_exact(Formula(formula, **shapes), draw(2, 5, 3))
    assert found


def swept(formula, shapes, x):
    module = Formula(formula, **shapes)
    with torch.no_grad():
        target = torch.zeros_like(module(x))
        task = make_task("test", module, x, target, "mse")
        sweep = ForwardSweep(loss_trace(task, float(target.numel())).trace)
        sweep.run()
    return sweep, task


def test_heads_are_selections_and_the_curvature_of_scores_stays_with_their_rows():
    """Scores are moved by queries row by row and by keys head by head, never by all tokens and heads at once."""
    sweep, _ = swept(*MODULES["two attentions"], draw(2, 5, 3))
    scores = [s for s in sweep.vertices.values() if s.shape == (2, 2, 5, 5)]
    assert len(scores) == 2
    for vertex in scores:
        assert {level: stack.widths for level, stack in vertex.parents.items()} == {3: (2,), 2: (10,)}
    assert {level for by in sweep.blocks.of.values() for level in by} == {2, 3}


def test_the_footprint_is_that_of_the_blocks(monkeypatch):
    """The entries that are alive at once: counted before, and while it happens."""
    sweep, task = swept(*MODULES["two attentions"], draw(2, 5, 3))
    forecast, peak, kept = peak_entries(sweep.blocks, sweep.vertices), 0, {}
    seed, forget = ColumnBlocks.seed, sweep.blocks.forget

    def alive():
        tensors = [K for by in sweep.blocks.of.values() for K in by.values()] + list(kept.values())
        return sum({id(K): K.numel() for K in tensors}.values())

    def watched(t, r):
        nonlocal peak
        peak = max(peak, alive())
        forget(t, r)

    def keeping(self, t, r, K):
        kept[t, r, len(kept)] = K
        seed(self, t, r, K)

    monkeypatch.setattr(ColumnBlocks, "seed", keeping)
    monkeypatch.setattr(sweep.blocks, "forget", watched)
    reverse_accumulation.accumulate(sweep, SymmetricStorage(task.slices, torch.float64, torch.device("cpu")))
    assert kept
    assert 0.8 * peak <= forecast <= 1.2 * peak


def test_where_rows_meet():
    row, sample = Vertex(torch.Size((2, 5, 4)), 2, 4), Vertex(torch.Size((2, 4)), 1, 4)
    assert not rows_coupled(1, {0: row, 1: row}, {1: {2}, 0: {1}})  # what came before has not had its turn
    assert rows_coupled(0, {0: row, 1: row}, {1: {1}})
    assert not rows_coupled(0, {0: row, 1: sample}, {1: {1}})


def test_columns_of_parameters_do_not_pay_for_a_wide_head_over_one_row():
    jacobian = column_blocks.WeightJacobian("W", None, draw(2, 100), 4, transposed=False)
    tokens, pooled = Vertex(torch.Size((2, 50, 4)), 2, 4), Vertex(torch.Size((2, 4)), 1, 4, [jacobian])
    assert not columns_are_cheaper(tokens, pooled, {1})
    every = column_blocks.WeightJacobian("W", None, draw(100, 100), 4, transposed=False)
    assert columns_are_cheaper(tokens, Vertex(torch.Size((2, 50, 4)), 2, 4, [every]), {1})
    assert not columns_are_cheaper(tokens, Vertex(torch.Size((2, 50, 4)), 2, 4), {1})  # no parameters
