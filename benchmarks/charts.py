"""Finished cells as figures, in the style of the toolkit's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from hessiankit.curvature.plot_frame import FAINT, STYLE, Picture

Record = dict[str, Any]
MARKERS = "oD^vs<>PXhp*d"
OURS = {
    "closed form": "*",
    "closed form, plain torch": "s",
    "closed form, planned once": "D",
    "hessian": "*",
    "hessian_operator": "P",
    "hessiankit.hessian_diagonal": "*",
    "dense closed form": "s",
    "columns of the operator": "D",
    "eigsh of hessian_operator": "P",
    "dense closed form, eigvalsh": "X",
}
"""The toolkit's own methods, drawn in black, each by its marker."""


def canvas(columns: int = 1, width: float = 7.0, height: float = 4.2) -> tuple[Picture, list[Axes]]:
    """Return an empty figure with axes in a row."""
    with mpl.rc_context(STYLE):
        figure = Picture(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(1, columns, k + 1) for k in range(columns)]
    for one in axes:
        one.tick_params(labelsize=7.5)
        one.tick_params(which="minor", labelsize=6)
        one.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def label(record: Record) -> str:
    """Return a cell in few words."""
    cell = record["cell"]
    words = [str(cell["problem"]), f"B={cell['batch']}"]
    return " ".join(words) + ("\n" + f"{cell['dtype']}, {cell['threads']} thr." if "dtype" in cell else "")


def _median(row: dict[str, Any]) -> float | None:
    return row["time"]["median"] if row.get("time") else None


def methods(
    records: Sequence[Record], title: str, unit: str = "seconds", value: Callable[[dict[str, Any]], float | None] = _median
) -> Picture | None:
    """Draw every method of every cell: filled where measured, hollow where extrapolated, a faint cross where wrong."""
    points: dict[str, list[tuple[int, float, str]]] = {}
    labels: list[str] = []
    for record in records:
        rows = record["result"].get("rows", [])
        for quantity in dict.fromkeys(row.get("quantity") for row in rows):
            labels.append(label(record) + (f"\n{quantity}" if quantity else ""))
            for row in rows:
                height = value(row)
                if row.get("quantity") == quantity and height:
                    kind = "wrong" if row["status"] == "wrong" else "far" if row.get("extrapolated") else "right"
                    points.setdefault(row["name"], []).append((len(labels) - 1, height, kind))
    if not points:
        return None
    figure, (axes,) = canvas(width=max(7.0, 2.6 + 0.5 * len(labels)), height=5.0)
    for k, (name, found) in enumerate(points.items()):
        ours = name in OURS
        colour, marker = ("black", OURS[name]) if ours else (mpl.colormaps["tab20"](k % 20), MARKERS[k % len(MARKERS)])
        shift = 0.6 * (k / max(1, len(points) - 1) - 0.5)  # side by side rather than on top of each other
        for kind, suffix in (("right", ""), ("far", " (extrapolated)"), ("wrong", " (wrong)")):
            chosen = [(x + shift, y) for x, y, what in found if what == kind]
            if chosen:
                face = "none" if kind == "far" else colour
                look: dict[str, Any] = {"marker": "x", "color": colour, "alpha": 0.5} if kind == "wrong" else {}
                look = look or {"marker": marker, "facecolors": face, "edgecolors": colour}
                xs, ys = [x for x, _ in chosen], [y for _, y in chosen]
                axes.scatter(xs, ys, s=70 if marker == "*" else 24, linewidths=1.1, label=name + suffix, **look)
    axes.set_yscale("log")
    for k in range(0, len(labels), 2):  # bands keep together what belongs to one cell
        axes.axvspan(k - 0.5, k + 0.5, color="#f4f4f4", zorder=0)
    axes.grid(False, axis="x")
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6.5)
    axes.set_ylabel(unit, fontsize=9)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=6.5, frameon=False)
    return figure


@dataclass(frozen=True)
class Panel:
    """Log-log curves over one quantity.

    Attributes:
        x_label: The quantity.
        curves: Name -> points (x, y), in ascending x.
        note: A line under the quantity.
        slope: If given, that of a dashed line beside the curves.
        unit: If given, that of heights of its own.
    """

    x_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    note: str = ""
    slope: float | None = None
    unit: str = ""


def lines(panels: Sequence[Panel], title: str, unit: str = "seconds") -> Picture | None:
    """Draw panels in a row over the same heights, or each its own; a name has the same colour and marker in all of them."""
    if not panels:
        return None
    figure, axes = canvas(len(panels), width=max(5.0, 3.0 * len(panels)), height=4.2)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    drawn: dict[str, Any] = {}
    for one, panel in zip(axes, panels, strict=True):
        for name, curve in panel.curves.items():
            k = names.index(name)
            look: Any = {"marker": MARKERS[k % len(MARKERS)], "color": f"C{k}", "markersize": 4.5, "linewidth": 1.2}
            (drawn[name],) = one.plot(*zip(*curve, strict=True), **look)
        ticks = sorted({x for curve in panel.curves.values() for x, _ in curve})
        if panel.slope is not None and len(ticks) > 1:
            (drawn["predicted slope"],) = one.plot(*_slope(panel, ticks), "--", color=FAINT, linewidth=1.0)
        one.set_xscale("log")
        one.set_yscale("log")
        same = [panel] if panel.unit else panels
        heights = [y for each in same for curve in each.curves.values() for _, y in curve]
        one.set_ylim(min(heights) / 2, max(heights) * 2)
        one.set_ylabel(panel.unit, fontsize=9)
        one.xaxis.set_major_locator(FixedLocator(ticks))
        one.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        one.xaxis.set_minor_locator(NullLocator())
        one.yaxis.set_minor_formatter(NullFormatter())
        one.set_xlabel(f"{panel.x_label}\n{panel.note}", fontsize=8)
    axes[0].set_ylabel(panels[0].unit or unit, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=len(drawn), fontsize=7.5, frameon=False)
    return figure


def _slope(panel: Panel, ticks: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return a line of the predicted slope over the larger half of the ticks, above the highest of the last points."""
    assert panel.slope is not None
    ends = [ticks[len(ticks) // 2 - (len(ticks) == 2)], ticks[-1]]
    last = max(curve[-1][1] for curve in panel.curves.values() if curve)
    return ends, [1.5 * last * (x / ends[1]) ** panel.slope for x in ends]
