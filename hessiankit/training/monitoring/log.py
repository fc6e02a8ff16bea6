"""The file of a monitor, read back: numbers by step, a table, and a picture with a panel for each quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hessiankit.curvature.plot_frame import FAINT, INK, Picture, log_scale, panels, spread
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.training.depth.stream import AngularDistances
from hessiankit.training.monitoring.lines import read_lines


class Series(NamedTuple):
    """An estimate by step: three arrays (steps,), NaN where a step has none."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, repr=False)
class MonitorLog(Printed):
    """The measurements of one run; made by :meth:`hessiankit.Monitor.read`.

    Attributes:
        path: The file.
        header: The model's parts, the options and the environment.
        records: One mapping a measurement, in the order of the steps.
    """

    path: Path
    header: dict[str, Any]
    records: tuple[dict[str, Any], ...]

    @classmethod
    @checked("monitor")
    def read(cls, path: Path | str) -> MonitorLog:
        """Read a file, also while it is being written."""
        header, records = read_lines(path)
        return cls(Path(path), header, tuple(records))

    def __len__(self) -> int:
        return len(self.records)

    @property
    def steps(self) -> np.ndarray:
        """Steps of training, (steps,)."""
        return np.array([record["step"] for record in self.records], dtype=int)

    @property
    def types(self) -> tuple[str, ...]:
        """Block types of the model, in the order of its parameters."""
        return tuple(dict.fromkeys(part["type"] for part in self.header["parts"]))

    @property
    def errors(self) -> dict[int, dict[str, str]]:
        """Step -> what failed there -> its error; steps where nothing failed are left out."""
        return {record["step"]: record["errors"] for record in self.records if record.get("errors")}

    def series(self, *keys: str | int) -> np.ndarray:
        """Return one number, or one array, of every measurement, NaN where it has none.

        Args:
            *keys: Path of it in the record, e.g. ``"sharpness", "types", "Norm", "value"`` or ``"norms", "types", "Emb"``.

        Raises:
            InputError: No measurement has it, or its shape changes from one to the next.

        Returns:
            (steps,), or (steps, ...) for an array.
        """
        entries = self.entries(*keys)
        section = next((x for x in entries if isinstance(x, dict)), None)
        if section is not None:
            raise InputError(
                f"MonitorLog: {' / '.join(map(str, keys)) or 'a measurement'} holds {', '.join(section)}; name one of them"
            )
        arrays = [None if x is None else np.asarray(x, dtype=float) for x in entries]
        shapes = {a.shape for a in arrays if a is not None}
        if len(shapes) != 1:
            fault = "no measurement has it" if not shapes else f"its shape changes: {sorted(shapes)}"
            raise InputError(f"MonitorLog: {' / '.join(map(str, keys))} of {self.path}: {fault}; see .records for what there is")
        blank = np.full(next(iter(shapes)), np.nan)
        return np.stack([blank if a is None else a for a in arrays])

    def entries(self, *keys: str | int) -> list[Any]:
        """Return the entry at ``keys`` of every measurement, None where there is none."""
        return [_at(record, keys) for record in self.records]

    def has(self, *keys: str | int) -> bool:
        """Return whether some measurement has such an entry."""
        return any(entry is not None for entry in self.entries(*keys))

    @property
    def sharpness(self) -> dict[str, Series]:
        """Type -> average sharpness by step, with its interval."""
        names = [name for name in self.types if self.has("sharpness", "types", name)]
        return {name: Series(*(self.series("sharpness", "types", name, key) for key in Series._fields)) for name in names}

    @property
    def norms(self) -> dict[str, np.ndarray]:
        """Type -> Euclidean norm of its parameters by step, (steps,)."""
        return {name: self.series("norms", "types", name) for name in self.types if self.has("norms", "types", name)}

    @property
    def orders(self) -> dict[int, tuple[str, ...]]:
        """Step -> types from flat to sharp."""
        orders = {}
        for record in self.records:
            values = {name: float(one["value"]) for name, one in (_at(record, ("sharpness", "types")) or {}).items()}
            if values:
                orders[record["step"]] = tuple(sorted(values, key=values.__getitem__))
        return orders

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"path": str(self.path), "header": self.header, "records": list(self.records), "orders": self.orders}

    def _headline(self) -> str:
        header = self.header
        head = f"{header['model']}, {header['entries']:,} parameters; measurements: {len(self)}"
        return head + (f", steps {self.steps.min()} to {self.steps.max()}" if len(self) else "") + f"; {self.path.name}"

    @checked("MonitorLog.plot")
    def plot(self, path: Path | str | None = None, *, title: str | None = None) -> Picture:
        """Draw the measurements over the steps of training, one panel for each quantity: sharpness by type with its intervals
        (The Sharpness Disparity Principle, Figure 3), norms by type (Figure 8), loss, top eigenvalue with its residual, and the
        depth diagnostics (The Curse of Depth, Figures 2 and 4).

        Args:
            path: A file to write: ``.png``, ``.svg`` or ``.pdf``.
            title: Heading; by default the model and the file's name.

        Raises:
            InputError: There is no measurement, or the suffix is another one.
        """
        panel_drawers = panels_of(self)
        if not panel_drawers:
            raise InputError(f"MonitorLog.plot: {self.path} holds no measurement yet; nothing to draw")
        heading = title or f"{self.header['model']}, {self.header['entries']:,} parameters ({self.path.name})"
        with panels("MonitorLog.plot", len(panel_drawers), heading, path) as (figure, all_axes):
            for axes, draw in zip(all_axes, panel_drawers, strict=True):
                draw(axes, self)
        return figure

    def _parts(self) -> Iterator[Piece]:
        headers, rows = self._table()
        order = headers[1:2] if self.has("sharpness", "ordering") else []
        drop = [header for header in reversed(headers[1:]) if header not in (*order, "loss")]
        yield self._headline()
        yield table(headers, rows, left=2 if order else 1, prose=order, drop=drop, spread=True)
        yield from (f"step {step}: {key} failed: {text}" for step, texts in self.errors.items() for key, text in texts.items())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: the types from flat to sharp, the loss, the norm of all parameters, the top eigenvalue."""
        columns: dict[str, tuple[str, ...]] = {"sharpness, flat to sharp (~: not told apart)": ("sharpness", "ordering")}
        columns |= {"loss": ("loss",), "parameter norm": ("norms", "total"), "top eigenvalue": ("eigenvalue", "value")}
        columns |= {"eigenvalue / threshold": ("preconditioned", "ratio"), "step's multiple": ("critical", "multiple")}
        columns |= {"variance by layer": ("depth", "laws", "best")}
        columns = {title: keys for title, keys in columns.items() if self.has(*keys)}
        rows = [[str(record["step"]), *(_shown(_at(record, keys)) for keys in columns.values())] for record in self.records]
        return ["step", *columns], rows


def _at(record: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        if not isinstance(record, Mapping) or str(key) not in record:
            return None
        record = record[str(key)]
    return record


def _shown(x: Any) -> str:
    """Return a table's cell: a number with four digits, a word unchanged.

    >>> [_shown(x) for x in (None, 2.34567, "inf", "linear")]
    ['', '2.346', 'inf', 'linear']
    """
    try:
        return "" if x is None else f"{float(x):.4g}"
    except ValueError:
        return str(x)


COLOURS = {
    "Emb": "#0072b2",
    "QK": "#e69f00",
    "FFN": "#009e73",
    "VO": "#d55e00",
    "Norm": "#000000",
    "Head": "#cc79a7",
    "Other": "#8c8c8c",
}
"""Okabe and Ito's colours, distinguishable with every kind of colour vision."""
Panel = Callable[[Axes, MonitorLog], None]
MARKS = {"Emb": "o", "QK": "s", "FFN": "^", "VO": "v", "Norm": "D", "Head": "P", "Other": "X"}


