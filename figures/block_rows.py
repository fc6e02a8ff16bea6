"""The places of a transformer block: the level of each path, the directions of each sweep, and cuts where they pay.

Ours, for docs/concepts/one_sum.md. A block with norms before and after each sublayer, 2 heads, 2 samples of 4 tokens, squared
error. A row is a value on the way to the loss, with lines from the values that it is computed from; a column is a place. Its
colour says how many leading axes of the value still index rows that the path from the place keeps apart. All of it is read off
:class:`hessiankit.engine.paths.Paths` and :func:`hessiankit.engine.sections.sections`; the CSV has a line for each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

import hessiankit as hk
from figures._kit import FAINT, INK, METHOD_COLOURS, page, save, style, write_rows
from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.paths import Paths, Place
from hessiankit.engine.sections import sections
from hessiankit.engine.sweep_plans import Directions
from hessiankit.primitives.linear import Permute, Reshape
from hessiankit.request.loss_trace import loss_trace
from hessiankit.request.read import read_request

NAME = Path(__file__).stem
BATCH, TOKENS, WIDTH, HIDDEN, HEADS = 2, 4, 8, 16, 2
LEVELS = {2: ("tokens apart", METHOD_COLOURS[6]), 1: ("samples apart", METHOD_COLOURS[5]), 0: ("dense", METHOD_COLOURS[4])}
WORDS = {"MatMul": "product", "Multiple": "scale", "Softmax": "softmax", "Activation": "gelu", "MeanSquaredError": "loss"}
MOVES = (Reshape, Permute)
"""Primitives that only rearrange entries: they have no row in the picture."""


@dataclass(frozen=True)
class Column:
    """A place in the picture.

    Attributes:
        place: Of the trace.
        directions: That are pushed from it.
        sweep: Number of the sweep that has them, from the last place to the first.
        levels: Of the values that it moves up to the next cut, by id: the level of the steps from the place to each of them.
        later: Places at which covectors of its sweep arrive, by id.
        behind: Places behind the next cut, by id: their blocks are products with what the cut keeps.
    """

    place: Place
    directions: Directions
    sweep: int
    levels: dict[int, int]
    later: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many directions there are."""
        return self.directions.outputs * self.directions.rows


@dataclass(frozen=True)
class Diagram:
    """What is drawn.

    Attributes:
        rows: Values by id with their names, in order.
        edges: Pairs of values, the second computed from the first.
        columns: A place each, in order.
        cuts: Values at which the trace is cut.
    """

    rows: dict[int, str]
    edges: tuple[tuple[int, int], ...]
    columns: tuple[Column, ...]
    cuts: tuple[int, ...]


def paths() -> Paths:
    """Return the ways through the block, with its places."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(WIDTH, HIDDEN, n_heads=HEADS, placement="sandwich", activation="gelu").double()
    X, T = torch.randn(2, BATCH, TOKENS, WIDTH).double()
    batch = read_request(block, X, T).only()
    with batch.at(), torch.no_grad():
        return Paths(loss_trace(batch).trace)


def diagram(ways: Paths) -> Diagram:
    """Return the picture's rows, lines and columns."""
    columns, cuts, behind, sweep = list[Column](), list[int](), list[int](), 0
    for section in sections(ways):
        cuts += [section.end] if section.end != ways.output else []
        for plan in section.plans:
            for d in plan.directions:
                later = [r.at for r in section.places if r.order >= d.place.order]
                levels = _levels(ways, d.place, ways.reach(later, section.steps))
                columns.append(Column(d.place, d, sweep, levels, tuple(later[1:]), tuple(behind)))
            sweep += 1
        behind += [place.at for place in section.places]
    columns.sort(key=lambda column: column.place.order)
    return Diagram(*_graph(ways), tuple(columns), tuple(cuts))


def _levels(ways: Paths, place: Place, path: Sequence[Step]) -> dict[int, int]:
    """Return the values that a place moves on a path, by id: the level of the steps from the place to each of them."""
    moving, before = {place.at: place.axes}, dict[int, set[int]]()
    for n, step in enumerate(path):
        if any(at in moving for at in step.inputs):
            before[step.output] = {n}.union(*(before.get(at, set()) for at in step.inputs if at is not None))
            moving[step.output] = ways.level(place.at, [path[k] for k in sorted(before[step.output])])
    return moving


def _graph(ways: Paths) -> tuple[dict[int, str], tuple[tuple[int, int], ...]]:
    """Return the values with their names, and the lines between them, rearrangements left out."""
    kinds = {a.output: a.primitive for a in ways.trace.applications}
    source, rows, edges = dict[int, int](), dict[int, str](), list[tuple[int, int]]()
    for place in ways.places:
        if place.at not in {step.output for step in ways.steps}:
            rows[place.at] = name_of(place)
    for step in ways.steps:
        before = [source.get(at, at) for at in step.inputs if at is not None]
        if isinstance(kinds[step.output], MOVES):
            source[step.output] = before[0]
            continue
        kind = type(kinds[step.output]).__name__
        own = ways.by_value.get(step.output)
        rows[step.output] = name_of(own) if own else WORDS.get(kind, kind.lower())
        edges += [(at, step.output) for at in before]
    return rows, tuple(edges)


def name_of(place: Place) -> str:
    """Return a short name: of a weight, or of the norm that a gain belongs to."""
    layer, _, own = place.jacobians[0].parameter.rpartition(".")
    return layer if own in ("weight", "bias") else own


