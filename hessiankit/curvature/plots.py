"""Pictures of a Hessian: the heat map of its entries, the map of its block norms, two heat maps side by side.

Every picture is a Matplotlib figure that needs no display. With a ``path`` it is written as ``.png``, ``.svg`` or
``.pdf``, or the numbers behind it as ``.csv``; the same numbers give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from torch import Tensor

from hessiankit.curvature.plot_frame import (
    DPI,
    FAINT,
    INK,
    OKABE_ITO,
    POINT,
    STYLE,
    Frame,
    Picture,
    colour_range,
    picture,
    pooled,
    short_labels,
)
from hessiankit.support.errors import InputError
from hessiankit.support.tables import short_names

Sizes: TypeAlias = Sequence[int] | Mapping[str, slice]
Limits: TypeAlias = tuple[float, float]
_MARKS = "os^vDPX"
VISIBLE = 1e-3
"""Share of the pixels from which on grey ones get a key: in a map of 720 pixels a square of 23."""


def heatmap(
    matrix: Tensor | np.ndarray,
    names: Sequence[str],
    sizes: Sizes,
    *,
    title: str | None = None,
    pixels: int = 960,
    **options: Any,
) -> Picture:
    """Draw the entries of a parameter Hessian in log scale, block by block; the options are those of :func:`side_by_side`.

    Closing the Curvature Gap, Figures 3 and 4.

    >>> picture = heatmap(np.eye(3), ["blocks.0.norm_1.weight", "b"], [2, 1])
    >>> [text.get_text() for text in picture.axes[0].texts][::2]
    ['$\\\\gamma_1$', 'b']
    """
    return side_by_side([matrix], names, sizes, titles=[title or ""], pixels=pixels, **options)


def side_by_side(
    matrices: Sequence[Tensor | np.ndarray],
    names: Sequence[str],
    sizes: Sizes,
    *,
    titles: Sequence[str] = ("At initialisation", "After training"),
    title: str | None = None,
    path: Path | str | None = None,
    labels: Sequence[str] | None = None,
    limits: Limits | None = None,
    zero_below: float | None = None,
    pixels: int = 720,
    ax: Axes | None = None,
) -> Picture:
    """Draw the entries of Hessians of the same parameters next to each other, in one logarithmic colour scale.

    All blocks are drawn equally large, so that a bias can be seen beside a matrix. A pixel shows the largest entry that it
    covers. An entry that is zero to rounding is grey, never a colour of the scale.

    Args:
        matrices: P x P each.
        names: Names of the blocks, in the order of the rows.
        sizes: Rows of each block, or the slice of each name (``Hessian.slices``).
        titles: One above each map.
        title: Line above all maps.
        path: Where to write the picture; its suffix chooses the format, and ``.csv`` the numbers alone.
        labels: Labels of the blocks; by default the papers' letters (:func:`~.plot_frame.short_labels`).
        limits: Ends of the colour scale; by default the largest entry, and the one that 0.5 % lie below.
        zero_below: Entries up to this size count as zero; by default the rounding error of the largest one.
        pixels: Side of one map; more are taken where the labels need them.
        ax: Axes to draw all of it into; their figure is returned.

    Raises:
        InputError: A matrix is not square, not finite, or does not fit the names and sizes, or a title is missing.
    """
    if len(titles) != len(matrices) or not matrices:
        raise InputError(f"side_by_side: {len(matrices)} matrices but {len(titles)} titles; pass one title for each matrix")
    rows = _rows_of(names, sizes)
    arrays = [_array(matrix, "heatmap", sum(rows)) for matrix in matrices]
    shown_labels = short_labels(names) if labels is None else list(labels)
    if len(shown_labels) != len(names):
        raise InputError(f"heatmap: {len(shown_labels)} labels for {len(names)} blocks; pass one for each")
    if limits is not None and not 0 < limits[0] < limits[1] < math.inf:
        raise InputError(f"heatmap: limits={limits} are not the ends of a log scale; pass two numbers 0 < low < high")
    cell = max(pixels // len(names), 24, -(-100 // len(names)))  # room for the labels and the colour bar
    zero = max(map(_rounding, arrays)) if zero_below is None else zero_below
    maps = [pooled(array, rows, cell) for array in arrays]
    coloured = np.concatenate([m[m > zero] for m in maps])
    low, high = limits or colour_range(coloured)
    zeros = coloured.size < (1 - VISIBLE) * sum(m.size for m in maps)
    with mpl.rc_context(STYLE):
        frame = Frame(titles, cell, shown_labels, title, ax)
        for k, values in enumerate(maps):
            mappable = frame.draw(k, np.ma.masked_less_equal(values, zero), low, high, min(0.7, cell / 60))
        frame.colour_bar(mappable, r"$|H_{ij}|$", coloured, zeros)
        covered, grey = -(-max(rows) // cell), f"grey: 0 to rounding, below {zero:.1e}" if zero else "grey: 0"
        pixel_note = f"each pixel: the largest of up to {covered} × {covered}" if covered > 1 else ""
        about = [
            f"{sum(rows)} × {sum(rows)} entries in log scale",
            "blocks drawn equally large",
            pixel_note,
            grey if zeros else "",
        ]
        frame.figure.caption = "; ".join(filter(None, about)) + "."
        header = ("panel", "row", "column", "rows", "columns", "max_abs", "rms", "frobenius", "zero_fraction")
        table = (row for t, a in zip(titles, arrays, strict=True) for row in _summary(t, a, names, rows, zero))
        frame.write(path, header, table)
    return frame.figure


def block_norms_map(
    norms: Tensor | np.ndarray | Sequence[Sequence[float]],
    names: Sequence[str],
    *,
    title: str | None = None,
    path: Path | str | None = None,
    norm: str = r"$\|H_{ij}\|_2$",
) -> Picture:
    """Draw the norms (n, n) of the blocks of a Hessian as coloured cells with numbers in them; see :func:`side_by_side`.

    ``norm`` says at the colour bar which norm it is. An InputError names what is no finite number from zero on.

    >>> [text.get_text() for text in block_norms_map([[45.02, 0], [0.001, 0.17]], ["a", "b"]).axes[0].texts][-4:]
    ['45', '0', '1.0e-3', '0.17']
    """
    values = _array(norms, "block_norms_map", len(names))
    if values.min() < 0:
        raise InputError(f"block_norms_map: a norm is {values.min():g}; expected none below 0")
    count = len(names)
    cell = int(DPI * min(max(7.0 / count, 0.36), 0.62))
    zero = _rounding(values)
    masked = np.ma.masked_less_equal(values, zero)
    low, high = colour_range(values[values > zero], outside=0.0)
    with mpl.rc_context(STYLE):
        frame = Frame([""], cell, short_labels(names), title)
        mappable = frame.draw(0, masked, low, high, 0.7)
        rgb = mappable.to_rgba(masked)[..., :3]
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        luminance = linear @ (0.2126, 0.7152, 0.0722)
        for i, j in np.ndindex(count, count):
            text = "0" if values[i, j] <= zero else _number(values[i, j])
            ink = INK if luminance[i, j] > 0.18 else "white"  # the better contrast of the two, as WCAG measures it
            place = (cell * (j + 0.5), cell * (i + 0.5))
            frame.axes[0].text(*place, text, ha="center", va="center", fontsize=min(9.0, 0.27 * cell / POINT), color=ink)
        frame.colour_bar(mappable, norm, values[values > zero], bool((values <= zero).any()))
        rows = [(names[i], names[j], f"{values[i, j]:.9g}") for i, j in np.ndindex(count, count)]
        frame.write(path, ("row", "column", "norm"), rows)
    return frame.figure


def pair_labels(pairs: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return short labels of block pairs "row x column" of these parameters; other labels are kept.

    >>> pair_labels(["whole", "a.W_Q x a.W_K"], ["a.W_Q", "a.W_K"])
    ['whole', '$W_Q$, $W_K$']
    """
    endings = short_names(names)
    letters = {name: endings[name] if label == name else label for name, label in zip(names, short_labels(names), strict=True)}
    return [", ".join(letters[part] for part in pair.split(" x ")) if " x " in pair else pair for pair in pairs]