def _name(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=8, labelpad=1)


def over_steps(axes: Axes, log: MonitorLog, title: str) -> None:
    """Steps along the lower edge: in log scale from step 1 on if most measurements are early."""
    _name(axes, title, "step")
    steps = log.steps
    if np.median(steps) < 0.25 * steps.max():
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if steps.max() > steps.min():
        axes.set_xlim(steps.min(), steps.max())


def name_ends(axes: Axes, ends: dict[str, tuple[float, str]]) -> None:
    """Write names at the right ends of lines, moved apart where they would overlap."""
    axes.autoscale_view()
    transform = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    order = [name for name in sorted(ends, key=lambda name: ends[name][0]) if np.isfinite(ends[name][0])]
    heights = [float(transform.transform((right, ends[name][0]))[1]) for name in order]
    for name, height, at in zip(order, heights, spread(heights, [0.075] * len(order), 0.0, 1.0) if order else [], strict=True):
        axes.annotate(
            name, (1.0, height), (1.05, at), xycoords="axes fraction", textcoords="axes fraction", va="center", fontsize=8,
            color=ends[name][1], annotation_clip=False, arrowprops={"arrowstyle": "-", "color": ends[name][1], "linewidth": 0.4},
        )  # fmt: skip


LINE: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 3, "clip_on": False}


