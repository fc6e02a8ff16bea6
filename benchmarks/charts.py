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
    """Return a cell in few words; one thread and float64 go without saying."""
    cell = record["cell"]
    words = [str(cell["problem"]), f"B={cell['batch']}"]
    words += [str(cell["dtype"])] if cell.get("dtype", "float64") != "float64" else []
    words += [f"{cell['threads']} threads"] if cell.get("threads", 1) != 1 else []
    return ", ".join(words)


def _median(row: dict[str, Any]) -> float | None:
    return row["time"]["median"] if row.get("time") else None


BEST, REST = "#d55e00", "#8c8c8c"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
"""Okabe and Ito's."""
ROW = 0.22
"""Inches between two rows."""


def methods(
    records: Sequence[Record],
    title: str,
    unit: str = "seconds",
    value: Callable[[dict[str, Any]], float | None] = _median,
    *,
    compared: bool = True,
) -> Picture | None:
    """Draw a row a cell and quantity: the toolkit's methods, the best other one by name, the rest small.

    A mark is filled where it was measured, hollow where extrapolated, a small cross where the result is wrong; the number at the
    right is the best other method over the toolkit's first. Without ``compared`` all rows are the toolkit's, each with a mark of
    its own.
    """
    rows: list[tuple[str, list[dict[str, Any]]]] = []
    for record in records:
        found = record["result"].get("rows", [])
        for quantity in dict.fromkeys(row.get("quantity") for row in found):
            own = [row for row in found if row.get("quantity") == quantity and value(row)]
            rows += [(label(record) + (f", {quantity}" if quantity else ""), own)] if own else []
    if not rows:
        return None
    figure, (axes,) = canvas(width=9.0, height=1.3 + ROW * len(rows))
    handles: dict[str, Any] = {}
    names = list(dict.fromkeys(row["name"] for _, own in rows for row in own))
    for y, (_, own) in enumerate(rows):
        against = compared and any(map(_ours, own))
        rivals = [row for row in own if against and not _ours(row) and row["status"] != "wrong"]
        rivals.sort(key=lambda row: value(row) or 0.0)
        first = next((value(row) for row in own if _ours(row)), None)
        for row in own:
            best = bool(rivals) and row is rivals[0]
            look = _look(row, best=best) if against else _own_look(row["name"], names)
            other = "wrong" if row["status"] == "wrong" else "best other" if best else "others"
            shown = row["name"] if not against or _ours(row) else other
            face = "white" if row.get("extrapolated") else look["color"]
            (mark,) = axes.plot(value(row), y, linestyle="", markerfacecolor=face, zorder=3 if _ours(row) or best else 2, **look)
            if shown not in handles or not row.get("extrapolated"):
                handles[shown] = mark
        if rivals:
            ratio = (rivals[0].get("ratio") or {}).get("median") or (value(rivals[0]) / first if first else None)  # type: ignore[operator]
            times = f"{ratio:.3g} x, " if ratio else ""
            axes.text(1.01, y, times + rivals[0]["name"], transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(unit, fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    note = "; at the right: the best other method over ours; hollow: extrapolated" if compared else ""
    axes.set_title(title + note, fontsize=9, loc="left")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=7.5, frameon=False)
    return figure


def _own_look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a look for each of the toolkit's own steps, where nothing is compared."""
    k = names.index(name)
    return {"marker": MARKERS[k % len(MARKERS)], "color": COLOURS[k % len(COLOURS)], "markersize": 5}


def _ours(row: dict[str, Any]) -> bool:
    return row["name"] in OURS


def _look(row: dict[str, Any], *, best: bool) -> dict[str, Any]:
    if _ours(row):
        marker = OURS[row["name"]]
        return {"marker": marker, "color": "black", "markersize": 8 if marker == "*" else 5}
    if row["status"] == "wrong":
        return {"marker": "x", "color": REST, "markersize": 3.5}
    return {"marker": "D", "color": BEST, "markersize": 5.5} if best else {"marker": "o", "color": REST, "markersize": 3.5}


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
            look: Any = {**_own_look(name, names), "markersize": 4.5, "linewidth": 1.2}
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
