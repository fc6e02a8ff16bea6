"""The chart of coverage: against the number of draws, a panel for types, tensors and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.lines import Line2D

from figures._kit import FAINT, INK, METHOD_COLOURS, METHOD_MARKS, page, save
from hessiankit.curvature.plot_frame import STYLE

PANELS = {"types": "block types", "tensors": "tensors", "ratios": r"quotients $S_{\rm Norm} / S$"}


def draw_chart(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw mean coverage against draws, whole line for one micro-batch and dotted for four, and return the path."""
    rows = [row for row in rows if not row["estimator"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    draws = sorted({row["draws"] for row in rows})
    with mpl.rc_context(STYLE):
        figure = page(8.6, 3.5)
        grid = figure.add_gridspec(1, 3, left=0.065, right=0.985, top=0.76, bottom=0.13, wspace=0.16)
        figure.text(0.065, 0.93, "How often the 95 % interval holds the exact value", fontsize=10.5, color=INK)
        looks: dict[str, Any] = {
            model: {"color": colour, "marker": mark, "markersize": 3.5, "linewidth": 1.0}
            for model, colour, mark in zip(models, METHOD_COLOURS, METHOD_MARKS, strict=False)
        }
        handles = [Line2D([], [], label=model, **look) for model, look in looks.items()]
        options: Any = {"frameon": False, "fontsize": 8, "columnspacing": 1.2, "handletextpad": 0.4}
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.055, 0.915), ncols=len(models), **options)
        note = "mean over the members; whole line: one micro-batch, dotted: four"
        figure.text(0.985, 0.937, note, fontsize=7.5, color=FAINT, ha="right")
        for k, (group, title) in enumerate(PANELS.items()):
            axes = figure.add_subplot(grid[0, k])
            axes.axhspan(92, 98, color="#eeeeee", linewidth=0)
            axes.axhline(95, color=INK, linewidth=0.6)
            for model, look in looks.items():
                for micro_batches, line in ((1, "-"), (4, ":")):
                    own = {r["draws"]: r["coverage"] for r in rows if (r["model"], r["micro_batches"]) == (model, micro_batches)}
                    points = [(draws.index(d), 100 * c[group][0]) for d, c in own.items() if group in c]
                    axes.plot(*zip(*points, strict=True), linestyle=line, **look)
            axes.set_xticks(range(len(draws)), [str(d) for d in draws])
            axes.set_ylim(min(89, axes.get_ylim()[0]), 100)
            axes.set_xlabel("draws", fontsize=8)
            if k == 0:
                axes.set_ylabel("coverage, %", fontsize=8)
            axes.set_title(title, fontsize=8.5, loc="left")
            axes.tick_params(labelsize=7.5, length=2)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        return save(figure, path)
