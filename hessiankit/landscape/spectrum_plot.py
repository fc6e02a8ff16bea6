"""The picture of a spectrum: its density over a linear and a logarithmic axis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from hessiankit.curvature.plot_frame import FAINT, INK, STYLE, Picture, check_suffix, write_picture
from hessiankit.landscape.density import Density

WHO = "Spectrum.plot"
UPPER, LOWER, BULK = "#d55e00", "#0072b2", "#8c8c8c"
DECADES = 6  # of a density, below its largest value


@dataclass(frozen=True)
class FoundValues:
    """Eigenvalues to mark.

    Attributes:
        values: In descending order.
        top: How many are of the upper end.
        outliers: How many of these are above the widest gap.
    """

    values: np.ndarray
    top: int
    outliers: int


def plot(found: FoundValues, linear: Density, log: Density, path: Path | str | None, title: str) -> Picture:
    """Draw both densities of a spectrum; see :meth:`hessiankit.landscape.Spectrum.plot`."""
    if path is not None:
        check_suffix(WHO, Path(path))
    with mpl.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Picture(8.6, 3.3)
        figure.text(0.07, 0.955, title, fontsize=8.5, color=INK, va="top")
        draw_linear(figure.add_axes((0.07, 0.15, 0.41, 0.69)), found, linear)
        draw_log(figure.add_axes((0.565, 0.15, 0.41, 0.69)), found, log)
        if path is not None:
            write_picture(WHO, figure, Path(path))
    return figure


def draw_linear(axes: Axes, found: FoundValues, density: Density) -> None:
    """Draw the density over the eigenvalues, in log scale upwards, with marks at those found."""
    x, y, error = (t.numpy() for t in (density.points, density.values, density.standard_errors))
    floor = float(y.max()) * 10.0**-DECADES
    axes.fill_between(x, np.maximum(y - error, floor), np.maximum(y + error, floor), color=BULK, alpha=0.35, linewidth=0)
    axes.plot(x, np.maximum(y, floor), color=INK, linewidth=1.0)
    axes.set_yscale("log")
    axes.set_ylim(floor, 3 * float(y.max()))
    axes.set_xlabel("eigenvalue", fontsize=8)
    axes.set_ylabel("density", fontsize=8)
    axes.tick_params(labelsize=7.5)
    _marks(axes, found, found.values, floor)


def draw_log(axes: Axes, found: FoundValues, density: Density) -> None:
    """Draw the densities of positive and of negative eigenvalues per decade of their size."""
    assert density.negative is not None
    assert density.negative_errors is not None
    x = density.points.numpy()
    sides = [(density.values, density.standard_errors, INK, "positive")]
    if float(density.negative.max()) > 0:
        sides.append((density.negative, density.negative_errors, LOWER, "negative"))
    top = max(float(values.max()) for values, *_ in sides) or 1.0
    floor = top * 10.0**-DECADES
    for values, errors, colour, label in sides:
        y, error = values.numpy(), errors.numpy()
        band = np.maximum(y - error, floor), np.maximum(y + error, floor)
        axes.fill_between(x, *band, color=colour, alpha=0.25, linewidth=0)
        axes.plot(x, np.maximum(y, floor), color=colour, linewidth=1.0, label=label)
    axes.set(xscale="log", yscale="log", ylim=(floor, 3 * top))
    axes.set_xlabel("|eigenvalue|", fontsize=8)
    axes.set_ylabel("density per decade", fontsize=8)
    axes.tick_params(labelsize=7.5)
    if density.zeros > 0:
        axes.set_title(f"{100 * density.zeros:.3g} % are zero to rounding", fontsize=7.5, color=FAINT, loc="right")
    _marks(axes, found, np.abs(found.values), floor)
    axes.legend(fontsize=7, frameon=False)


def _marks(axes: Axes, found: FoundValues, x: np.ndarray, floor: float) -> None:
    """Mark the found eigenvalues at the foot of the axes, the outliers filled."""
    n, top = found.outliers, found.top
    for part, colour, filled, label in (
        (x[:n], UPPER, True, "above the widest gap"),
        (x[n:top], UPPER, False, "largest"),
        (x[top:], LOWER, False, "smallest"),
    ):
        if len(part):
            face = colour if filled else "none"
            style = {"marker": "o", "s": 14, "facecolors": face, "edgecolors": colour, "linewidths": 0.7, "clip_on": False}
            axes.scatter(part, np.full(len(part), 1.6 * floor), label=label, zorder=3, **style)  # type: ignore[arg-type]
    axes.legend(fontsize=7, frameon=False)
