"""The route table: through which operations torch's ways to second derivatives are right, wrong or missing.

Ours. First picture: the table of the pinned torch (``benchmarks/routes/route_table.json``, made by ``python -m benchmarks routes
--write`` on the torch that it names): an operation with the tensors that parameters reach starred, and four references of
``hessiankit.check``. Second picture: the same on the torch at hand, for every route and every
example operation: the largest error relative to the largest entry of the Hessian; the judge is the closed form, confirmed by
central differences. Wrong is an error above 1e-9; it comes without any warning from torch.

What came out (torch 2.13.0): of 56 operations by 16 routes 728 cells are right, 70 wrong, 98 unsupported. Of the wrong ones 18
are of layer_norm, among them ``torch.func.hessian`` wherever a gain and what lies before the norm are both parameters, 7 each
of batch_norm in training, instance_norm, weight_norm, scatter_reduce with products and an ``autograd.Function`` whose backward
is marked ``once_differentiable``, 8 of cholesky_inverse, 3 of triangular_solve, and 2 each of group_norm, linalg.solve and
linalg.slogdet. Attention on the fused kernel and cdist have no second derivative by any route but differences. Of some
operations there is no closed form: there the differences are the judge.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from benchmarks.routes.operations import OPERATIONS
from benchmarks.routes.table import ROUTES_OF, TOLERANCE, load, routes
from benchmarks.routes.torch_routes import ROUTES
from figures._kit import FAINT, METHOD_COLOURS, cached, page, save, style, write_json, write_rows

NAME = Path(__file__).stem
LOOK: dict[str, dict[str, Any]] = {
    "right": {"marker": ".", "color": METHOD_COLOURS[1], "markersize": 4},
    "wrong": {"marker": "X", "color": METHOD_COLOURS[2], "markersize": 7},
    "unsupported": {"marker": "s", "color": FAINT, "markersize": 4.5, "markerfacecolor": "white"},
}
QUICK = (
    "layer_norm", "layer_norm (no gain)", "layer_norm (written out)", "group_norm (no gain)", "weight_norm", "softmax",
    "mse_loss",
)  # fmt: skip


def shipped() -> list[dict[str, str]]:
    """Return the shipped table: a row for each operation, a word for each reference."""
    return [
        {"operation": name, **{route: row.get(route, "right").partition(" ")[0] for route in ROUTES_OF}}
        for name, row in load()["operations"].items()
    ]


def measured(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row for each operation and route: status and error, on this torch."""
    found = routes(names).to_dict()
    return [{key: cell[key] for key in ("operation", "route", "status", "error", "message")} for cell in found["cells"]]


def short(operation: str) -> str:
    """Return an operation's name without what is the same everywhere.

    >>> short("aten.scaled_dot_product_attention.default(query*, key*, value*)")
    'sdpa(query*, key*, value*)'
    """
    return operation.removeprefix("aten.").replace(".default", "").replace("scaled_dot_product_attention", "sdpa")


def column(axes: Axes, rows: list[dict[str, str]]) -> None:
    """Draw some rows of the shipped table."""
    references = list(ROUTES_OF)
    for i, row in enumerate(rows):
        if any(row[name] != "right" for name in references):
            axes.axhspan(i - 0.5, i + 0.5, color="#f1f1f1", linewidth=0)
        for j, name in enumerate(references):
            axes.plot(j, i, linestyle="", clip_on=False, **LOOK[row[name]])
    axes.set_yticks(range(len(rows)), [short(row["operation"]) for row in rows], fontsize=6.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(references)), references, rotation=60, ha="left", rotation_mode="anchor", fontsize=7)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, len(references) - 0.5)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def error_map(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw errors as colours; a cross is wrong, an empty square unsupported."""
    operations, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("operation", "route"))
    values = np.full((len(operations), len(ways)), math.nan)
    for row in rows:
        i, j = operations.index(row["operation"]), ways.index(row["route"])
        if row["status"] == "unsupported":
            axes.plot(j, i, "s", color=FAINT, markerfacecolor="white", markersize=4)
        else:
            values[i, j] = max(row["error"], 1e-17)
            if row["status"] == "WRONG":
                axes.plot(j, i, "X", color=METHOD_COLOURS[2], markersize=5, markeredgecolor="white", markeredgewidth=0.4)
    colours = mpl.colormaps["cividis"].with_extremes(bad="white")
    shown = axes.imshow(np.ma.masked_invalid(values), norm=LogNorm(1e-17, 1.0), cmap=colours, aspect="auto")
    axes.set_yticks(range(len(operations)), operations, fontsize=7)
    axes.set_xticks(range(len(ways)), ways, rotation=35, ha="left", rotation_mode="anchor", fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    bar = axes.figure.colorbar(shown, ax=axes, fraction=0.03, pad=0.09)
    bar.set_label("relative error", fontsize=8)
    bar.ax.axhline(TOLERANCE, color="white", linewidth=1.2)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw the shipped table and measure this torch's (about 25 s of CPU); ``quick`` measures seven operations."""
    rows = shipped()
    names = QUICK if quick else tuple(OPERATIONS)
    cells = [cell for name in names for cell in cached(out, NAME, {"operation": name}, lambda n=name: measured((n,)))]  # type: ignore[misc]
    paths = []
    with style():
        figure = page(8.6, 6.2)
        height = -(-len(rows) // 3)
        for k in range(3):
            column(figure.add_axes((0.205 + 0.33 * k, 0.06, 0.085, 0.755)), rows[k * height : (k + 1) * height])
        count = Counter(row[name] for row in rows for name in ROUTES_OF)
        handles = [mpl.lines.Line2D([], [], linestyle="", label=f"{name} ({count[name]})", **look) for name, look in LOOK.items()]
        figure.legend(handles=handles, loc="lower left", ncol=3, fontsize=7.5, bbox_to_anchor=(0.0, -0.005), handletextpad=0.2)
        note = f"torch {load()['torch']}; a star: parameters reach this tensor; grey rows: not every route is right"
        figure.text(0.995, 0.012, note, fontsize=7.5, color=FAINT, ha="right")
        paths.append(save(figure, out / f"{NAME}{suffix}"))
        figure = page(9.6, 2.6 + 0.165 * len(names))
        top = 1 - 1.25 / figure.get_figheight()
        axes = figure.add_axes((0.2, 0.45 / figure.get_figheight(), 0.72, top - 0.45 / figure.get_figheight()))
        error_map(axes, cells)
        line = f"{TOLERANCE:g}, the line in the scale"
        foot = f"torch {torch.__version__}, float64; cross: wrong (above {line}); empty square: unsupported"
        figure.text(0.012, 0.1 / figure.get_figheight(), foot, fontsize=7.5, color=FAINT)
        paths.append(save(figure, out / f"{NAME}_errors{suffix}"))
    statuses = Counter(cell["status"] for cell in cells)
    ways = len({cell["route"] for cell in cells})
    print(f"  shipped: {dict(count)}; here, {len(names)} operations by {ways} of {len(ROUTES)} routes: {dict(statuses)}")
    summary = {"shipped": {"torch": load()["torch"], **count}, "here": {"torch": torch.__version__, **statuses}}
    return [
        *paths, write_rows(out / f"{NAME}.csv", rows), write_rows(out / f"{NAME}_errors.csv", cells),
        write_json(out / f"{NAME}.json", summary),
    ]  # fmt: skip
