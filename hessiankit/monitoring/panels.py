"""Panels over the steps of training: sharpness and norms by block type, loss, top eigenvalue."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from hessiankit.drawing.plot_frame import FAINT, INK
from hessiankit.drawing.plot_layout import spread
from hessiankit.monitoring.log import MonitorLog

COLOURS = {
    "Emb": "#0072b2",
    "QK": "#e69f00",
    "FFN": "#009e73",
    "VO": "#d55e00",
    "Norm": "#000000",
    "Head": "#cc79a7",
    "Other": "#8c8c8c",
}
"""Okabe and Ito's colours, which readers of every colour vision tell apart."""
MARKS = {"Emb": "o", "QK": "s", "FFN": "^", "VO": "v", "Norm": "D", "Head": "P", "Other": "X"}


def dress(axes: Axes) -> None:
    """Give axes the look that all panels have."""
    axes.tick_params(which="both", labelsize=7.5)
    axes.tick_params(length=2.5)
    axes.grid(color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def over_steps(axes: Axes, log: MonitorLog, title: str) -> None:
    """Steps along the lower edge: in log scale from 1 on where measurements crowd at the beginning."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8, labelpad=1)
    steps = log.steps
    early = np.median(steps) < 0.25 * steps.max()
    if early:
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if steps.max() > steps.min():
        axes.set_xlim(steps.min(), steps.max())


def log_scale(axes: Axes, *arrays: np.ndarray) -> None:
    """Use a log scale where every number that is there is positive and finite."""
    values = np.concatenate([np.ravel(a) for a in arrays])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0:
        axes.set_yscale("log")


def name_ends(axes: Axes, ends: dict[str, tuple[float, str]]) -> None:
    """Write names at the right ends of lines, moved apart where they would lie on each other."""
    axes.autoscale_view()
    transform = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    order = [name for name in sorted(ends, key=lambda name: ends[name][0]) if np.isfinite(ends[name][0])]
    heights = [float(transform.transform((right, ends[name][0]))[1]) for name in order]
    for name, own, at in zip(order, heights, spread(heights, [0.075] * len(order), 0.0, 1.0) if order else [], strict=True):
        axes.annotate(
            name, (1.0, own), (1.05, at), xycoords="axes fraction", textcoords="axes fraction", va="center", fontsize=8,
            color=ends[name][1], annotation_clip=False, arrowprops={"arrowstyle": "-", "color": ends[name][1], "linewidth": 0.4},
        )  # fmt: skip


def _by_type(axes: Axes, log: MonitorLog, values: dict[str, np.ndarray]) -> None:
    ends = {}
    for name, value in values.items():
        there = np.isfinite(value)
        colour = COLOURS.get(name, FAINT)
        style: dict[str, Any] = {"color": colour, "linewidth": 1.2, "marker": MARKS.get(name, "."), "markersize": 3.2}
        axes.plot(log.steps[there], value[there], clip_on=False, zorder=3, **style)
        if there.any():
            ends[name] = (float(value[there][-1]), colour)
    log_scale(axes, *values.values())
    name_ends(axes, ends)


def sharpness(axes: Axes, log: MonitorLog) -> None:
    """Average sharpness of each block type, with its intervals (The Sharpness Disparity Principle, Figure 3)."""
    over_steps(axes, log, "average sharpness, with its intervals")
    found = log.sharpness
    for name, one in found.items():
        there = np.isfinite(one.low) & np.isfinite(one.high) & (one.low > 0)
        axes.fill_between(
            log.steps[there], one.low[there], one.high[there], color=COLOURS.get(name, FAINT), alpha=0.2, linewidth=0
        )
    _by_type(axes, log, {name: one.value for name, one in found.items()})


def norms(axes: Axes, log: MonitorLog) -> None:
    """Norm of all parameters of each block type (Figure 8)."""
    over_steps(axes, log, "norm of the parameters")
    _by_type(axes, log, log.norms)


def loss(axes: Axes, log: MonitorLog) -> None:
    """Loss on the data of the monitor."""
    over_steps(axes, log, "loss, nats")
    axes.plot(log.steps, log.series("loss"), color=INK, linewidth=1.2, marker="o", markersize=3, clip_on=False)


def eigenvalue(axes: Axes, log: MonitorLog) -> None:
    """Top eigenvalue of the Hessian of the loss; the band is its residual, within which an eigenvalue lies."""
    over_steps(axes, log, r"$\lambda_{\max}$ of the Hessian, $\pm$ its residual")
    value, residual = log.series("eigenvalue", "value"), log.series("eigenvalue", "residual")
    axes.fill_between(log.steps, value - residual, value + residual, color="#0072b2", alpha=0.25, linewidth=0)
    axes.plot(log.steps, value, color="#0072b2", linewidth=1.2, marker="o", markersize=3, clip_on=False)
    log_scale(axes, value - residual)
