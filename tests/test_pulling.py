"""Curvature taken back through vertices, against products of the whole matrices."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from torch import Tensor

from hessiankit.engine.parameter_blocks import VertexBlocks
from hessiankit.engine.pullback import Pullback
from hessiankit.engine.tangents import EntrywiseTangents, SelectedTangents, StackedTangents, Vertex, by_row

ROWS, SHAPE = 6, (2, 3)


def symmetric(width: int, seed: int) -> Tensor:
    K = draw(ROWS, width, width, seed=seed)
    return K + K.mT


def vertex(width: int, parents: dict[int, StackedTangents] | None = None) -> Vertex:
    return Vertex(torch.Size((*SHAPE, width)), 2, width, [], parents or {})


def stack(entries: int, *parents: tuple[int, int], seed: int = 1) -> StackedTangents:
    vertices, widths = zip(*parents, strict=True)
    return StackedTangents(draw(sum(widths), *SHAPE, entries, seed=seed), vertices, widths)


def taken_back(vertices: dict[int, Vertex], blocks: VertexBlocks, *, crossing: bool = True) -> dict[tuple[int, int], Tensor]:
    """Return all blocks after every vertex, the last first, has been taken to its parents."""
    for t in sorted(vertices, reverse=True):
        back = Pullback(vertices, t, blocks)
        for r in [r for r in blocks.near[t] if r != t]:
            back.pair(r)
        if t in blocks.near[t]:
            back.square(crossing=crossing)
        for r in blocks.near[t]:
            blocks.settle(t, r)
    return {(t, r): sum(blocks.between(t, r).values()) for t in vertices for r in vertices if r in blocks.near[t]}


def whole(vertices: dict[int, Vertex], known: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """The same from the total derivative of every vertex by every older one: sum of D_t^T K D_r over all that is known."""
    by: dict[tuple[int, int], Tensor] = {}
    for t in sorted(vertices):
        by[t, t] = torch.eye(vertices[t].width).to(draw(1)).expand(ROWS, -1, -1)
        for one in vertices[t].parents.values():
            J, start = by_row(one.data, 2), 0
            for s, width in zip(one.vertices, one.widths, strict=True):
                for older in [older for (child, older) in by if child == s]:
                    step = by[s, older] @ J[:, start : start + width]
                    by[t, older] = by.get((t, older), 0) + step
                start += width
    found: dict[tuple[int, int], Tensor] = {}
    for (a, b), K in known.items():
        for (t, older), D in by.items():
            for (r, other), E in by.items():
                if (t, r) == (a, b):
                    found[older, other] = found.get((older, other), 0) + D @ K @ E.mT
                if a != b and (t, r) == (b, a):
                    found[older, other] = found.get((older, other), 0) + D @ K.mT @ E.mT
    return found


CHAINS = {
    "narrow, wide, narrow": {0: vertex(3), 1: vertex(9, {2: stack(9, (0, 3))}), 2: vertex(2, {2: stack(2, (1, 9), seed=2)})},
    "two wide": {
        0: vertex(3),
        1: vertex(8, {2: stack(8, (0, 3))}),
        2: vertex(7, {2: stack(7, (0, 3), seed=2)}),
        3: vertex(2, {2: stack(2, (0, 3), (1, 8), (2, 7), seed=3)}),
    },
    "entry by entry": {
        0: vertex(4),
        1: vertex(4, {2: EntrywiseTangents(draw(*SHAPE, 4), 0, 2)}),
        2: vertex(2, {2: stack(2, (1, 4))}),
    },
    "a copy": {
        0: vertex(3),
        1: vertex(3, {2: stack(3, (0, 3))}),
        2: vertex(
            3,
            {
                2: StackedTangents(
                    torch.cat([draw(3, *SHAPE, 3), torch.eye(3).to(draw(1))[:, None, None].expand(3, *SHAPE, 3)]),
                    (0, 1),
                    (3, 3),
                    frozenset({1}),
                )
            },
        ),
    },
}


@pytest.mark.parametrize("kind", ["squares", "pairs", "diagonals"])
@pytest.mark.parametrize("name", CHAINS)
def test_what_comes_back_is_the_product_of_the_matrices(name, kind):
    vertices = CHAINS[name]
    blocks, known = VertexBlocks(), {}
    last = max(vertices)
    if kind == "diagonals":
        for t in (last, last - 1):
            D = draw(ROWS, vertices[t].width, seed=t + 20)
            blocks.add_diagonal(t, t, 2, D)
            known[t, t] = torch.diag_embed(D)
        if vertices[last - 1].width == vertices[last - 2].width:
            D = draw(ROWS, vertices[last - 1].width, seed=31)
            blocks.add_diagonal(last - 1, last - 2, 2, D)
            known[last - 1, last - 2] = torch.diag_embed(D)
    else:
        for t in vertices:
            known[t, t] = symmetric(vertices[t].width, t + 20)
            blocks.add(t, t, 2, known[t, t])
        for t in vertices if kind == "pairs" else ():
            for r in range(t):
                known[t, r] = draw(ROWS, vertices[t].width, vertices[r].width, seed=10 * t + r)
                blocks.add(t, r, 2, known[t, r])
    found, expected = taken_back(vertices, blocks), whole(vertices, known)
    assert set(found) == set(expected)
    for pair, K in expected.items():
        assert (found[pair] - K).abs().max() <= 1e-13 * K.abs().max(), pair


def test_a_wide_source_keeps_products():
    """Of what a vertex of 2 columns leaves at one of 9, nothing is multiplied out before it is asked for."""
    vertices, blocks = CHAINS["narrow, wide, narrow"], VertexBlocks()
    blocks.add(2, 2, 2, symmetric(2, 5))
    Pullback(vertices, 2, blocks).square(crossing=True)
    assert set(blocks.of) == {(2, 2)}
    assert (set(blocks.products), set(blocks.squares)) == ({(1, 2)}, {1})
    assert blocks.levels(1, 2) == blocks.levels(1, 1) == {2}


def test_selected_entries_go_back_to_where_they_were_taken():
    value, positions = draw(2, 3), torch.arange(6).reshape(2, 3).flip(1)
    vertices = {
        0: Vertex(torch.Size((2, 3)), 1, 3),
        1: Vertex(torch.Size((2, 3)), 1, 3, [], {1: SelectedTangents(value, 0, 3, positions)}),
    }
    blocks, K = VertexBlocks(), draw(2, 3, 3)
    blocks.add(1, 1, 1, K + K.mT)
    Pullback(vertices, 1, blocks).square(crossing=False)
    assert torch.equal(blocks.between(0, 0)[1], (K + K.mT).flip(1, 2))
