"""The pictures of a monitor's file: one panel for each thing that was measured, all over the steps of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hessiankit.arguments import checked
from hessiankit.drawing.plot_frame import DPI, INK, STYLE, SUFFIXES, Picture
from hessiankit.errors import InputError
from hessiankit.monitoring import depth_panels, panels
from hessiankit.monitoring.log import MonitorLog, read_monitor

ACROSS = 3
"""Panels in a row."""
Panel = Callable[[Axes, MonitorLog], None]


@checked("plot_monitor")
def plot_monitor(log: MonitorLog | Path | str, path: Path | str | None = None, *, title: str | None = None) -> Picture:
    """Draw what a monitor measured: sharpness by type with its intervals (The Sharpness Disparity Principle, Figure 3), norms by
    type (Figure 8), loss, top eigenvalue with its residual, and the depth diagnostics (The Curse of Depth, Figures 2 and 4).

    Args:
        log: What :func:`~hessiankit.monitoring.read_monitor` returned, or the file's name.
        path: Where to write the picture; its suffix chooses the format: ``.png``, ``.svg`` or ``.pdf``.
        title: Stands above; by default the model and the file's name.

    Raises:
        InputError: The file cannot be used, it holds no measurement, or the suffix is another one.

    Returns:
        The figure, which shows itself in a notebook.
    """
    log = log if isinstance(log, MonitorLog) else read_monitor(log)
    if path is not None and Path(path).suffix not in SUFFIXES:
        raise InputError(f"plot_monitor: cannot write {Path(path).name!r}; name a file that ends in {', '.join(SUFFIXES)}")
    drawn = [draw for keys, draw in PANELS if log.has(*keys)]
    if not len(log) or not drawn:
        raise InputError(f"plot_monitor: {log.path} holds no measurement yet; nothing to draw")
    down, across = -(-len(drawn) // ACROSS), min(len(drawn), ACROSS)
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(4.1 * across + 0.2, 3.05 * down + 0.4), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        _title(figure, title or f"{log.header['model']}, {log.header['entries']:,} parameters ({log.path.name})")
        wide, high = figure.get_size_inches()
        for k, draw in enumerate(drawn):
            row, column = divmod(k, across)
            place = (4.1 * column + 0.72, high - 0.75 - 3.05 * row - 2.15, 2.78, 2.15)
            axes = figure.add_axes((place[0] / wide, place[1] / high, place[2] / wide, place[3] / high))
            panels.dress(axes)
            draw(axes, log)
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=DPI, metadata=SUFFIXES[Path(path).suffix])
            except OSError as error:
                raise InputError(f"plot_monitor: cannot write {path}: {error.strerror}; name a file elsewhere") from error
    return figure


def _title(figure: Figure, text: str) -> None:
    figure.text(0.2 / figure.get_figwidth(), 1 - 0.12 / figure.get_figheight(), text, fontsize=11, color=INK, va="top")


PANELS: tuple[tuple[tuple[str, ...], Panel], ...] = (
    (("sharpness",), panels.sharpness),
    (("norms",), panels.norms),
    (("loss",), panels.loss),
    (("eigenvalue",), panels.eigenvalue),
    (("depth", "stream"), depth_panels.variance),
    (("depth", "angles"), depth_panels.angles),
    (("depth", "drop"), depth_panels.drop),
    (("depth", "jacobians"), depth_panels.jacobian),
    (("depth", "hessian"), depth_panels.hessian),
    (("depth", "ggn"), depth_panels.gauss_newton),
)
"""What a measurement holds, and the panel that shows it."""
