"""The picture of loss slices: loss, quadratic model, and the steps in which the model holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hessiankit.curvature.plot_frame import INK, STYLE, Picture, check_suffix, write_picture

WHO = "LossSlices.plot"
MODEL, ROOM = "#d55e00", "#009e73"
ACROSS = 3  # panels in a row


def plot(
    titles: Sequence[str],
    curves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    radii: Sequence[float],
    plane: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    names: Sequence[str],
    path: Path | str | None,
) -> Picture:
    """Draw slices (t, loss, model) side by side, and the plane; see :meth:`hessiankit.landscape.LossSlices.plot`."""
    if path is not None:
        check_suffix(WHO, Path(path))
    panels = len(curves) + (plane is not None)
    across, down = min(ACROSS, panels), -(-panels // ACROSS)
    wide, high = 3.1 * across + 0.2, 2.4 * down + 0.2
    with mpl.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Picture(wide, high)
        places = [(3.1 * (k % across) + 0.55, high - 2.4 * (k // across) - 2.0) for k in range(panels)]
        every = [figure.add_axes((x / wide, y / high, 2.4 / wide, 1.55 / high)) for x, y in places]
        for axes, title, (t, loss, model), radius in zip(every, titles, curves, radii, strict=False):
            draw_slice(axes, t, loss, model, radius)
            axes.set_title(title, fontsize=6.5, loc="left")
        every[0].legend(fontsize=6.5, frameon=False, loc="upper center")
        if plane is not None:
            draw_plane(every[-1], *plane)
            every[-1].set_xlabel(f"t, {names[0]}", fontsize=6.5, labelpad=1)
            every[-1].set_ylabel(f"t, {names[1]}", fontsize=6.5, labelpad=1)
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


def draw_plane(axes: Axes, t: np.ndarray, loss: np.ndarray, model: np.ndarray) -> None:
    """Draw contours of loss and model at the same levels; ``loss[i, j]`` is at t_i on the horizontal axis, t_j on the other."""
    levels = MaxNLocator(8).tick_values(float(loss.min()), float(loss.max()))
    for values, color, style in ((loss, INK, "solid"), (model, MODEL, "dashed")):
        lines = axes.contour(t, t, values.T, levels=levels, colors=color, linewidths=0.9, linestyles=style)
        if style == "solid":
            axes.clabel(lines, fontsize=5.5, inline_spacing=2)
    axes.plot(0.0, 0.0, marker="+", color=INK, markersize=5)
    axes.set_title("contours: loss, and the model's dashed", fontsize=6.5, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(labelsize=7)
