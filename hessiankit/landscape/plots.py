"""Pictures of a spectrum, and of slices through a loss beside their quadratic model.

Results come as ``Any``: their modules import this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hessiankit.curvature.plot_frame import FAINT, INK, OKABE_ITO, Picture, panels
from hessiankit.landscape.density import Density

BLUE, ORANGE, GREEN, BULK = OKABE_ITO[1], OKABE_ITO[2], OKABE_ITO[3], OKABE_ITO[7]
DECADES = 6  # of a density, below its largest value
Curve = tuple[Any, Any, str, str, float, str]  # density, standard errors, colour, colour and opacity of the band, name


def plot_spectrum(spectrum: Any, linear: Density, log: Density, path: Path | str | None, title: str) -> Picture:
    """Draw both densities of a spectrum; see :meth:`hessiankit.landscape.Spectrum.plot`."""
    with panels("Spectrum.plot", 2, title, path) as (figure, (left, right)):
        curves: list[Curve] = [(linear.values, linear.standard_errors, INK, BULK, 0.35, "")]
        _draw_density(left, spectrum, linear, spectrum.eigenvalues, curves)
        left.set(xlabel="eigenvalue", ylabel="density")
        left.legend(fontsize=7, frameon=False)

        curves = [(log.values, log.standard_errors, INK, INK, 0.25, "positive")]
        if log.negative is not None and float(log.negative.max()) > 0:
            curves.append((log.negative, log.negative_errors, BLUE, BLUE, 0.25, "negative"))
        _draw_density(right, spectrum, log, spectrum.eigenvalues.abs(), curves)
        right.set(xscale="log", xlabel="|eigenvalue|", ylabel="density per decade")
        right.legend(handles=right.lines[: len(curves)], fontsize=7, frameon=False, loc="upper left")
        if log.zeros > 0:
            right.set_title(f"{100 * log.zeros:.3g} % are zero to rounding", fontsize=7.5, color=FAINT, loc="right")
    return figure


def _draw_density(axes: Axes, spectrum: Any, density: Density, eigenvalues: Any, curves: list[Curve]) -> None:
    """Draw densities with their errors in log scale upwards, and marks at the eigenvalues, at the outliers filled."""
    top = max(float(values.max()) for values, *_ in curves) or 1.0
    floor = top * 10.0**-DECADES
    x = density.points.numpy()
    for values, errors, colour, band, alpha, label in curves:
        y, error = values.numpy(), errors.numpy()
        axes.fill_between(x, np.maximum(y - error, floor), np.maximum(y + error, floor), color=band, alpha=alpha, linewidth=0)
        axes.plot(x, np.maximum(y, floor), color=colour, linewidth=1.0, label=label or None)
    axes.set(yscale="log", ylim=(floor, 3 * top))
    n, upper, marks = spectrum.outliers, spectrum.top, eigenvalues.numpy()
    for part, colour, face, label in (
        (marks[:n], ORANGE, ORANGE, "above the widest gap"),
        (marks[n:upper], ORANGE, "none", "largest"),
        (marks[upper:], BLUE, "none", "smallest"),
    ):
        if len(part):
            style = {"marker": "o", "s": 14, "facecolors": face, "edgecolors": colour, "linewidths": 0.7, "clip_on": False}
            axes.scatter(part, np.full(len(part), 1.6 * floor), label=label, zorder=3, **style)  # type: ignore[arg-type]
    if spectrum.preconditioner is not None and spectrum.preconditioner.rule:
        axes.axvline(spectrum.preconditioner.threshold, color=GREEN, linewidth=1.0, linestyle="--", label="threshold")


def plot_slices(slices: Any, path: Path | str | None) -> Picture:
    """Draw the slices side by side, and the plane; see :meth:`hessiankit.landscape.LossSlices.plot`."""
    with panels("LossSlices.plot", len(slices) + (slices.plane is not None), "", path) as (figure, all_axes):
        for axes, one in zip(all_axes, slices.slices, strict=False):
            draw_slice(axes, one)
            axes.set_title(f"{one.name}: model within {one.tolerance:.0%} for {one.range}", fontsize=7.5, loc="left")
        all_axes[0].legend(fontsize=7.5, frameon=False, loc="upper center")
        if slices.plane is not None:
            draw_plane(all_axes[-1], slices.plane)
            all_axes[-1].set(xlabel=f"t, {slices[0].name}", ylabel=f"t, {slices[1].name}")
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
    axes.set_xlabel("t")


def draw_plane(axes: Axes, plane: Any) -> None:
    """Draw contours of loss and model at the same levels, t_1 on the horizontal axis."""
    t = plane.t.numpy()
    levels = MaxNLocator(8).tick_values(float(plane.losses.min()), float(plane.losses.max()))
    for values, color, style in ((plane.losses, INK, "solid"), (plane.quadratic, ORANGE, "dashed")):
        lines = axes.contour(t, t, values.numpy().T, levels=levels, colors=color, linewidths=0.9, linestyles=style)
        if style == "solid":
            axes.clabel(lines, fontsize=5.5, inline_spacing=2)
    axes.plot(0.0, 0.0, marker="+", color=INK, markersize=5)
    axes.set_title("contours: loss, and the model's dashed", fontsize=7.5, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(5))
