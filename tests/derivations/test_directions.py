"""Directions taken a few at a time give what they give all at once."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from curvature_reference import draw
from primitive_cases import CASES

from derivations import directions
from derivations.directions import ALONE, add_product, by_columns


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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 5))])
def test_product_is_added_in_place(shapes: tuple[tuple[int, ...], tuple[int, ...]], turned: bool) -> None:
    a, b = (draw(*shape, seed=k) for k, shape in enumerate(shapes))
    b = by_columns(b) if turned else b
    expected = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    found = add_product(None, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    more = draw(*expected.shape, seed=2)
    total = more + expected
    assert add_product(more, a, b).data_ptr() == more.data_ptr()
    torch.testing.assert_close(more, total, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (3, 64, ALONE // 64), (2, 2, 3, 4)])
def test_columns_are_contiguous(shape: tuple[int, ...]) -> None:
    b = draw(*shape, seed=3)
    turned = by_columns(b)
    assert torch.equal(turned, b)
    assert turned.mT.is_contiguous()
    assert by_columns(turned) is turned
