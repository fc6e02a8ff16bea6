"""The chart of bounds over truth: by point for attention and block, by width, along training, by placement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hessiankit.drawing.plot_frame import DPI, FAINT, INK, STYLE, SUFFIXES

Columns: TypeAlias = Mapping[str, Mapping[str, tuple[float, float]]]
COLOURS = {"a priori": "#c1553b", "structured": "#2c6fb5", "certified, norm matrix": "#3f8f5a"}
DRAWN = ("a priori", "structured", "certified, norm matrix")
MARKS = {"attention": "o", "block": "s"}


def draw_chart(summary: Mapping[str, Columns], path: Path) -> Path:
    """Draw five panels of medians, with a thin line up to the worst of each, in log scale, and return the path."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 6.4), dpi=DPI)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 3, left=0.07, right=0.985, top=0.87, bottom=0.14, wspace=0.28, hspace=0.38)
        figure.text(0.07, 0.955, "Upper bounds of a Hessian's norm, divided by the norm", fontsize=11, color=INK)
        _legend(figure)
        for k, panel in enumerate(("attention", "block")):
            axes = figure.add_subplot(grid[0, k])
            _points(axes, summary[panel], DRAWN)
            _dress(axes, {"attention": "self-attention", "block": "post-norm block"}[panel])
        axes = figure.add_subplot(grid[0, 2])
        _lines(axes, summary["size"])
        _dress(axes, "by width d = L, at initialisation")
        axes = figure.add_subplot(grid[1, 0])
        _lines(axes, summary["training"])
        _dress(axes, "by steps of training")
        axes = figure.add_subplot(grid[1, 1:])
        _points(axes, summary["placement"], DRAWN)
        axes.tick_params(axis="x", labelrotation=35)
        _dress(axes, "by norm placement, at initialisation")
        figure.savefig(path, dpi=DPI, metadata=SUFFIXES[path.suffix])
    return path


def _legend(figure: Figure) -> None:
    x = 0.07
    for kind in DRAWN:
        figure.text(x, 0.922, "\u25a0 " + kind.removeprefix("certified, "), fontsize=8, color=COLOURS[kind])
        x += 0.022 + 0.0085 * len(kind.removeprefix("certified, "))
    note = "dot: median, line: up to the worst; where two modules share a panel, circles are attention and squares the block"
    figure.text(x + 0.01, 0.922, note, fontsize=7, color=FAINT)


def _points(axes: Axes, columns: Columns, kinds: tuple[str, ...]) -> None:
    """Medians of every column beside each other, each with a line to its worst."""
    for k, kind in enumerate(kinds):
        for at, column in enumerate(columns.values()):
            if kind not in column:
                continue
            median, worst = column[kind]
            x = at + 0.22 * (k - (len(kinds) - 1) / 2)
            axes.plot([x, x], [median, worst], color=COLOURS[kind], linewidth=1.0, alpha=0.6)
            axes.plot([x], [median], "o", color=COLOURS[kind], markersize=4)
            if kind == "certified, norm matrix" and len(columns) > 6:
                continue  # no room for one more number
            axes.annotate(_short(median), (x, median), (0, -8), textcoords="offset points", ha="center", fontsize=5, color=FAINT)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_xlim(-0.6, len(columns) - 0.4)


def _short(value: float) -> str:
    """Return two significant digits, written out up to a million."""
    return f"{value:.2g}" if value < 100 or value >= 1e6 else f"{float(f'{value:.2g}'):,.0f}"


def _lines(axes: Axes, columns: Columns) -> None:
    """Medians against the number that a column's name ends with, a line for each module and kind."""
    numbers = sorted({int(name.split()[1]) for name in columns})
    for module, mark in MARKS.items():
        for kind in DRAWN:
            own = {int(n.split()[1]): c[kind][0] for n, c in columns.items() if n.split()[0] == module and kind in c}
            found = [(k, own[number]) for k, number in enumerate(numbers) if number in own]
            axes.plot(*zip(*found, strict=True), f"{mark}-", color=COLOURS[kind], markersize=4, linewidth=1.0)
    axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])


def _dress(axes: Axes, title: str) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(axes.get_ylim()[1] ** -0.12, 0.5))  # room for the numbers below 1
    axes.axhline(1.0, color=INK, linewidth=0.6)
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.tick_params(labelsize=7, length=2)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
