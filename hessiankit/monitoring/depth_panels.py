"""Panels over the depth of a model: the diagnostics of The Curse of Depth, layer by layer."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hessiankit.drawing.plot_frame import FAINT, INK
from hessiankit.monitoring.log import MonitorLog
from hessiankit.monitoring.panels import log_scale, over_steps

STEPS_SHOWN = 5
"""Lines of a panel over layers."""


def variance(axes: Axes, log: MonitorLog) -> None:
    """Variance over features of the stream, averaged over tokens, a line for each layer (The Curse of Depth, Figures 4 and 8)."""
    over_steps(axes, log, "variance of the residual stream, by layer")
    values = log.series("depth", "stream", "variance")
    for layer, colour in enumerate(_shades(values.shape[1])):
        axes.plot(log.steps, values[:, layer], color=colour, linewidth=1.1, clip_on=False)
    log_scale(axes, values)
    _shallow_to_deep(axes, values.shape[1], "after block")


def angles(axes: Axes, log: MonitorLog) -> None:
    """Angular distances of all pairs of layers at the last step (Figure 2, without the authors' rescaling of each row)."""
    at, values = _last(log, "depth", "angles", "all")
    L = values.shape[0] - 1
    shown = np.full((L, L), np.nan)
    for n in range(1, L + 1):
        shown[n - 1, : L + 1 - n] = np.diagonal(values, n)
    axes.set_title(f"angular distance $d(x_l, x_{{l+n}})$, step {at}", fontsize=9, loc="left")
    axes.grid(False)
    drawn = axes.imshow(
        shown, cmap=mpl.colormaps["viridis_r"], origin="lower", aspect="auto", extent=(0.5, L + 0.5, 0.5, L + 0.5)
    )
    axes.set_xlabel("layer $l$", fontsize=8, labelpad=1)
    axes.set_ylabel("$n$", fontsize=8, labelpad=1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    bar = axes.figure.colorbar(drawn, ax=axes, fraction=0.06, pad=0.04)
    bar.ax.tick_params(labelsize=7, length=2)


def drop(axes: Axes, log: MonitorLog) -> None:
    """What the loss gains with one block removed (Figure 2), for a few steps."""
    _along_depth(axes, log, "rise of the loss without one block", log.entries("depth", "drop", "loss_change"))
    axes.axhline(0.0, color=INK, linewidth=0.6)


def jacobian(axes: Axes, log: MonitorLog) -> None:
    """How far each block is from the identity, for a few steps."""
    title = r"distance from the identity, $\|J_l - I\|_F / \sqrt{n}$"
    found = [None if x is None else [one["value"] for one in x] for x in log.entries("depth", "jacobians", "rms")]
    _along_depth(axes, log, title, found)
    log_scale(axes, *(np.asarray(x, dtype=float) for x in found if x is not None))


def hessian(axes: Axes, log: MonitorLog) -> None:
    """lambda_max of the Hessian in each block's parameters."""
    _curvature(axes, log, r"$\lambda_{\max}$ of the Hessian of each block", "hessian")


def gauss_newton(axes: Axes, log: MonitorLog) -> None:
    """lambda_max of the Gauss-Newton matrix in each block's parameters."""
    _curvature(axes, log, r"$\lambda_{\max}$ of the Gauss-Newton matrix of each block", "ggn")


def _curvature(axes: Axes, log: MonitorLog, title: str, kind: str) -> None:
    found = [None if x is None else [one["value"] for one in x] for x in log.entries("depth", kind, "top")]
    _along_depth(axes, log, title, found)
    log_scale(axes, *(np.asarray(x, dtype=float) for x in found if x is not None))


def _along_depth(axes: Axes, log: MonitorLog, title: str, found: list[Any]) -> None:
    """One line over the layers for each of a few steps, the first and the last among them."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("layer", fontsize=8, labelpad=1)
    there = [k for k, values in enumerate(found) if values is not None]
    chosen = [there[k] for k in np.unique(np.linspace(0, len(there) - 1, STEPS_SHOWN).round().astype(int))]
    axes.text(1.04, 1.0, "step", transform=axes.transAxes, fontsize=7.5, color=FAINT, va="top")
    for row, (k, colour) in enumerate(zip(chosen, _shades(len(chosen)), strict=True), start=1):
        values = np.asarray(found[k], dtype=float)
        axes.plot(np.arange(1, len(values) + 1), values, color=colour, linewidth=1.2, marker="o", markersize=3)
        style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 7.5, "va": "top"}
        axes.text(1.04, 1.0 - 0.09 * row, f"\u25cf {log.steps[k]:,}", color=colour, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)


def _last(log: MonitorLog, *keys: str) -> tuple[int, np.ndarray]:
    found = [(record["step"], x) for record, x in zip(log.records, log.entries(*keys), strict=True) if x is not None]
    return found[-1][0], np.asarray(found[-1][1], dtype=float)


def _shades(count: int) -> np.ndarray:
    """Return colours from pale and shallow to dark and deep, which differ in lightness too."""
    return mpl.colormaps["viridis_r"](np.linspace(0.12, 1.0, count))


def _shallow_to_deep(axes: Axes, count: int, what: str) -> None:
    """Draw a key: one patch a layer, from 0, the embedding, on."""
    key = axes.inset_axes((1.05, 0.0, 0.045, 1.0))
    key.imshow(_shades(count)[:, None, :], origin="lower", aspect="auto", extent=(0, 1, -0.5, count - 0.5))
    key.set_xticks([])
    key.yaxis.tick_right()
    key.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    key.tick_params(labelsize=7, length=2)
    key.set_ylabel(what, fontsize=7.5, color=FAINT)
    key.yaxis.set_label_position("right")
