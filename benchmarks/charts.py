"""Finished cells as figures, in the style of the toolkit's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from hessiankit.curvature.plot_frame import OKABE_ITO, STYLE, Picture

Record = dict[str, Any]
MARKERS = "oD^vs<>PXhp*d"
OURS = {
    "closed form": "*",
    "hessiankit": "*",
    "closed form, plain torch": "s",
    "hessian": "*",
    "hessian_operator": "P",
    "hessian_operator:recompute=layers": "2",
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
        figure = Picture(width, height, dpi=150, layout="constrained")
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
    words = [str(cell["problem"]), *([f"B={cell['batch']}"] if "batch" in cell else [])]
    words += [str(cell["dtype"])] if cell.get("dtype", "float64") != "float64" else []
    words += [f"{cell['threads']} threads"] if cell.get("threads", 1) != 1 else []
    return ", ".join(words)


def _median(row: dict[str, Any]) -> float | None:
    return row["time"]["median"] if row.get("time") else None


WORDS = {"seconds": ("faster", "slower")}
"""Words of an axis for a smaller and a larger number; of others than time "less" and "more"."""
BEST, REST = OKABE_ITO[2], OKABE_ITO[-1]
ROW = 0.22
"""Inches between two rows."""


Measure = tuple[str, Callable[[dict[str, Any]], float | None]]
"""An axis: its unit, and the number of a row, None where it has none."""


def methods(
    records: Sequence[Record],
    title: str,
    *measures: Measure,
    compared: bool = True,
    name: Callable[[Record], str] = label,
) -> Picture | None:
    """Draw a row a cell and quantity, an axis a measure: the toolkit's methods, the best other one by name, the rest small.

    A mark is filled where it was measured, hollow where extrapolated, a small cross where the result is wrong; the words at the
    right compare the toolkit's first method with the best other one. Without ``compared`` all rows are the toolkit's, each with
    a mark of its own. Records of one name share their rows.

    Args:
        records: Finished cells, with ``rows`` in their results.
        title: Of the picture.
        measures: By default the median time in seconds.
        compared: Whether there are other methods.
        name: Of a record.
    """
    measures = measures or (("seconds", _median),)
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for row in record["result"].get("rows", []):
            if any(value(row) for _, value in measures):
                quantity = row.get("quantity")
                rows.setdefault(name(record) + (f", {quantity}" if quantity else ""), []).append(row)
    if not rows:
        return None
    figure, panels = canvas(len(measures), width=9.0 if len(measures) == 1 else 6.0 * len(measures), height=1.3 + ROW * len(rows))
    handles: dict[str, Any] = {}
    for axes, (unit, value) in zip(panels, measures, strict=True):
        words = WORDS.get(unit, ("less", "more"))
        _rows(axes, [[row for row in own if value(row)] for own in rows.values()], value, handles, words if compared else None)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(LogLocator(10, subs=(2, 5) if high < 50 * low else "auto"))
        axes.xaxis.set_minor_formatter("{x:g}" if high < 50 * low else NullFormatter())
        axes.tick_params(which="minor", labelsize=7.5)
        axes.set_xlabel(unit, fontsize=9)
        axes.set_yticks(range(len(rows)), list(rows) if axes is panels[0] else [])
        axes.set_ylim(len(rows) - 0.5, -0.5)
    note = "; at the right: ours against the best other method" if compared else ""
    far = any(row.get("extrapolated") for own in rows.values() for row in own)
    panels[0].set_title(title + note + "; hollow: extrapolated" * far, fontsize=9, loc="left")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=7.5, frameon=False)
    return figure


def _rows(
    axes: Axes,
    rows: Sequence[list[dict[str, Any]]],
    value: Callable[[dict[str, Any]], float | None],
    handles: dict[str, Any],
    words: tuple[str, str] | None,
) -> None:
    """Draw the marks of each row, and say how ours compares with the best other method, which it names."""
    names = list(dict.fromkeys(row["name"] for own in rows for row in own))
    for y, own in enumerate(rows):
        against = words is not None and any(map(_ours, own))
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
            measured = (rivals[0].get("ratio") or {}).get("median") if value is _median else None
            ratio = measured or (value(rivals[0]) / first if first else None)  # type: ignore[operator]
            text = against_best(ratio, rivals[0]["name"], words or ("", "")) if ratio else rivals[0]["name"]
            axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
        elif against:
            axes.text(1.01, y, "no other finished", transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)


def against_best(ratio: float, name: str, words: tuple[str, str]) -> str:
    """Return in words what a ratio of the best other method over ours says.

    >>> against_best(3.2, "torch", WORDS["seconds"]), against_best(0.25, "torch", WORDS["seconds"])
    ('3.2 x faster than torch', '4 x slower than torch')
    """
    return f"{ratio:.3g} x {words[0]} than {name}" if ratio >= 1 else f"{1 / ratio:.3g} x {words[1]} than {name}"


def _own_look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a look for each of the toolkit's own steps, where nothing is compared."""
    k = names.index(name)
    return {"marker": MARKERS[k % len(MARKERS)], "color": OKABE_ITO[k % len(OKABE_ITO)], "markersize": 5}


def _ours(row: dict[str, Any]) -> bool:
    return row["name"] in OURS


def _look(row: dict[str, Any], *, best: bool) -> dict[str, Any]:
    if _ours(row):
        marker = OURS[row["name"]]
        return {"marker": marker, "color": "black", "markersize": 8 if marker == "*" else 5}
    if row["status"] == "wrong":
        return {"marker": "x", "color": REST, "markersize": 3.5}
    return {"marker": "D", "color": BEST, "markersize": 5.5} if best else {"marker": "o", "color": REST, "markersize": 3.5}
