"""The chart of coverage: against the number of draws, a panel for types, tensors and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hessiankit.drawing.plot_frame import DPI, FAINT, INK, STYLE, SUFFIXES

PANELS = {"types": "block types", "tensors": "tensors", "ratios": "quotients S_Norm / S"}
COLOURS = ("#2c6fb5", "#7fb0e0", "#c1553b", "#e59a85", "#3f8f5a", "#8a6bb0")


def draw_chart(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw mean coverage against draws, whole line for one micro-batch and dotted for four, and return the path."""
    rows = [row for row in rows if not row["estimator"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    draws = sorted({row["draws"] for row in rows})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.3), dpi=DPI)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1, 3, left=0.06, right=0.985, top=0.78, bottom=0.13, wspace=0.16)
        figure.text(0.06, 0.93, "How often the 95% interval covers the exact value", fontsize=11, color=INK)
        x = 0.06
        for model, colour in zip(models, COLOURS, strict=False):
            figure.text(x, 0.865, "\u25a0 " + model, fontsize=8, color=colour)
            x += 0.03 + 0.0062 * len(model)
        note = "mean over the members; whole line: one micro-batch, dotted line: four"
        figure.text(0.985, 0.937, note, fontsize=7, color=FAINT, ha="right")
        for k, (group, title) in enumerate(PANELS.items()):
            axes = figure.add_subplot(grid[0, k])
            axes.axhspan(92, 98, color="#eeeeee", linewidth=0)
            axes.axhline(95, color=INK, linewidth=0.6)
            for model, colour in zip(models, COLOURS, strict=False):
                for micro_batches, line in ((1, "-"), (4, ":")):
                    own = {r["draws"]: r["coverage"] for r in rows if (r["model"], r["micro_batches"]) == (model, micro_batches)}
                    points = [(draws.index(d), 100 * c[group][0]) for d, c in own.items() if group in c]
                    axes.plot(*zip(*points, strict=True), line, marker="o", color=colour, markersize=3, linewidth=1.0)
            axes.set_xticks(range(len(draws)), [str(d) for d in draws])
            axes.set_ylim(84, 100)
            axes.set_xlabel("draws", fontsize=8, color=FAINT)
            axes.set_title(title, fontsize=8.5, loc="left")
            axes.tick_params(labelsize=7, length=2)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=DPI, metadata=SUFFIXES[path.suffix])
    return path
