"""The page of a picture: maps in a row, labels that do not overlap, pixels for entries, a colour bar; panels and their axes."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from matplotlib.ticker import MaxNLocator
from scipy.optimize import isotonic_regression

from hessiankit.support.errors import InputError
from hessiankit.support.files import make_folder, write_bytes

ACROSS = 3  # panels in a row

_MODULES = (
    (r"(norm|ln|layernorm)_?1|input_layernorm|layernorm_before", r"\gamma", r"\beta", "1"),
    (r"(norm|ln|layernorm)_?2|post_attention_layernorm|layernorm_after", r"\gamma", r"\beta", "2"),
    (r"(norm|ln)_?f|norm|final_norm|final_layernorm|layernorm", r"\gamma", r"\beta", "f"),
    (r"in_proj|c_attn|qkv|Wqkv", "W", "b", "QKV"),
    (r"(self_attn|attention|attn)\.(.*\.)?(out_proj|o_proj|c_proj|dense|proj)|o_proj|wo", "W", "b", "O"),
    (r"query|q_proj|wq|to_q", "W", "b", "Q"),
    (r"key|k_proj|wk|to_k", "W", "b", "K"),
    (r"value|v_proj|wv|to_v", "W", "b", "V"),
    (r"linear1|fc1|c_fc|fc_in|up_proj|intermediate(\.dense)?", "W", "b", "1"),
    (r"linear2|fc2|fc_out|down_proj|mlp.*c_proj|output\.dense", "W", "b", "2"),
    (r"gate_proj", "W", "b", "G"),
    (r"patch_embed.*|wte|embed_tokens|tok_emb.*|embedding|embed|embeddings.*word.*", "W", "b", "E"),
    (r"lm_head|head|classifier|fc|unembed", "W", "b", "C"),
)
"""Names of modules in other libraries, letters of their weight and bias, and the index of both; the first that fits counts."""
_POSITION = r"(.*\.)?(P|position|pos_embed|wpe|pos_emb|positional_embedding|position_embeddings?)(\.weight)?"


def short_labels(names: Sequence[str]) -> list[str]:
    """Return the papers' letters for parameter names, in Matplotlib's math text.

    A name whose letters are not known, or would be another one's too, is kept as it is. Where several layers take part
    their index follows the letter's.

    >>> short_labels(["blocks.0.attention.W_Q", "blocks.0.norm_1.weight", "position", "my.scale"])
    ['$W_Q$', '$\\\\gamma_1$', '$P$', 'my.scale']
    >>> short_labels(["h.0.mlp.c_fc.bias", "h.1.mlp.c_fc.bias"])
    ['$b_{1,0}$', '$b_{1,1}$']
    """
    layers = [next(iter(re.findall(r"(?:^|\.)(\d+)\.", name)), "") for name in names]
    several = len({*layers} - {""}) > 1
    labels = []
    for name, layer in zip(names, layers, strict=True):
        letter, index = _letters(re.sub(r"(^|\.)\d+(?=\.)", "", name).lstrip("."))
        index = ",".join(part for part in (index, layer if several else "") if part)
        subscript = f"_{index}" if len(index) == 1 else f"_{{{index}}}" if index else ""
        labels.append(f"${letter}{subscript}$" if letter else name)
    count = Counter(labels)
    return [label if count[label] == 1 else name for name, label in zip(names, labels, strict=True)]


def _letters(name: str) -> tuple[str, str]:
    """Return the letter and its index for a name without layers; empty ones where it is not known."""
    direct = re.fullmatch(r"(?:.*\.)?([A-Za-z])_([A-Za-z0-9]+)", name)
    if direct:
        return direct[1], direct[2]
    if re.fullmatch(_POSITION, name):
        return "P", ""
    parts = re.fullmatch(r"(.*?)[._](weight|bias)", name)
    module, kind = parts.groups() if parts else ("", "")
    for pattern, weight, bias, index in _MODULES:
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return weight if kind == "weight" else bias, index
    return "", ""


def pooled(matrix: np.ndarray, sizes: Sequence[int], width: int) -> np.ndarray:
    """Reduce |matrix| to pixels: the largest of the entries that a pixel covers, for blocks drawn ``width`` pixels wide.

    A pixel covers the entries up to the next pixel's first one, and one entry where both are the same.

    >>> pooled(np.array([[3.0, -4.0], [0.0, 0.0]]), [2], 1)
    array([[4.]])
    """
    starts = np.concatenate(
        [end - size + np.arange(width) * size // width for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    )
    return np.maximum.reduceat(np.maximum.reduceat(np.abs(matrix), starts, axis=1), starts, axis=0)


def colour_range(values: np.ndarray, outside: float = 0.005, span: int = 8) -> tuple[float, float]:
    """Return the ends of a log scale for positive values: the largest one, and the one that a share of ``outside`` lie below.

    At most ``span`` decades; widened to whole decades where fewer than two powers of ten, the ticks, lie between.

    >>> colour_range(np.array([0.2, 3.0])), colour_range(np.array([1e-20, 3.0]), span=2)
    ((0.1, 10.0), (0.03, 3.0))
    """
    positive = values[values > 0]
    if not positive.size:
        return 0.1, 1.0
    high = float(positive.max())
    low = max(float(np.quantile(positive, outside)), high / 10.0**span)
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last > first:
        return low, high
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return 10.0**first, 10.0 ** max(last, first + 1)


def spread(centres: Sequence[float], lengths: Sequence[float], low: float, high: float) -> np.ndarray:
    """Move labels apart along a line as little as possible (least squares) and keep them inside.

    The centres ascend, and each label needs a length; they run past both ends evenly if they need more than there is.

    >>> spread([1.0, 1.0, 9.0], [2.0, 2.0, 2.0], 0.0, 10.0).tolist()
    [1.0, 3.0, 9.0]
    """
    room = np.asarray(lengths, dtype=float)
    offsets = np.cumsum(room) - room / 2  # label k stands at position_k + offset_k, positions ascending
    low, high = (low, high - room.sum()) if room.sum() <= high - low else ((low + high - room.sum()) / 2,) * 2
    ascending = isotonic_regression(np.asarray(centres, dtype=float) - offsets).x
    return np.clip(ascending, low, high) + offsets


DPI = 200
POINT = DPI / 72
INK, FAINT, ZERO = "#1f1f1f", "#5a5a5a", "#a6a6a6"
COLOURS = "viridis"
OKABE_ITO = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
"""Okabe and Ito's colours, distinct with every kind of colour vision; grey in place of their yellow."""
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


