"""Directions taken a few at a time give what they give all at once."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from primitive_cases import CASES

from derivations import directions


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (7, 3), (7, 0), (7, 100)])
def test_parts_cover_every_direction_once(shape, monkeypatch):
    monkeypatch.setattr(directions, "CACHE_ENTRIES", 8)
    covered = [i for part in directions.parts(torch.zeros(shape)) for i in range(part.start, part.stop)]
    assert covered == list(range(shape[0]))


@pytest.mark.parametrize("entries", [1, 24])
@pytest.mark.parametrize(
    "name", ["layer norm (3, 4) 1", "rms norm (3, 4) 1", "softmax (3, 4) 0", "softmax (3, 4) -1", "cross entropy 0.0 None"]
)
def test_actions_do_not_depend_on_the_size_of_a_part(name, entries, monkeypatch):
    monkeypatch.setattr(directions, "CACHE_ENTRIES", entries)
    case = CASES[name]
    check_actions(case.primitive, case.f, case.inputs, case.movable, directions=5)
