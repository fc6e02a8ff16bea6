"""Pictures of a spectrum, and of slices through a loss beside their quadratic model.

Results come as ``Any``: their modules import this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hessiankit.curvature.plot_frame import FAINT, INK, Picture, picture
from hessiankit.landscape.density import Density

ORANGE, BLUE, GREEN, BULK = "#d55e00", "#0072b2", "#009e73", "#8c8c8c"
DECADES = 6  # of a density, below its largest value
ACROSS = 3  # slices in a row


def plot_spectrum(spectrum: Any, linear: Density, log: Density, path: Path | str | None, title: str) -> Picture:
    """Draw both densities of a spectrum; see :meth:`hessiankit.landscape.Spectrum.plot`."""
    with picture("Spectrum.plot", 8.6, 3.3, path) as figure:
        figure.text(0.07, 0.955, title, fontsize=8.5, color=INK, va="top")
        draw_linear(figure.add_axes((0.07, 0.15, 0.41, 0.69)), spectrum, linear)
        draw_log(figure.add_axes((0.565, 0.15, 0.41, 0.69)), spectrum, log)
    return figure


def draw_linear(axes: Axes, spectrum: Any, density: Density) -> None:
    """Draw the density over the eigenvalues, in log scale upwards, with marks at those found."""
    top = float(density.values.max())
    floor = top * 10.0**-DECADES
    _curve(axes, density, density.values, density.standard_errors, floor, INK, BULK, 0.35)
    axes.set(yscale="log", ylim=(floor, 3 * top))
    axes.set_xlabel("eigenvalue", fontsize=8)
    axes.set_ylabel("density", fontsize=8)
    axes.tick_params(labelsize=7.5)
    _marks(axes, spectrum, spectrum.eigenvalues.numpy(), floor)
    axes.legend(fontsize=7, frameon=False)


def draw_log(axes: Axes, spectrum: Any, density: Density) -> None:
    """Draw the densities of positive and of negative eigenvalues per decade of their size."""
    assert density.negative is not None
    assert density.negative_errors is not None
    sides = [(density.values, density.standard_errors, INK, "positive")]
    if float(density.negative.max()) > 0:
        sides.append((density.negative, density.negative_errors, BLUE, "negative"))
    top = max(float(values.max()) for values, *_ in sides) or 1.0
    floor = top * 10.0**-DECADES
    for values, errors, colour, label in sides:
        _curve(axes, density, values, errors, floor, colour, colour, 0.25, label=label)
    axes.set(xscale="log", yscale="log", ylim=(floor, 3 * top))
    axes.set_xlabel("|eigenvalue|", fontsize=8)
    axes.set_ylabel("density per decade", fontsize=8)
    axes.tick_params(labelsize=7.5)
    if density.zeros > 0:
        axes.set_title(f"{100 * density.zeros:.3g} % are zero to rounding", fontsize=7.5, color=FAINT, loc="right")
    axes.legend(fontsize=7, frameon=False, loc="upper left")  # of the lines; the marks are those of the other panel
    _marks(axes, spectrum, spectrum.eigenvalues.abs().numpy(), floor)


def _curve(
    axes: Axes, density: Density, values: Any, errors: Any, floor: float, colour: str, band: str, alpha: float, **style: Any
) -> None:
    x, y, error = density.points.numpy(), values.numpy(), errors.numpy()
    axes.fill_between(x, np.maximum(y - error, floor), np.maximum(y + error, floor), color=band, alpha=alpha, linewidth=0)
    axes.plot(x, np.maximum(y, floor), color=colour, linewidth=1.0, **style)


def _marks(axes: Axes, spectrum: Any, x: np.ndarray, floor: float) -> None:
    """Mark the eigenvalues at the foot of the axes, the outliers filled."""
    n, top = spectrum.outliers, spectrum.top
    for part, colour, face, label in (
        (x[:n], ORANGE, ORANGE, "above the widest gap"),
        (x[n:top], ORANGE, "none", "largest"),
        (x[top:], BLUE, "none", "smallest"),
    ):
        if len(part):
            style = {"marker": "o", "s": 14, "facecolors": face, "edgecolors": colour, "linewidths": 0.7, "clip_on": False}
            axes.scatter(part, np.full(len(part), 1.6 * floor), label=label, zorder=3, **style)  # type: ignore[arg-type]
    if spectrum.preconditioner is not None and spectrum.preconditioner.rule:
        axes.axvline(spectrum.preconditioner.threshold, color=GREEN, linewidth=1.0, linestyle="--", label="threshold")


def plot_slices(slices: Any, path: Path | str | None) -> Picture:
    """Draw the slices side by side, and the plane; see :meth:`hessiankit.landscape.LossSlices.plot`."""
    panels = len(slices) + (slices.plane is not None)
    across, down = min(ACROSS, panels), -(-panels // ACROSS)
    wide, high = 3.1 * across + 0.2, 2.4 * down + 0.2
    with picture("LossSlices.plot", wide, high, path) as figure:
        places = [(3.1 * (k % across) + 0.55, high - 2.4 * (k // across) - 2.0) for k in range(panels)]
        every = [figure.add_axes((x / wide, y / high, 2.4 / wide, 1.55 / high)) for x, y in places]
        for axes, one in zip(every, slices.slices, strict=False):
            draw_slice(axes, one)
            axes.set_title(f"{one.name}: model within {one.tolerance:.0%} for {one.range}", fontsize=6.5, loc="left")
        every[0].legend(fontsize=6.5, frameon=False, loc="upper center")
        if slices.plane is not None:
            draw_plane(every[-1], slices.plane)
            every[-1].set_xlabel(f"t, {slices[0].name}", fontsize=6.5, labelpad=1)
            every[-1].set_ylabel(f"t, {slices[1].name}", fontsize=6.5, labelpad=1)
    return figure


def draw_slice(axes: Axes, one: Any) -> None:
    """Draw one slice with its model and the radius in which that holds; the vertical axis is that of the loss."""
    t, loss = one.t.numpy(), one.losses.numpy()
    axes.axvspan(-one.radius, one.radius, color=GREEN, alpha=0.15, linewidth=0)
    axes.plot(t, loss, color=INK, linewidth=1.2, label="loss")
    axes.plot(t, one.quadratic.numpy(), color=ORANGE, linewidth=1.0, linestyle="--", label="quadratic model")
    room = 0.1 * float(np.ptp(loss)) or 1.0
    axes.set_ylim(float(loss.min()) - room, float(loss.max()) + room)
    axes.set_xlim(float(t[0]), float(t[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("t", fontsize=7.5, labelpad=1)
    axes.tick_params(labelsize=7)


def draw_plane(axes: Axes, plane: Any) -> None:
    """Draw contours of loss and model at the same levels, t_1 on the horizontal axis."""
    t = plane.t.numpy()
    levels = MaxNLocator(8).tick_values(float(plane.losses.min()), float(plane.losses.max()))
    for values, color, style in ((plane.losses, INK, "solid"), (plane.quadratic, ORANGE, "dashed")):
        lines = axes.contour(t, t, values.numpy().T, levels=levels, colors=color, linewidths=0.9, linestyles=style)
        if style == "solid":
            axes.clabel(lines, fontsize=5.5, inline_spacing=2)
    axes.plot(0.0, 0.0, marker="+", color=INK, markersize=5)
    axes.set_title("contours: loss, and the model's dashed", fontsize=6.5, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(labelsize=7)