def row_chart(
    caller: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    axis: str,
    title: str,
    path: Path | str | None = None,
    intervals: Sequence[Limits] | None = None,
    line: tuple[float, str] | None = None,
) -> Picture:
    """Draw numbers from 0 on along a logarithmic axis, a row for each label: one series as bars, several as marks.

    NaN is not drawn; 0 and infinity are hollow marks at the ends of the axis. An empty label makes a gap. ``intervals`` are those
    of the first series, NaN where they are not known; ``line`` is a number to draw a vertical line at, and its words in the key.
    The picture is written to ``path``, or the numbers where it ends in ``.csv``.

    >>> chart = row_chart("doc", ["a", "b"], {"S": [1.0, 10.0]}, axis="S", title="")
    >>> [label.get_text() for label in chart.axes[0].get_yticklabels()]
    ['a', 'b']
    """
    values = {name: np.asarray(numbers, dtype=float) for name, numbers in series.items()}
    ends = np.asarray(intervals if intervals is not None else np.full((len(labels), 2), math.nan), dtype=float)
    scaled = np.concatenate([*values.values(), ends.ravel(), [line[0] if line else 0.0]])
    low, high = colour_range(scaled[np.isfinite(scaled)], outside=0.0, span=300)
    low, high = low / 1.5, high * 1.5
    rows = np.arange(len(labels))
    with picture(caller, 6.5, 1.0 + (0.22 if len(values) == 1 else 0.26) * len(labels), path, layout="constrained") as figure:
        axes = figure.subplots()
        for k, (name, numbers) in enumerate(values.items()):
            inside = (numbers > 0) & np.isfinite(numbers)
            mark, colour = _MARKS[k % len(_MARKS)], OKABE_ITO[(k + 1) % len(OKABE_ITO)]
            at = rows + 0.22 * (k - (len(values) - 1) / 2)
            if len(values) == 1:
                axes.barh(rows[inside], numbers[inside], height=0.6, color="0.75")
            else:
                axes.plot(numbers[inside], at[inside], mark, color=colour, markersize=4, label=name)
            for mask, edge in ((numbers == 0, low), (np.isposinf(numbers), high)):
                if mask.any():
                    x = np.full(int(mask.sum()), edge)
                    axes.plot(x, at[mask], mark, color=colour, markersize=4, markerfacecolor="white", clip_on=False, zorder=3)
        has_interval = np.isfinite(ends).all(1) & (ends[:, 1] > ends[:, 0])
        axes.hlines(rows[has_interval], np.maximum(ends[has_interval, 0], low), ends[has_interval, 1], color=INK, linewidth=1.4)
        if line is not None:
            axes.axvline(line[0], color=FAINT, linewidth=0.8, linestyle="--", label=line[1])
        axes.set(xscale="log", xlim=(low, high), ylim=(len(labels) - 0.4, -0.6))
        axes.xaxis.set_minor_formatter(NullFormatter())
        named = [k for k, label in enumerate(labels) if label]
        axes.set_yticks(named, [labels[k] for k in named], fontsize=8)
        axes.set_xlabel(axis, fontsize=8.5)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(title, fontsize=9, loc="left")
        if len(values) > 1:
            axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        columns = [*values.values(), *(ends.T if intervals is not None else ())]
        header = ("row", *values, *(("low", "high") if intervals is not None else ()))
        figure.numbers = header, [(label, *(f"{column[k]:.9g}" for column in columns)) for k, label in enumerate(labels)]
    return figure


