"""Finished cells as figures, in the style of the toolkit's own; every one without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hessiankit.drawing.plot_frame import FAINT, STYLE, Picture

Record = dict[str, Any]
MARKERS = "oD^vs<>PXhp*d"
OURS = ("closed form", "hessian_operator", "hessian", "dense closed form", "eigsh of hessian_operator")
"""The toolkit's own methods, drawn as black stars."""


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
        colour, marker = ("black", "*") if ours else (mpl.colormaps["tab20"](k % 20), MARKERS[k % len(MARKERS)])
        shift = 0.6 * (k / max(1, len(points) - 1) - 0.5)  # side by side rather than on top of each other
        for kind, suffix in (("right", ""), ("far", " (extrapolated)"), ("wrong", " (wrong)")):
            chosen = [(x + shift, y) for x, y, what in found if what == kind]
            if chosen:
                face = "none" if kind == "far" else colour
                look: dict[str, Any] = {"marker": "x", "color": colour, "alpha": 0.5} if kind == "wrong" else {}
                look = look or {"marker": marker, "facecolors": face, "edgecolors": colour}
                xs, ys = [x for x, _ in chosen], [y for _, y in chosen]
                axes.scatter(xs, ys, s=70 if ours else 22, linewidths=1.1, label=name + suffix, **look)
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6.5)
    axes.set_ylabel(unit, fontsize=9)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=6.5, frameon=False)
    return figure


def lines(
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]]], title: str, unit: str = "seconds"
) -> Picture | None:
    """Draw log-log curves: for each panel its x label and its curves (name, x, y)."""
    if not panels:
        return None
    figure, axes = canvas(len(panels), width=max(4.0, 3.1 * len(panels)), height=3.6)
    for one, (x_label, curves) in zip(axes, panels, strict=True):
        for k, (name, x, y) in enumerate(curves):
            one.plot(x, y, marker=MARKERS[k % len(MARKERS)], markersize=4, linewidth=1.1, label=name)
        one.set_xscale("log", base=2)
        one.set_yscale("log")
        one.set_xlabel(x_label, fontsize=9)
        one.legend(fontsize=6.5, frameon=False)
    axes[0].set_ylabel(unit, fontsize=9)
    figure.suptitle(title, fontsize=10, color=FAINT)
    return figure
