"""The picture of a comparison: loss against learning rate, loss curves, paired differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hessiankit.drawing.plot_frame import DPI, FAINT, INK, STYLE, check_suffix, write_picture
from hessiankit.tuning.report import TuneReport

# Okabe and Ito's palette, told apart with every kind of colour vision; dashes tell the arms apart without colour
COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A", "#6B4C9A")
DASHES = ("-", "-", "-", "--", "--", "-.", "-.", ":", ":")
MARKS = ("o", "s", "^")
ROOM = 0.5
"""Nats a byte above the best that the pictures have room for."""


def draw(report: TuneReport, path: Path) -> Path:
    """Write the picture and return its path.

    Raises:
        InputError: If the suffix is not one of ``.png``, ``.svg``, ``.pdf``, or the file cannot be written.
    """
    check_suffix("tune-lr", path)
    with mpl.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(11.0, 3.9), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        places = ((0.045, 0.24), (0.335, 0.24), (0.8, 0.19))  # left edge and width; the names stand before the last one
        left, middle, right = (figure.add_axes((x, 0.13, width, 0.74)) for x, width in places)
        _sweeps(left, report)
        _curves(middle, report)
        _differences(right, report)
        for axes in (left, middle, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(which="both", labelsize=7, colors=INK, width=0.6, length=2.5)
        write_picture("tune-lr", figure, path)
    return path


def _sweeps(axes: Axes, report: TuneReport) -> None:
    """Final loss against learning rate: a dot a run, lines through the means, a ring around the choice.

    What is higher than there is room for, or diverged, lies on the upper edge.
    """
    sweeps = report.comparison.sweeps
    finite = [x for one in sweeps for of in one.losses.values() for x in of.values() if math.isfinite(x)]
    low = min(finite)
    top = min(max(finite), low + ROOM)
    room = max(top - low, 1e-3)
    for one, colour, mark in zip(sweeps, COLOURS, MARKS, strict=False):
        dots = [(lr, min(x, top)) for lr, of in one.losses.items() for x in of.values()]
        means = {lr: min(math.fsum(of.values()) / len(of), top) for lr, of in sorted(one.losses.items())}
        axes.plot(*zip(*dots, strict=True), mark, color=colour, markersize=3, alpha=0.6, markeredgewidth=0)
        axes.plot(list(means), list(means.values()), color=colour, linewidth=1.2)
        axes.plot([one.best], [means[one.best]], "o", color=colour, markersize=9, fillstyle="none", markeredgewidth=1.1)
        axes.plot([], [], mark, color=colour, linestyle="-", markersize=3.5, linewidth=1.2, label=one.name)
    axes.set_xscale("log")
    axes.set_ylim(low - 0.06 * room, top + 0.3 * room)  # the legend stands above
    axes.legend(fontsize=6.8, frameon=False, loc="upper left", handlelength=1.8, borderaxespad=0.2)
    _dress(axes, "searches: final loss by learning rate", "learning rate (of the norms)", "held-out loss (nats/byte)")


def _curves(axes: Axes, report: TuneReport) -> None:
    """Mean loss of each arm with the band of its seeds, from the first fifth of the budget on."""
    ends = []
    for (_, runs), colour, dash in zip(report.comparison.arms, COLOURS, DASHES, strict=False):
        columns = list(zip(*(run.losses for run in runs), strict=True))
        points = [(s, c) for s, c in zip(runs[0].steps, columns, strict=True) if all(map(math.isfinite, c))]
        steps = [s for s, _ in points]
        axes.plot(steps, [math.fsum(c) / len(c) for _, c in points], color=colour, linestyle=dash, linewidth=1.2)
        axes.fill_between(steps, [min(c) for _, c in points], [max(c) for _, c in points], color=colour, alpha=0.12, linewidth=0)
        ends += [x for s, c in points for x in c if s >= report.setting.steps / 5]
    low = min(ends)
    axes.set_xlim(report.setting.steps / 5, report.setting.steps)
    axes.set_ylim(low - 0.03, min(max(ends), low + 1.5 * ROOM))
    _dress(axes, "loss curves: mean and range of the seeds", "step", "held-out loss (nats/byte)")


def _differences(axes: Axes, report: TuneReport) -> None:
    """A row an arm: mean paired difference with its interval; the name carries the line that the curves have."""
    rows = report.rows
    ends = [x for row in rows if row.difference for x in (row.difference.low, row.difference.high) if math.isfinite(x)]
    left, right = max(min(ends, default=-0.1), -ROOM), min(max(ends, default=0.1), ROOM)
    room = max(right, 0.0) - min(left, 0.0) or 0.1
    left, right = min(left, 0.0) - 0.04 * room, max(right, 0.0) + 0.04 * room
    across = axes.get_yaxis_transform()  # x in fractions of the width
    for k, (row, colour, dash) in enumerate(zip(rows, COLOURS, DASHES, strict=False)):
        axes.text(-0.16, k, row.arm.name, transform=across, ha="right", va="center", fontsize=7.0)
        line: dict[str, Any] = {"color": colour, "linewidth": 1.4}
        axes.plot([-0.13, -0.02], [k, k], transform=across, linestyle=dash, clip_on=False, **line)
        one = row.difference
        if row.diverged or (one is not None and one.value > right):
            text = f"diverged in {row.diverged} of {len(row.reached)}" if row.diverged or one is None else f"{one.value:+.2f} →"
            axes.text(0.98, k, text, transform=across, ha="right", va="center", fontsize=6.5, color=FAINT)
        elif one is not None:
            axes.plot([max(one.low, left), min(one.high, right)], [k, k], solid_capstyle="butt", **line)
            axes.plot([one.value], [k], "o", color=colour, markersize=4)
            cut = [(left, "<")] * (one.low < left) + [(right, ">")] * (one.high > right)
            for x, mark in cut:  # the interval goes on
                axes.plot([x], [k], mark, color=colour, markersize=4, clip_on=False)
    axes.axvline(0.0, color=INK, linewidth=0.6)
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    _dress(axes, f"paired difference, {100 * report.confidence:g} % interval", "nats/byte more than tuned AdamW", "")


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=8.5, loc="left", pad=8)
    axes.set_xlabel(x, fontsize=7.5, labelpad=3)
    axes.set_ylabel(y, fontsize=7.5, labelpad=3)