def _rows_of(names: Sequence[str], sizes: Sizes) -> list[int]:
    """Return the rows of each block."""
    if isinstance(sizes, Mapping):
        missing = [name for name in names if name not in sizes]
        if missing:
            raise InputError(f"heatmap: no slice for {', '.join(missing)}; pass a slice for every name")
        sizes = [sizes[name].stop - sizes[name].start for name in names]
    if len(names) != len(sizes) or not names or min(sizes) < 1:
        raise InputError(f"heatmap: {len(names)} names but sizes {list(sizes)}; pass how many rows each name has")
    return list(sizes)


def _array(values: Tensor | np.ndarray | Sequence[Sequence[float]], where: str, side: int) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype.itemsize < 4 else values
    array = np.asarray(values)
    if array.shape != (side, side):
        raise InputError(f"{where}: the matrix has shape {array.shape}, expected ({side}, {side}) from the names and sizes")
    array = array if array.dtype.kind == "f" else array.astype(float)
    if count := int((~np.isfinite(array)).sum()):
        raise InputError(f"{where}: {count} entries of the matrix are not finite, expected none; find their cause first")
    return array


def _rounding(array: np.ndarray) -> float:
    """Return the rounding error of the largest entry."""
    return float(np.finfo(array.dtype).eps * np.abs(array).max())


def _number(value: float) -> str:
    """Return two significant digits in at most six characters."""
    for least, decimals in ((9.95, 0), (0.995, 1), (0.0995, 2), (0.00995, 3)):
        if least <= value < 999.5:
            return f"{value:.{decimals}f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _summary(
    title: str, matrix: np.ndarray, names: Sequence[str], sizes: Sequence[int], zero: float
) -> Iterable[tuple[object, ...]]:
    """Yield the table behind a heat map: one line for each block."""
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    for i, j in np.ndindex(len(names), len(names)):
        block = np.abs(matrix[bounds[i] : bounds[i + 1], bounds[j] : bounds[j + 1]]).astype(float)
        frobenius = float(np.linalg.norm(block))
        numbers = (block.max(), frobenius / block.size**0.5, frobenius, float((block <= zero).mean()))
        yield (title, names[i], names[j], *block.shape, *(f"{value:.9g}" for value in numbers))
