"""The picture of loss slices: loss, quadratic model, and the steps in which the model holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import MaxNLocator

from hessiankit.curvature.plot_frame import DPI, INK, STYLE, Picture, check_suffix, write_picture

WHO = "LossSlices.plot"
MODEL, ROOM = "#d55e00", "#009e73"
ACROSS = 3  # panels in a row


def plot(
    titles: Sequence[str],
    curves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    radii: Sequence[float],
    path: Path | str | None,
) -> Picture:
    """Draw slices (t, loss, model) side by side; see :meth:`hessiankit.landscape.LossSlices.plot`."""
    if path is not None:
        check_suffix(WHO, Path(path))
    across, down = min(ACROSS, len(curves)), -(-len(curves) // ACROSS)
    wide, high = 3.1 * across + 0.2, 2.4 * down + 0.2
    with mpl.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Picture(figsize=(wide, high), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        for k, (title, (t, loss, model), radius) in enumerate(zip(titles, curves, radii, strict=True)):
            row, column = divmod(k, across)
            place = (3.1 * column + 0.55, high - 2.4 * row - 2.0, 2.4, 1.55)
            axes = figure.add_axes((place[0] / wide, place[1] / high, place[2] / wide, place[3] / high))
            draw_slice(axes, t, loss, model, radius)
            axes.set_title(title, fontsize=6.5, loc="left")
            if k == 0:
                axes.legend(fontsize=6.5, frameon=False, loc="upper center")
        if path is not None:
            write_picture(WHO, figure, Path(path))
    return figure


def draw_slice(axes: Axes, t: np.ndarray, loss: np.ndarray, model: np.ndarray, radius: float) -> None:
    """Draw one slice; the vertical axis is that of the loss."""
    axes.axvspan(-radius, radius, color=ROOM, alpha=0.15, linewidth=0)
    axes.plot(t, loss, color=INK, linewidth=1.2, label="loss")
    axes.plot(t, model, color=MODEL, linewidth=1.0, linestyle="--", label="quadratic model")
    room = 0.1 * float(np.ptp(loss)) or 1.0
    axes.set_ylim(float(loss.min()) - room, float(loss.max()) + room)
    axes.set_xlim(float(t[0]), float(t[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("t", fontsize=7.5, labelpad=1)
    axes.tick_params(labelsize=7)