FORMATS = ", ".join(SUFFIXES)


class Picture(Figure):
    """A Matplotlib figure of a width and a height in inches, which needs no display, and is shown in a notebook.

    Attributes:
        caption: Text for the reader, not drawn: scale, sizes, the meaning of grey.
        numbers: Header and rows of the table behind it, which a path that ends in ``.csv`` gets.
    """

    caption = ""
    numbers: tuple[Sequence[str], Iterable[Sequence[object]]] | None = None

    def __init__(self, width: float, height: float, **options: Any) -> None:
        super().__init__((width, height), **{"dpi": DPI, "facecolor": "white", **options})
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return picture_bytes(self, ".png")


class Frame:
    """Maps of blocks in a row, with their labels and a colour bar.

    Every length is a whole pixel, so that one number of a map is one square of the picture: ``cell`` is the side of a block,
    with one of the ``labels`` along both axes. Empty ``titles`` of the maps take no room. ``ax``: axes in which
    all of it lies.
    """

    def __init__(
        self, titles: Sequence[str], cell: int, labels: Sequence[str], title: str | None, ax: Axes | None = None
    ) -> None:
        if title and list(titles) == [""]:
            titles, title = [title], None
        self.cell, self.labels, self.side = cell, list(labels), cell * len(labels)
        self.font = float(min(10.0, max(6.0, 0.75 * cell / POINT)))
        wide, high = _measure(self.labels, self.font)
        self.upright = wide + 0.3 * self.font * POINT > cell
        pad, gap = 14, 44
        left, below = int(wide) + 3 * pad, int(wide if self.upright else high) + 3 * pad
        maps = len(titles) * self.side + (len(titles) - 1) * gap
        width = left + maps + 190
        height = pad + max(pad, (46 if title else 0) + (48 if any(titles) else 0)) + self.side + below
        self.figure: Any = Picture(width / DPI, height / DPI) if ax is None else ax.figure
        self._add_axes, self._ratio = self.figure.add_axes if ax is None else ax.inset_axes, width / height
        self.axes: list[Axes] = []
        if ax is not None:
            ax.set_axis_off()
        for k, text in enumerate(titles):
            place = ((left + k * (self.side + gap)) / width, below / height, self.side / width, self.side / height)
            axes = self._add_axes(place, xticks=[], yticks=[])
            axes.set_title(text, fontsize=10.5, pad=5)
            self.axes.append(axes)
        self._bar = ((left + maps + 30) / width, below / height, 34 / width, self.side / height)
        if title:
            self.figure.text((left + maps / 2) / width, 1 - pad / height, title, fontsize=11.5, ha="center", va="top")

    def draw(self, k: int, values: np.ndarray, low: float, high: float, line: float) -> AxesImage:
        """Fill map ``k`` with positive numbers in log scale, masked ones grey, and separate and name its blocks."""
        axes, side = self.axes[k], self.side
        colours = mpl.colormaps[COLOURS].with_extremes(bad=ZERO)
        image = axes.imshow(values, cmap=colours, norm=LogNorm(low, high), interpolation="nearest", extent=(0, side, side, 0))
        edges = self.cell * np.arange(1, len(self.labels))
        axes.hlines(edges, 0, side, color="white", linewidth=line)
        axes.vlines(edges, 0, side, color="white", linewidth=line)
        for i, text in enumerate(self.labels):
            centre = (i + 0.5) * self.cell
            if k == 0:
                axes.text(-12, centre, text, fontsize=self.font, ha="right", va="center_baseline")
            rotation = 90 if self.upright else 0
            axes.text(centre, side + 12, text, fontsize=self.font, ha="center", va="top", rotation=rotation)
        axes.set(xlim=(0, side), ylim=(side, 0))
        return image

    def colour_bar(self, mappable: ScalarMappable, label: str, values: np.ndarray, zeros: bool) -> None:
        """Draw the colour bar, an arrow where values lie beyond its end, a grey square for zeros."""
        low, high = mappable.get_clim()
        assert low is not None
        assert high is not None
        below, above = bool((values < low).any()), bool((values > high * (1 + 1e-6)).any())
        extend = "both" if below and above else "min" if below else "max" if above else "neither"
        x, y, w, h = self._bar
        square = w * self._ratio
        lift = 1.8 * square if zeros else 0.0
        axes = self._add_axes((x, y + lift, w, h - lift))
        self.figure.colorbar(mappable, cax=axes, extend=extend, extendfrac=0.03).set_label(label, fontsize=10, labelpad=4)
        axes.tick_params(labelsize=8.5)
        if zeros:
            patch = self._add_axes((x, y, w, square), xticks=[], yticks=[], facecolor=ZERO)
            patch.text(1.35, 0.5, "0", fontsize=8.5, ha="left", va="center_baseline", transform=patch.transAxes)

    def write(self, path: Path | str | None, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write the picture with the numbers behind it, if there is a path."""
        self.figure.numbers = header, rows
        if path is not None:
            write_picture("plots", self.figure, Path(path))


def picture_bytes(figure: Figure, suffix: str) -> bytes:
    """Return a picture in a format, the same bytes every time."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": STYLE["svg.hashsalt"]}):
        figure.savefig(buffer, format=suffix.removeprefix("."), dpi=figure.dpi, metadata=SUFFIXES[suffix])
    return buffer.getvalue()


