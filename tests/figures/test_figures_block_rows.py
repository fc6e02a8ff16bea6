"""The picture of a block's places: what its colours, marks and numbers say is what a sweep does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from figure_files import read

from figures.block_rows import Diagram, diagram, draw, name_of, paths
from hessiankit.engine.block_rows import BlockRows
from hessiankit.engine.paths import Paths
from hessiankit.engine.sections import sections
from hessiankit.engine.sweep import Along, dense, push, reads


@pytest.fixture(scope="module")
def ways() -> Paths:
    return paths()


@pytest.fixture(scope="module")
def found(ways: Paths) -> Diagram:
    return diagram(ways)


def test_a_direction_moves_its_own_group_alone(ways: Paths, found: Diagram) -> None:
    """At each coloured value: one that begins in the first token, or sample, moves the first token, or sample."""
    for column in found.columns:
        steps, at = ways.reach([column.place.at]), column.place.at
        for value, level in column.levels.items():
            if value == ways.output:
                continue
            seed = torch.zeros_like(ways.value(at)).unsqueeze(0)
            first = (0,) * (1 + level)
            seed[first] = torch.linspace(-1, 2, seed[first].numel()).reshape(seed[first].shape)
            tangents: dict[int, Along] = {at: seed}
            push(steps, tangents, *reads(steps, {value}))
            moved = dense(tangents[value])[0]
            assert moved[first[1:]].abs().max() > 0
            moved[first[1:]] = 0
            assert (moved == 0).all(), (name_of(column.place), found.rows.get(value), level)


def test_the_level_of_a_sweep_is_that_of_its_path(found: Diagram) -> None:
    for column in found.columns:
        finest = min(column.levels.values())
        assert column.directions.level == (0 if column.directions.by_entry else finest)


def test_blocks_arrive_at_the_places_that_are_marked(ways: Paths, found: Diagram) -> None:
    """Pushed to the loss and pulled back, a direction reaches these later places and no other."""
    rows, (whole,) = BlockRows(ways), sections(ways, cut=False)
    for column in found.columns:
        seen, at, order = set[int](), column.place.at, column.place.order
        path = ways.reach([place.at for place in ways.places if place.order >= order], whole.steps)
        seed = torch.linspace(-1, 2, ways.value(at).numel()).reshape(1, *ways.value(at).shape).double()
        rows.sweep(whole, path, lambda place, bar, mixed, to=seen: to.add(place.at), seeds={at: seed})  # type: ignore[misc]
        assert {at for at in seen if ways.by_value[at].order > order} == {*column.later, *column.behind}


def test_fewer_directions_than_parameters(ways: Paths, found: Diagram) -> None:
    """As docs/concepts/one_sum.md says: 168 directions for a Hessian of 576 columns, and one cut."""
    assert sum(column.count for column in found.columns) == 168
    assert sum(place.size for place in ways.places) == 576
    assert [found.rows[at] for at in found.cuts] == ["add"]


@pytest.mark.usefixtures("all_pixels")
def test_what_is_written(tmp_path: Path) -> None:
    picture, numbers = draw(tmp_path, quick=True)
    assert picture.stat().st_size > 20_000
    lines = {row["place"]: row for row in read(numbers)}
    assert list(lines) == ["norm_1", "W_Q", "W_K", "W_V", "W_O", "norm_3", "norm_2", "W_1", "W_2", "norm_4"]
    assert (lines["W_Q"]["level"], lines["W_Q"]["directions"], lines["W_1"]["level"]) == ("1", "32", "2")