def sharpness(axes: Axes, log: MonitorLog) -> None:
    """Average sharpness of each block type, with its intervals (The Sharpness Disparity Principle, Figure 3)."""
    for name, one in log.sharpness.items():
        is_finite, colour = np.isfinite(one.low) & np.isfinite(one.high) & (one.low > 0), COLOURS.get(name, FAINT)
        axes.fill_between(log.steps[is_finite], one.low[is_finite], one.high[is_finite], color=colour, alpha=0.2, linewidth=0)
    _by_type(axes, log, "average sharpness, with its intervals", {name: one.value for name, one in log.sharpness.items()})


def _norms(axes: Axes, log: MonitorLog) -> None:
    _by_type(axes, log, "norm of the parameters", log.norms)


def _by_type(axes: Axes, log: MonitorLog, title: str, values: dict[str, np.ndarray]) -> None:
    """Draw a line over the steps for each block type, with its own mark, and its name at the line's end."""
    over_steps(axes, log, title)
    ends = {}
    for name, value in values.items():
        is_finite, colour = np.isfinite(value), COLOURS.get(name, FAINT)
        axes.plot(log.steps[is_finite], value[is_finite], color=colour, zorder=3, **{**LINE, "marker": MARKS.get(name, "o")})
        if is_finite.any():
            ends[name] = (float(value[is_finite][-1]), colour)
    log_scale(axes, *values.values())
    name_ends(axes, ends)


def _loss(axes: Axes, log: MonitorLog) -> None:
    over_steps(axes, log, "loss, nats")
    axes.plot(log.steps, log.series("loss"), color=INK, **LINE)


