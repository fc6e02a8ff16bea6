"""Style, files of numbers and cached answers shared by all figures.

A picture is drawn inside :func:`style`, on a :func:`page`, and written by :func:`save`; its numbers go beside it by
:func:`write_rows` or :func:`write_json`. The same numbers give the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from PIL import Image

from figures._verdicts import Verdict, print_below
from hessiankit.curvature.plot_frame import DPI, FAINT, INK, OKABE_ITO, STYLE, SUFFIXES, Picture, dress
from hessiankit.support.environment import code_version
from hessiankit.support.errors import InputError
from hessiankit.training.monitoring.log import COLOURS as TYPE_COLOURS
from hessiankit.training.monitoring.log import MARKS as TYPE_MARKS
from hessiankit.training.monitoring.log import name_ends
from papers.experiments.store import NOTHING, differentiable, keep, plain, put, recall, short_digest

__all__ = [
    "DASHES", "FAINT", "INK", "MACHINE", "METHOD_COLOURS", "METHOD_MARKS", "TYPE_COLOURS", "TYPE_MARKS", "cached",
    "differentiable", "dress", "each", "heading", "name_ends", "page", "plain", "save", "short_digest", "style",
    "write_json", "write_rows", "write_verdicts",
]  # fmt: skip

T = TypeVar("T")
CODE = ("papers/experiments", "hessiankit", "derivations")
"""What an answer is taken to depend on, where nothing narrower is said."""

MACHINE = ("date", "python", "torch", "numpy", "processor", "cores", "system")
"""Entries of the environment that a file of numbers keeps."""

METHOD_COLOURS = OKABE_ITO
"""Of methods, placements and arms, in this order; the baseline takes the first."""
METHOD_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)))
"""Dashes of methods, which differ without colour too."""


page = Picture
"""An empty page of a width and a height in inches."""


@contextmanager
def style(**changes: Any) -> Iterator[None]:
    """Draw in the figures' look: their font, sizes from 8 points on, thin lines, no upper and right spine.

    Args:
        **changes: Settings of Matplotlib with ``_`` for ``.``, e.g. ``font_size=7``.
    """
    look: Any = {
        **STYLE, "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.labelsize": 8, "axes.labelcolor": INK,
        "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "xtick.color": INK, "legend.fontsize": 7.5, "legend.frameon": False,
        "lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.spines.top": False, "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=METHOD_COLOURS),
    }  # fmt: skip
    look |= {name.replace("_", ".", 1): value for name, value in changes.items()}
    with mpl.rc_context(look):
        yield


def heading(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Give axes a title, labels, a faint grid and short ticks."""
    dress(axes)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=8, labelpad=2)
    axes.set_ylabel(y, fontsize=8, labelpad=3)


def save(figure: Picture, path: Path, verdicts: Sequence[Verdict] = ()) -> Path:
    """Write a picture, the same bytes every time, with verdicts printed under it, and return its path.

    The PNG of a chart has a palette of 256 colours, which it does not exceed visibly, and is about a third as large so. That of a
    heat map has all its colours: a palette chosen by frequency merges those of its few largest entries.

    Raises:
        InputError: The suffix is not ``.png``, ``.svg`` or ``.pdf``, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"figures: cannot write {path.name!r}; name a file that ends in {', '.join(SUFFIXES)}")
    buffer = io.BytesIO()
    fixed: Any = {name: STYLE[name] for name in ("svg.hashsalt", "svg.fonttype")}  # without a salt every SVG has names of its own
    box = print_below(figure, verdicts) if verdicts else None
    with mpl.rc_context(fixed):
        figure.savefig(buffer, format=path.suffix[1:], dpi=DPI, metadata=SUFFIXES[path.suffix], bbox_inches=box)
    if path.suffix == ".png":
        picture = Image.open(buffer).convert("RGB")
        if not any(axes.images for axes in figure.axes):
            picture = picture.quantize(256, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        picture.save(buffer, format="png", optimize=True, dpi=(DPI, DPI))
    return put(path, buffer.getbuffer())


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows with the same keys as CSV, numbers with 6 significant digits, and return the path.

    Raises:
        InputError: There are no rows, their keys differ, or the file cannot be written.

    >>> import tempfile
    >>> write_rows(Path(tempfile.mkdtemp()) / "t.csv", [{"step": 1, "loss": 1 / 3, "seed": None}]).read_text()
    'step,loss,seed\\n1,0.333333,\\n'
    """
    table = [dict(row) for row in rows]
    if not table or any(list(row) != list(table[0]) for row in table):
        seen = "no rows" if not table else f"rows with different keys, {sorted({', '.join(row) for row in table})}"
        raise InputError(f"write_rows: {path.name} was given {seen}; give one or more rows with the same keys in the same order")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table[0])
    writer.writerows([_digits(x) for x in row.values()] for row in table)
    return put(path, text.getvalue().encode())


def write_json(path: Path, data: Any) -> Path:
    """Write data (:func:`plain`) as JSON and return the path.

    Raises:
        InputError: The file cannot be written.
    """
    return put(path, (json.dumps(plain(data), indent=1, allow_nan=False) + "\n").encode())


def write_verdicts(out: Path, name: str, verdicts: Sequence[Verdict]) -> Path:
    """Print a figure's verdicts, write them as ``NAME_verdicts.json``, and return the path.

    Raises:
        InputError: The ledger has no such row, or the file cannot be written.
    """
    for one in verdicts:
        print(f"  {one.status}: {one.text} ({one.scale})")
    return write_json(out / f"{name}_verdicts.json", [one.to_dict() for one in verdicts])


def cached(out: Path, name: str, key: Any, make: Callable[[], T], *, code: Iterable[str] = CODE) -> T:
    """Return what ``make`` gives, from ``out/cache`` where it was kept under this name and key by the same code and torch.

    Interrupted work keeps what was finished: call this for each piece. A file that is damaged is set aside, which is said, and
    made anew.

    Args:
        out: The figures' folder.
        name: Of the figure, or of what several share; part of the file's name.
        key: Everything that the answer depends on: a dataclass, or what JSON holds.
        make: Returns the answer, as :func:`plain` returns it: the first call and the later ones give the same.
        code: Files and folders of the repository that the answer depends on.

    Raises:
        InputError: The file cannot be read or written.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp())
    >>> cached(out, "sum", {"n": 3}, lambda: 6), cached(out, "sum", {"n": 3}, lambda: 1 / 0)
    (6, 6)
    """
    identity = {"key": plain(key), "made by": code_version(*code)}
    path = out / "cache" / f"{name}-{short_digest(identity)}.pt"
    answer: T = recall(path, identity)
    if answer is NOTHING:
        answer = plain(make())
        keep(path, identity, answer)
    return answer


def each(values: Iterable[float], digits: int = 3) -> str:
    """Return the values of the seeds, with some significant digits.

    >>> each([1.2345, 1e-5])
    '1.23, 1e-05'
    """
    return ", ".join(f"{value:.{digits}g}" for value in values)


def _digits(x: Any) -> Any:
    if x is None:
        return ""
    return f"{x:.6g}" if isinstance(x, float) or (hasattr(x, "dtype") and "float" in str(x.dtype)) else x