def check_suffix(caller: str, path: Path) -> None:
    """Refuse a picture in another format than those of ``SUFFIXES`` and ``.csv``."""
    if path.suffix not in (*SUFFIXES, ".csv"):
        raise InputError(f"{caller}: cannot write {path.name!r}; name a file that ends in {FORMATS}")


def write_picture(caller: str, figure: Figure, path: Path) -> None:
    """Write a picture, or the numbers behind it, in the format that the suffix names, and the folder if it is missing."""
    check_suffix(caller, path)
    numbers = getattr(figure, "numbers", None)
    if path.suffix == ".csv":
        if numbers is None:
            raise InputError(
                f"{caller}: cannot write {path.name!r}: this picture has no table; name a file that ends in {FORMATS}"
            )
        write_numbers(path, *numbers)
        return
    content = picture_bytes(figure, path.suffix)
    make_folder(caller, path.parent)
    write_bytes(caller, path, content)


def write_numbers(path: Path | str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table as CSV (UTF-8, one line a row) and return its path.

    >>> import tempfile
    >>> write_numbers(Path(tempfile.mkdtemp()) / "t.csv", ("step", "loss"), [(1, 0.5)]).read_text()
    'step,loss\\n1,0.5\\n'
    """
    target, text = Path(path), io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    make_folder("plots", target.parent)
    write_bytes("plots", target, text.getvalue().encode())
    return target


def _measure(texts: Sequence[str], size: float) -> tuple[float, float]:
    """Return the largest width and height of texts in pixels."""
    figure = Figure(dpi=DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [figure.text(0, 0, text, fontsize=size).get_window_extent(renderer) for text in texts]
    return max(box.width for box in boxes), max(box.height for box in boxes)


@contextmanager
def picture(caller: str, width: float, height: float, path: Path | str | None, **options: Any) -> Iterator[Picture]:
    """Yield an empty picture of so many inches, and write it to the path if there is one."""
    if path is not None:
        check_suffix(caller, Path(path))
    with mpl.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Picture(width, height, **options)
        yield figure
        if path is not None:
            write_picture(caller, figure, Path(path))


@contextmanager
def panels(caller: str, count: int, heading: str, path: Path | str | None) -> Iterator[tuple[Picture, list[Axes]]]:
    """Yield a picture with so many panels, three in a row, under a heading, and write it to the path if there is one."""
    rows, columns = -(-count // ACROSS), min(count, ACROSS)
    width, height = 4.1 * columns + 0.2, 3.05 * rows + 0.4
    with picture(caller, width, height, path) as figure:
        figure.text(0.2 / width, 1 - 0.12 / height, heading, fontsize=11, color=INK, va="top", wrap=True)
        places = [(4.1 * (k % columns) + 0.72, height - 0.75 - 3.05 * (k // columns) - 2.15) for k in range(count)]
        all_axes = [figure.add_axes((x / width, y / height, 2.78 / width, 2.15 / height)) for x, y in places]
        for axes in all_axes:
            dress(axes)
            axes.xaxis.label.set_fontsize(8)
            axes.yaxis.label.set_fontsize(8)
        yield figure, all_axes


def dress(axes: Axes) -> None:
    """Give axes the look that all panels have."""
    axes.tick_params(which="both", labelsize=7.5)
    axes.tick_params(length=2.5)
    axes.grid(color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def log_scale(axes: Axes, *arrays: np.ndarray) -> None:
    """Use a log scale where all numbers, NaN aside, are positive and finite."""
    values = np.concatenate([np.ravel(a) for a in arrays])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0:
        axes.set_yscale("log")


def over_layers(axes: Axes, title: str, lines: Mapping[str, Sequence[float]]) -> None:
    """Draw lines over the layers: positive numbers that span a decade in log scale, others with a line at 0."""
    for k, (name, numbers) in enumerate(lines.items()):
        colour = OKABE_ITO[k % len(OKABE_ITO)]
        axes.plot(range(1, len(numbers) + 1), numbers, "o-", color=colour, linewidth=1.1, markersize=3, label=name)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("layer", fontsize=8, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    values = np.concatenate([np.asarray(numbers, dtype=float) for numbers in lines.values()])
    if values.min() <= 0:
        axes.axhline(0.0, color=INK, linewidth=0.6)
    elif values.max() > 10 * values.min():
        log_scale(axes, values)
    if len(lines) > 1:
        legend_style = {"handlelength": 0.8, "handletextpad": 0.3, "borderaxespad": 0.2, "borderpad": 0.2}
        axes.legend(fontsize=6.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), **legend_style)
