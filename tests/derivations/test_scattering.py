"""Entries from several tensors, and entries added in places: against torch.func on torch's own scatter and index_add."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from action_reference import check_actions
from second_order_reference import random_point

from derivations.scattering import AddAt, TakeAmong

X, Y = random_point(66, X=(2, 3, 4), Y=(2, 2, 4)).values()
INDEX = torch.tensor([2, 0])
POSITIONS = torch.arange(24).reshape(2, 3, 4)
CASES = {
    "index_copy": (
        TakeAmong(POSITIONS.index_copy(1, INDEX, 24 + torch.arange(16).reshape(2, 2, 4))),
        lambda x, y: x.index_copy(1, INDEX, y),
    ),
    "repeated": (
        TakeAmong(torch.tensor([[0, 0, 30], [24, 39, 30]])),
        lambda x, y: torch.cat([x.flatten(), y.flatten()])[torch.tensor([[0, 0, 30], [24, 39, 30]])],
    ),
    "index_add": (AddAt(POSITIONS.index_select(1, INDEX)), lambda x, y: x.index_add(1, INDEX, y)),
    "index_add, repeated": (
        AddAt(POSITIONS.index_select(1, torch.tensor([1, 1])), -2.0),
        lambda x, y: x.index_add(1, torch.tensor([1, 1]), y, alpha=-2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name):
    primitive, f = CASES[name]
    for moving in ([0, 1], [0], [1]):
        check_actions(primitive, f, (X, Y), moving)
    assert primitive.is_linear


def test_a_constant_among_the_entries():
    at = F.pad(torch.arange(1, 25).reshape(2, 3, 4), (1, 2, 0, 1))
    zero = torch.zeros((), dtype=torch.float64)
    check_actions(TakeAmong(at), lambda z, x: F.pad(x, (1, 2, 0, 1)) + z * (at == 0), (zero, X), [1])


def test_rows():
    padded = TakeAmong(F.pad(POSITIONS, (1, 2), value=24))
    zero = torch.zeros(())
    assert padded.rowwise((X, zero), 2, (True, False))
    assert not padded.rowwise((X, zero), 3, (True, False))
    assert not padded.rowwise((X, zero), 1, (True, True))
    assert not TakeAmong(POSITIONS.flip(1)).rowwise((X,), 2, (True,))
    assert TakeAmong(POSITIONS.flip(1)).rowwise((X,), 1, (True,))
    moved = TakeAmong(POSITIONS.index_copy(1, INDEX, 24 + torch.arange(16).reshape(2, 2, 4)))
    assert not moved.rowwise((X, Y), 2, (True, True))  # rows of Y go to other rows
    assert moved.rowwise((X, Y), 1, (True, True))


@pytest.mark.parametrize("primitive", [TakeAmong(POSITIONS), AddAt(POSITIONS)])
def test_errors(primitive):
    with pytest.raises(ValueError, match=r"jvp: every tangent is None"):
        primitive.jvp((X, X), (None, None))
