"""The page that a map of a Hessian is drawn on: maps in a row, labels, a colour bar, a caption at the foot."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, NullFormatter

from hessiankit.drawing.plot_layout import spread
from hessiankit.errors import InputError
from hessiankit.files import make_folder, write_bytes

DPI = 200
POINT = DPI / 72
INK = "#1f1f1f"
FAINT = "#5a5a5a"
ZERO = "#a6a6a6"
COLOURS = "viridis"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "cm",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "ytick.color": INK,
    "svg.hashsalt": "hessiankit",
    "svg.fonttype": "path",
}
SUFFIXES: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class Picture(Figure):
    """A Matplotlib figure that also shows itself in a notebook without any backend being chosen."""

    def _repr_png_(self) -> bytes:
        return picture_bytes(self, ".png")


class Frame:
    """Axes and their furniture; every length is a whole pixel, so that one number of a map is one pixel of the picture.

    Args:
        titles: One for each map; empty ones take no room.
        side: Side of a map in pixels.
        labels: Names of the blocks along both axes.
        widths: Pixels of each block.
        title: Above all maps.
        caption: Sentences at the foot.
    """

    def __init__(
        self,
        titles: Sequence[str],
        side: int,
        labels: Sequence[str],
        widths: np.ndarray,
        title: str | None,
        caption: Sequence[str],
    ) -> None:
        if title and len(titles) == 1 and not titles[0]:
            titles, title = [title], None
        self.side, self.labels = side, list(labels)
        self.edges = np.concatenate([[0], np.cumsum(widths)])
        self.centres = (self.edges[1:] + self.edges[:-1]) / 2
        self.font = float(min(10.0, max(6.0, 0.75 * side / len(labels) / POINT)))
        wide, high = _measure(self.labels, self.font)
        line = 1.2 * self.font * POINT
        self.rows = spread(self.centres, np.maximum(high, line).tolist(), 0, side)
        flat = wide + 0.35 * self.font * POINT
        self.upright = bool(flat.sum() > side or (np.ptp(widths) <= 1 and wide.max() + 0.3 * self.font * POINT > widths.max()))
        self.columns = spread(self.centres, (np.full(len(flat), line) if self.upright else flat).tolist(), 0, side)
        moved = max(np.abs(self.rows - self.centres).max(), np.abs(self.columns - self.centres).max())
        self.lead = 40 if moved > 3 else 0
        pad, gap, foot_line = 14, 44, 30
        left = int(wide.max()) + self.lead + 3 * pad
        under = int(wide.max() if self.upright else high.max()) + self.lead + 2 * pad
        maps = len(titles) * side + (len(titles) - 1) * gap
        width = left + maps + 190
        foot = textwrap.wrap("; ".join(caption) + ".", int((width - left - pad) / 11.4)) if caption else []
        below = under + len(foot) * foot_line + (2 * pad if foot else pad)
        above = pad + max(pad, (46 if title else 0) + (48 if any(titles) else 0))
        height = above + side + below
        self.figure = Picture(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        self.axes: list[Axes] = []
        for k, text in enumerate(titles):
            place = ((left + k * (side + gap)) / width, below / height, side / width, side / height)
            axes = self.figure.add_axes(place, xticks=[], yticks=[])
            axes.set_title(text, fontsize=10.5, pad=5)
            self.axes.append(axes)
        self._bar = ((left + maps + 30) / width, below / height, 34 / width, side / height)
        if title:
            self.figure.text((left + maps / 2) / width, 1 - pad / height, title, fontsize=11.5, ha="center", va="top")
        for k, text in enumerate(foot):
            place_y = (below - under - pad - k * foot_line) / height
            self.figure.text(left / width, place_y, text, fontsize=7.2, color=FAINT, va="top")

    def image(self, k: int, values: np.ndarray, low: float, high: float) -> AxesImage:
        """Fill map ``k`` with positive numbers in log scale; masked ones become grey."""
        colours = mpl.colormaps[COLOURS].with_extremes(bad=ZERO)
        extent = (0, self.side, self.side, 0)
        return self.axes[k].imshow(values, cmap=colours, norm=LogNorm(low, high), interpolation="nearest", extent=extent)

    def separate(self, k: int, width: float) -> None:
        """Draw thin lines between the blocks of map ``k``."""
        lines = self.edges[1:-1]
        self.axes[k].hlines(lines, 0, self.side, color="white", linewidth=width)
        self.axes[k].vlines(lines, 0, self.side, color="white", linewidth=width)

    def label(self, k: int) -> None:
        """Write the names below map ``k`` and, for the first map, to its left, with leaders where a name had to move."""
        axes, near, far = self.axes[k], 6, 6 + self.lead
        style: dict[str, Any] = {"fontsize": self.font, "clip_on": False}
        for text, centre, row, column in zip(self.labels, self.centres, self.rows, self.columns, strict=True):
            if self.lead:
                line: dict[str, Any] = {"color": FAINT, "linewidth": 0.5, "clip_on": False}
                bend = [0, -near, -far + 4, -far]
                if k == 0:
                    axes.plot(bend, [centre, centre, row, row], **line)
                axes.plot([centre, centre, column, column], [self.side - d for d in bend], **line)
            if k == 0:
                axes.text(-far - 6, row, text, ha="right", va="center_baseline", **style)
            axes.text(column, self.side + far + 6, text, ha="center", va="top", rotation=90 if self.upright else 0, **style)
        axes.set_xlim(0, self.side)
        axes.set_ylim(self.side, 0)

    def colour_bar(self, mappable: ScalarMappable, label: str, values: np.ndarray, zeros: bool) -> None:
        """Draw the colour bar, a tick a decade, an arrow where values lie beyond its end, a grey square for zeros."""
        low, high = mappable.get_clim()
        assert low is not None
        assert high is not None
        beyond = (bool((values < low).any()), bool((values > high * (1 + 1e-6)).any()))
        extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[beyond]
        x, y, w, h = self._bar
        square = w * self.figure.get_figwidth() / self.figure.get_figheight()
        lift = 1.8 * square if zeros else 0.0
        axes = self.figure.add_axes((x, y + lift, w, h - lift))
        bar = self.figure.colorbar(mappable, cax=axes, extend=extend, extendfrac=0.03)
        bar.set_label(label, fontsize=10, labelpad=4)
        room = int((h - lift) * self.figure.get_figheight() * DPI / (1.5 * 8.5 * POINT))  # labels that do not touch
        axes.yaxis.set_major_locator(LogLocator(10, numticks=max(2, min(20, room))))
        axes.yaxis.set_minor_locator(LogLocator(10, subs=range(2, 10), numticks=20))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8.5, length=3.5, width=0.6)
        axes.tick_params(which="minor", length=1.8, width=0.4)
        if zeros:
            patch = self.figure.add_axes((x, y, w, square), xticks=[], yticks=[], facecolor=ZERO)
            patch.text(1.35, 0.5, "0", fontsize=8.5, ha="left", va="center_baseline", transform=patch.transAxes)

    def save(self, path: Path) -> None:
        """Write the picture in the format that the suffix names, the same bytes every time.

        Raises:
            InputError: The suffix is not one of ``.png``, ``.svg``, ``.pdf``, or the file cannot be written.
        """
        write_picture("plots", self.figure, path)


def picture_bytes(figure: Figure, suffix: str) -> bytes:
    """Return a picture in a format, the same bytes every time."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": STYLE["svg.hashsalt"]}):
        figure.savefig(buffer, format=suffix.removeprefix("."), dpi=figure.dpi, metadata=SUFFIXES[suffix])
    return buffer.getvalue()


def check_suffix(who: str, path: Path) -> None:
    """Refuse a picture in another format than those of ``SUFFIXES``.

    Raises:
        InputError: The suffix is another one.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{who}: cannot write {path.name!r}; name a file that ends in {', '.join(SUFFIXES)}")


def write_picture(who: str, figure: Figure, path: Path) -> None:
    """Write a picture in the format that the suffix names, as a whole, and its folder where that is missing.

    Args:
        who: Who was asked to, for the error.
        figure: The picture.
        path: Where to: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InputError: The suffix is another one, or the file cannot be written; what was there before then still is.
    """
    check_suffix(who, path)
    content = picture_bytes(figure, path.suffix)
    make_folder(who, path.parent)
    write_bytes(who, path, content)


def _measure(texts: Sequence[str], size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return widths and heights of texts in pixels."""
    figure = Figure(dpi=DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [figure.text(0, 0, text, fontsize=size).get_window_extent(renderer) for text in texts]
    return np.array([box.width for box in boxes]), np.array([box.height for box in boxes])