def records(found: Diagram) -> list[dict[str, Any]]:
    """Return a line for each place."""
    return [
        {
            "place": name_of(column.place), "parameters": " ".join(u.parameter for u in column.place.jacobians),
            "entries": column.place.size, "width": column.place.width, "level": column.directions.level,
            "groups": column.directions.groups, "rows": column.directions.rows, "by_entry": column.directions.by_entry,
            "directions": column.count, "sweep": column.sweep, "later": len(column.later),
            "behind": len(column.behind),
        }
        for column in found.columns
    ]  # fmt: skip


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw the block and write a line for each place; ``quick`` changes nothing: it takes a second."""
    out.mkdir(parents=True, exist_ok=True)
    found = diagram(paths())
    lines = write_rows(out / f"{NAME}.csv", records(found))
    with style():
        figure = page(7.6, 6.2)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(-3.3, len(found.columns) + 0.2), ylim=(len(found.rows) + 4.9, -1.9))
        axes.axis("off")
        _draw_graph(axes, found)
        _draw_columns(axes, found)
        _draw_table(axes, found)
        return [save(figure, out / f"{NAME}{suffix}"), lines]


def _draw_graph(axes: Axes, found: Diagram) -> None:
    at = {value: n + 0.5 for n, value in enumerate(found.rows)}
    places = {column.place.at for column in found.columns}
    for value, name in found.rows.items():
        axes.plot(-2.0, at[value], marker="o", markersize=5, color=INK, markerfacecolor=INK if value in places else "white")
        axes.text(-1.7, at[value], name, va="center", fontsize=8, fontweight="bold" if value in places else "normal")
    for first, last in found.edges:
        far = at[last] - at[first]
        bend = 0.0 if far == 1 else min(0.4, 0.25 + 0.5 / far)
        axes.add_patch(
            FancyArrowPatch(
                (-2.0, at[first]), (-2.0, at[last]), arrowstyle="->", mutation_scale=7, shrinkA=3, shrinkB=3, lw=0.8,
                color=INK, connectionstyle=f"arc3,rad={bend}",
            )
        )  # fmt: skip
    for value in found.cuts:
        axes.plot((-3.2, len(found.columns) + 0.05), (at[value] + 0.5,) * 2, color=INK, lw=1.2, ls=(0, (4, 2)))
        axes.text(-3.2, at[value] + 0.42, "cut", va="bottom", fontsize=8)


def _draw_columns(axes: Axes, found: Diagram) -> None:
    at = {value: n for n, value in enumerate(found.rows)}
    for x, column in enumerate(found.columns):
        axes.text(x + 0.5, -0.25, name_of(column.place), ha="center", va="bottom", fontsize=8, fontweight="bold")
        for value, level in column.levels.items():
            if value in at:
                _fill(axes, x + 0.06, at[value] + 0.06, 0.88, 0.88, level)
        axes.plot(x + 0.5, at[column.place.at] + 0.5, marker="v", color=INK, markersize=5)
        for values, look in ((column.later, "white"), (column.behind, FAINT)):
            for value in values:
                axes.plot(x + 0.5, at[value] + 0.5, marker="o", color=INK, markerfacecolor=look, markersize=5)
    _draw_legend(axes, {level for column in found.columns for level in column.levels.values()}, cut=bool(found.cuts))


def _fill(axes: Axes, x: float, y: float, width: float, height: float, level: int) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=LEVELS[level][1], alpha=0.55, edgecolor="none"))


def _draw_legend(axes: Axes, levels: set[int], *, cut: bool) -> None:
    for n, level in enumerate(sorted(levels, reverse=True)):
        _fill(axes, 2.2 * n - 1.7, -1.75, 0.45, 0.6, level)
        axes.text(2.2 * n - 1.15, -1.45, LEVELS[level][0], va="center", fontsize=8)
    marks = ((3.0, "directions begin", "v", INK), (5.3, "later place", "o", "white"), (7.1, "later, behind the cut", "o", FAINT))
    for x, name, marker, fill in marks if cut else marks[:2]:
        axes.plot(x, -1.45, marker=marker, color=INK, markerfacecolor=fill, markersize=5)
        axes.text(x + 0.25, -1.45, name, va="center", fontsize=8)


def _draw_table(axes: Axes, found: Diagram) -> None:
    top = len(found.rows) + 0.6
    texts: list[tuple[str, Sequence[str]]] = [
        ("level", [str(column.directions.level) for column in found.columns]),
        ("directions of", ["entries" if column.directions.by_entry else "rows" for column in found.columns]),
        ("how many", [_product(column.directions) for column in found.columns]),
    ]
    for n, (title, cells) in enumerate(texts):
        axes.text(-1.7, top + n + 0.2, title, va="center", fontsize=8)
        for x, cell in enumerate(cells):
            axes.text(x + 0.5, top + n + 0.2, cell, ha="center", va="center", fontsize=8)
    axes.text(-1.7, top + 3.4, "swept together", va="center", fontsize=8)
    for sweep in sorted({column.sweep for column in found.columns}):
        members = [x for x, column in enumerate(found.columns) if column.sweep == sweep]
        total = sum(found.columns[x].count for x in members)
        axes.plot((members[0] + 0.12, members[-1] + 0.88), (top + 3.0,) * 2, color=FAINT, lw=2.5, solid_capstyle="butt")
        axes.text((members[0] + members[-1]) / 2 + 0.5, top + 3.5, str(total), ha="center", va="center", fontsize=8)


def _product(d: Directions) -> str:
    return f"{d.rows} x {d.outputs}" if d.rows > 1 else str(d.outputs)
