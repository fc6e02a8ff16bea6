"""The chart of bounds over truth: by point for attention and block, by width, along training, by placement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from figures._kit import FAINT, INK, METHOD_COLOURS, page, save
from hessiankit.curvature.plot_frame import STYLE, Picture

Columns: TypeAlias = Mapping[str, Mapping[str, tuple[float, float]]]
COLOURS = {"a priori": METHOD_COLOURS[2], "structured": METHOD_COLOURS[1], "certified, norm matrix": METHOD_COLOURS[3]}
DRAWN = ("a priori", "structured", "certified, norm matrix")
MARKS = {"a priori": "o", "structured": "s", "certified, norm matrix": "^"}
DASHES: dict[str, Any] = {"attention": "--", "block": "-"}


def draw_chart(summary: Mapping[str, Columns], path: Path) -> Path:
    """Draw five panels of medians, with a thin line up to the worst of each, in log scale, and return the path."""
    with mpl.rc_context(STYLE):
        figure = page(8.6, 6.4)
        grid = figure.add_gridspec(2, 3, left=0.075, right=0.985, top=0.865, bottom=0.12, wspace=0.25, hspace=0.34)
        figure.text(0.075, 0.965, "Upper bounds of a Hessian's norm, divided by the norm", fontsize=10.5, color=INK)
        _legend(figure)
        for k, panel in enumerate(("attention", "block")):
            axes = figure.add_subplot(grid[0, k])
            _points(axes, summary[panel], DRAWN)
            _dress(axes, {"attention": "self-attention", "block": "post-norm block"}[panel], labelled=k == 0)
        axes = figure.add_subplot(grid[0, 2])
        _lines(axes, summary["size"])
        _dress(axes, "by width d = L, at initialisation")
        axes = figure.add_subplot(grid[1, 0])
        _lines(axes, summary["training"])
        _dress(axes, "by steps of training", labelled=True)
        axes = figure.add_subplot(grid[1, 1:])
        _points(axes, summary["placement"], DRAWN)
        axes.tick_params(axis="x", labelrotation=35)
        _dress(axes, "by norm placement, at initialisation")
        return save(figure, path)


def _legend(figure: Picture) -> None:
    kinds = [
        Line2D(
            [], [], color=COLOURS[kind], marker=MARKS[kind], linestyle="", markersize=4.5, label=kind.removeprefix("certified, ")
        )
        for kind in DRAWN
    ]
    modules = [Line2D([], [], color=FAINT, linestyle=dash, label=module) for module, dash in DASHES.items()]
    look: Any = {"frameon": False, "fontsize": 8, "handletextpad": 0.4, "columnspacing": 1.4}
    figure.legend(handles=kinds, loc="upper left", bbox_to_anchor=(0.065, 0.952), ncols=3, **look)
    figure.legend(handles=modules, loc="upper left", bbox_to_anchor=(0.40, 0.952), ncols=2, **look)
    figure.text(0.985, 0.925, "mark: median, thin line: up to the worst", fontsize=8, color=FAINT, ha="right")


def _points(axes: Axes, columns: Columns, kinds: tuple[str, ...]) -> None:
    """Medians of every column beside each other, each with a line to its worst."""
    for k, kind in enumerate(kinds):
        for at, column in enumerate(columns.values()):
            if kind not in column:
                continue
            median, worst = column[kind]
            x = at + 0.26 * (k - (len(kinds) - 1) / 2)
            axes.plot([x, x], [median, worst], color=COLOURS[kind], linewidth=1.0, alpha=0.6)
            axes.plot([x], [median], MARKS[kind], color=COLOURS[kind], markersize=4)
            if kind == "certified, norm matrix" and len(columns) > 6:
                continue  # no room for one more number
            axes.annotate(_short(median), (x, median), (0, -9), textcoords="offset points", ha="center", fontsize=6, color=FAINT)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_xlim(-0.6, len(columns) - 0.4)


def _short(value: float) -> str:
    """Return two significant digits, written out up to a million."""
    return f"{value:.2g}" if value < 100 or value >= 1e6 else f"{float(f'{value:.2g}'):,.0f}"


def _lines(axes: Axes, columns: Columns) -> None:
    """Medians against the number that a column's name ends with, a line for each module and kind."""
    numbers = sorted({int(name.split()[1]) for name in columns})
    for module, dash in DASHES.items():
        for kind in DRAWN:
            own = {int(n.split()[1]): c[kind][0] for n, c in columns.items() if n.split()[0] == module and kind in c}
            found = [(k, own[number]) for k, number in enumerate(numbers) if number in own]
            axes.plot(*zip(*found, strict=True), dash, marker=MARKS[kind], color=COLOURS[kind], markersize=4, linewidth=1.0)
    axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])


def _dress(axes: Axes, title: str, *, labelled: bool = False) -> None:
    if labelled:
        axes.set_ylabel("bound / norm", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(axes.get_ylim()[1] ** -0.12, 0.5))  # room for the numbers below 1
    axes.axhline(1.0, color=INK, linewidth=0.6)
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.tick_params(labelsize=7.5, length=2)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