def _number(title: str, section: str, key: str, colour: str, limit: Callable[[MonitorLog], np.ndarray] | None = None) -> Panel:
    """Return the panel of one number: in a band of its residual if it has one, with its limit as a dashed line."""

    def panel(axes: Axes, log: MonitorLog) -> None:
        over_steps(axes, log, title)
        value = log.series(section, key)
        residual = log.series(section, "residual") if log.has(section, "residual") else np.zeros_like(value)
        is_finite = np.isfinite(value)
        low, high = (value - residual)[is_finite], (value + residual)[is_finite]
        axes.fill_between(log.steps[is_finite], low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(log.steps[is_finite], value[is_finite], color=colour, **LINE)
        if limit is not None:
            axes.plot(log.steps[is_finite], limit(log)[is_finite], color=INK, linewidth=0.8, linestyle="--")
        log_scale(axes, low)

    return panel


LINES_PER_PANEL = 5
"""Lines of a panel over layers."""


def _variance(axes: Axes, log: MonitorLog) -> None:
    """Variance over features of the stream, averaged over tokens, a line for each layer (The Curse of Depth, Figures 4 and 8)."""
    over_steps(axes, log, "variance of the residual stream, by layer")
    values = log.series("depth", "stream", "variance")
    for layer, colour in enumerate(shades(values.shape[1])):
        axes.plot(log.steps, values[:, layer], color=colour, linewidth=1.1, clip_on=False)
    log_scale(axes, values)
    layer_key(axes, 0, values.shape[1] - 1)


def _angles(axes: Axes, log: MonitorLog) -> None:
    """Angular distances of all pairs of layers at the last step (Figure 2, without the authors' rescaling of each row)."""
    records = [(step, x) for step, x in zip(log.steps, log.entries("depth", "angles", "all"), strict=True) if x is not None]
    at, values = records[-1][0], torch.tensor(records[-1][1], dtype=torch.float64, device="cpu")
    rows = AngularDistances(values, values).by_distance().numpy()
    edge = len(rows) + 0.5
    _name(axes, f"angular distance $d(x_l, x_{{l+n}})$, step {at}", "layer $l$")
    axes.grid(False)
    image = axes.imshow(rows, cmap=mpl.colormaps["viridis_r"], origin="lower", aspect="auto", extent=(0.5, edge, 0.5, edge))
    axes.set_ylabel("$n$", fontsize=8, labelpad=1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.06, pad=0.04)
    bar.ax.tick_params(labelsize=7, length=2)


def _by_layer(title: str, *keys: str, signed: bool = False) -> Panel:
    """Return the panel of a number, or a number with its error, of each layer: a line for each of a few steps."""

    def panel(axes: Axes, log: MonitorLog) -> None:
        _name(axes, title, "layer")
        by_step = {
            step: np.array([float(one["value"] if isinstance(one, dict) else one) for one in x])
            for step, x in zip(log.steps, log.entries("depth", *keys), strict=True)
            if x is not None
        }
        indices = np.unique(np.linspace(0, len(by_step) - 1, LINES_PER_PANEL).round().astype(int))
        axes.text(1.04, 1.0, "step", transform=axes.transAxes, fontsize=7.5, color=FAINT, va="top")
        for row, (k, colour) in enumerate(zip(indices, shades(len(indices)), strict=True), start=1):
            step, values = list(by_step.items())[k]
            axes.plot(np.arange(1, len(values) + 1), values, color=colour, **{**LINE, "clip_on": True})
            label = f"\u25cf {step:,}"
            axes.text(1.04, 1.0 - 0.09 * row, label, color=colour, transform=axes.transAxes, fontsize=7.5, va="top")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.margins(x=0.02)
        axes.axhline(0.0, color=INK, linewidth=0.6) if signed else log_scale(axes, *by_step.values())

    return panel


def shades(count: int) -> np.ndarray:
    """Return colours from pale and shallow to dark and deep, which differ in lightness too."""
    return mpl.colormaps["viridis_r"](np.linspace(0.12, 1.0, count))


def layer_key(axes: Axes, first: int, last: int) -> None:
    """Draw right of the axes which colour is the output of which block; 0 is the embedding."""
    key = axes.inset_axes((1.05, 0.0, 0.045, 1.0))
    key.spines[:].set_visible(True)
    extent = (0, 1, first - 0.5, last + 0.5)
    key.imshow(shades(last - first + 1)[:, None, :], origin="lower", aspect="auto", extent=extent)
    key.set_xticks([])
    key.yaxis.tick_right()
    key.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    key.tick_params(labelsize=7, length=2)
    key.set_ylabel("after block", fontsize=7.5, color=FAINT)
    key.yaxis.set_label_position("right")


BLUE, VERMILION = COLOURS["Emb"], COLOURS["VO"]
PANELS: tuple[tuple[tuple[str, ...], Panel], ...] = (
    (("sharpness",), sharpness),
    (("norms",), _norms),
    (("loss",), _loss),
    (("eigenvalue",), _number(r"$\lambda_{\max}$ of the Hessian, $\pm$ its residual", "eigenvalue", "value", BLUE)),
    (
        ("preconditioned", "value"),
        _number(
            r"$\lambda_{\max}$ in the optimizer's metric, $\pm$ its residual", "preconditioned", "value", BLUE,
            limit=lambda log: log.series("preconditioned", "threshold"),
        ),
    ),
    (
        ("critical", "sharpness"),
        _number(
            "critical sharpness of the next step", "critical", "sharpness", VERMILION,
            limit=lambda log: 2 / log.series("critical", "lr"),
        ),
    ),
    (("depth", "stream"), _variance),
    (("depth", "angles"), _angles),
    (("depth", "drop"), _by_layer("rise of the loss without one block", "drop", "loss_change", signed=True)),
    (("depth", "jacobians"), _by_layer(r"distance from the identity, $\|J_l - I\|_F / \sqrt{n}$", "jacobians", "rms")),
    (("depth", "hessian"), _by_layer(r"$\lambda_{\max}$ of the Hessian of each block", "hessian", "top")),
    (("depth", "ggn"), _by_layer(r"$\lambda_{\max}$ of the Gauss-Newton matrix of each block", "ggn", "top")),
)  # fmt: skip
"""Entry of a measurement, and the panel that shows it."""


def panels_of(log: MonitorLog) -> list[Panel]:
    """Return the panels of what was measured, without a map of angular distances of one or two layers."""
    layers = max((len(angles or (0,)) - 1 for angles in log.entries("depth", "angles", "all")), default=0)
    return [panel for keys, panel in PANELS if log.has(*keys) and (panel is not _angles or layers > 2)]
