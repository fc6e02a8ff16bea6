"""Figures 1, 2 and 9 of The Sharpness Disparity Principle: sharpness by block type, its distribution, and by layer.

The paper shows the average sharpness S of trained GPT-2 small (Figure 1, left) and LLaMA 0.25B (Figure 2, left), the spread of
log h over the entries of each type (Figure 2, right), and S by layer and by layer and type (Figure 9), on OpenWebText after 50
000 steps, with labels drawn from the model (eq. 3) and no errors. It reads Emb << QK < FFN < VO << Norm off them, and no trend
over layers.

Here: a GPT-2-like model (LayerNorm, GELU, learned positions, tied head) and a LLaMA-like one (RMSNorm, SwiGLU, rotary
positions, untied head) of four blocks and d_model 64, about 0.22 million parameters, on bytes of Python's standard library,
1000 steps of 1024 bytes, AdamW. S with its 95 % intervals is of 16 draws of the labels of 64 held-out windows of 64 bytes, h is
the mean over the draws; the errors are those of drawing labels, for one training run each.

What came out: FFN < QK < Norm < VO < Emb (GPT-2-like) and QK < FFN < Emb < Norm < Head < VO (LLaMA-like), every step beyond the
error of the draws, and neither the printed order: Emb is not the flattest, though most of its rows are not looked up, and VO is
sharper than Norm. FFN < VO holds in both. By layer there is a trend: the first block of the GPT-2-like model is about 30 times
as sharp as the others.

``--quick`` takes two blocks, d_model 32 and 60 steps: the pictures' form, not a result. Full: about 3 minutes of one core, most
of them the two training runs, which are shared with ``sharpness_disparity_3_8``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from figures._kit import (
    DASHES,
    FAINT,
    INK,
    TYPE_COLOURS,
    TYPE_MARKS,
    each,
    heading,
    page,
    save,
    style,
    write_rows,
    write_verdicts,
)
from figures._order import PRINTED, diluted, scale_of_both
from figures._trained import models
from figures._verdicts import Verdict, in_every
from hessiankit.curvature.plot_frame import Picture
from hessiankit.training.sharpness import SharpnessEstimate, SharpnessReport, sharpness
from papers.experiments.runs import Run, measured_on
from papers.experiments.spec import Spec

NAME = Path(__file__).stem
DRAWS = 16
SHOWN = ("Emb", "QK", "FFN", "VO", "Norm", "Head")


def measure(run: Run) -> SharpnessReport:
    """Return the sharpness of a trained model on held-out windows, in float64, so that no square underflows."""
    spec = run.spec
    return sharpness(run.model().double(), measured_on(spec), draws=2 * spec.draws, seed=spec.seed, histograms=True)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train or read the two runs, measure, draw types and layers, and write the numbers."""
    both = models("sharpness-disparity/fig3", out, quick=quick, run=run, text=text)
    runs = {title: one["AdamW"][0] for title, one in both.items()}
    reports = {title: measure(one) for title, one in runs.items()}
    files = [write_rows(out / f"{NAME}.csv", rows(reports)), write_rows(out / f"{NAME}_distribution.csv", bins(reports))]
    said = verdicts(reports, {title: one.spec for title, one in runs.items()})
    with style():
        files.append(_types(reports, out / f"{NAME}_types{suffix}", said[:2]))
        files.append(_layers(reports, out / f"{NAME}_layers{suffix}", said[2:]))
    return [*files, write_verdicts(out, NAME, said)]


def verdicts(reports: Mapping[str, SharpnessReport], specs: Mapping[str, Spec]) -> list[Verdict]:
    """Return what the models show of Eq. 1, of the distributions, and of Remark 1.1; one outcome a model."""
    scale, spec = scale_of_both(specs), next(iter(specs.values()))
    found = list(reports.values())
    eq1, medians = [], []
    for low, high in pairwise(PRINTED):
        quotients = [one.ratio(low, base=high) for one in found]
        outcomes = [None if q.low <= 1 <= q.high else q.low > 1 for q in quotients]  # an interval that holds 1 decides nothing
        seen = ", ".join(f"{q.value:.2g} [{q.low:.2g}, {q.high:.2g}]" for q in quotients)
        eq1.append(in_every(f"S({high}) / S({low}) > 1", outcomes, seen, diluted(low, spec)))
        logs = [[one.histograms[kind].quantile(0.5) for kind in (low, high)] for one in found]
        medians.append(
            in_every(
                f"median positive h of {high} above {low}'s",
                (a < b for a, b in logs),
                each(b / a for a, b in logs),
                diluted(low, spec),
            )
        )
    widths = [
        {kind: math.log10(one.histograms[kind].quantile(0.95) / one.histograms[kind].quantile(0.05)) for kind in PRINTED}
        for one in found
    ]
    widest = in_every(
        "Emb has the widest distribution (5 to 95 % of the positive h)",
        (max(one, key=one.__getitem__) == "Emb" for one in widths),
        f"{each(one['Emb'] for one in widths)} decades against at most "
        + each(max(x for kind, x in one.items() if kind != "Emb") for one in widths),
    )
    halves = [halves_of(one) for one in found]
    trend = in_every(
        "mean S of the first half of the blocks within a factor 2 of the second half's",
        (0.5 < x < 2 for x in halves),
        f"factor {each(halves)}",
    )
    return [
        Verdict("sharpness-disparity/eq1", f"sharpness rises from {' over '.join(PRINTED)}", scale, tuple(eq1)),
        Verdict(
            "sharpness-disparity/fig2-distributions",
            "the same of whole distributions, Emb's the widest",
            scale,
            (*medians, widest),
        ),
        Verdict("sharpness-disparity/remark1.1", "sharpness has no trend over layers", scale, (trend,)),
    ]


def halves_of(report: SharpnessReport) -> float:
    """Return the mean S of the first half of the blocks over that of the second half."""
    values = [one.value for layer, one in report.layers.items() if layer is not None]
    middle = len(values) // 2
    return (sum(values[:middle]) / middle) / (sum(values[middle:]) / (len(values) - middle))


def rows(reports: Mapping[str, SharpnessReport]) -> Iterator[dict[str, Any]]:
    """Yield every estimate: model, of what, block type, layer (from 1; 0 is the embedding), S and its interval."""
    for title, report in reports.items():
        for kind, one in report.types.items():
            yield _row(title, "type", kind, "", one)
        if report.seen_rows is not None:
            yield _row(title, "rows that the data look up", "Emb", "", report.seen_rows)
        for kind, one in report.scale_free.items():
            yield _row(title, "scale free", kind, "", one)
        for number, one in layers(report).items():
            yield _row(title, "layer", "", number, one)
        for kind, layer in report.type_layers:
            if layer is not None:
                yield _row(title, "type and layer", kind, layer + 1, report.type_layers[kind, layer])


def layers(report: SharpnessReport) -> dict[int, SharpnessEstimate]:
    """Return S by layer as Figure 9a counts: 0 is the embedding, then attention, network and norms of each block."""
    found = {} if ("Emb", None) not in report.type_layers else {0: report.type_layers["Emb", None]}
    return found | {layer + 1: one for layer, one in report.layers.items() if layer is not None}


def bins(reports: Mapping[str, SharpnessReport]) -> Iterator[dict[str, Any]]:
    """Yield the histograms of log10 h: lower edge and width of each bin, entries in it; exact zeros have no edge."""
    for title, report in reports.items():
        for kind, one in report.histograms.items():
            yield {"model": title, "type": kind, "log10_from": None, "log10_to": None, "entries": one.zeros}
            for low, high, count in zip(one.edges[:-1], one.edges[1:], one.counts, strict=True):
                yield {"model": title, "type": kind, "log10_from": low, "log10_to": high, "entries": count}


def _row(title: str, of: str, kind: str, layer: object, one: SharpnessEstimate) -> dict[str, Any]:
    numbers = {"sharpness": one.value, "standard_error": one.standard_error, "low": one.low, "high": one.high}
    return {"model": title, "of": of, "type": kind, "layer": layer, **numbers, "entries": one.entries}


def _page(reports: Mapping[str, SharpnessReport]) -> tuple[Picture, list[tuple[str, SharpnessReport, Axes, Axes]]]:
    """Return an empty picture with a row of two panels a model."""
    figure = page(7.6, 5.4)
    grid = figure.add_gridspec(
        2, 2, left=0.12, right=0.915, top=0.94, bottom=0.085, hspace=0.5, wspace=0.28, width_ratios=(1, 1.5)
    )
    return figure, [
        (title, report, figure.add_subplot(grid[k, 0]), figure.add_subplot(grid[k, 1]))
        for k, (title, report) in enumerate(reports.items())
    ]


def _types(reports: Mapping[str, SharpnessReport], path: Path, said: Sequence[Verdict]) -> Path:
    """Figures 1 and 2: a row a model, S on the left, the distribution of h on the right."""
    figure, rows = _page(reports)
    for title, report, left, right in rows:
        heading(left, f"{title}: average sharpness", "in print, $S$ rises from Emb to Norm", "$S$, 95 % interval")
        shown = [kind for kind in SHOWN if kind in report.types]
        for place, kind in enumerate(shown):
            _point(left, place, report.types[kind], kind)
        left.set_xticks(range(len(shown)), shown)
        left.set_xlim(-0.5, len(shown) - 0.5)
        left.set_yscale("log")
        heading(right, f"{title}: distribution of $h$ over the entries", "$\\log_{10} h$", "share per decade")
        _distribution(right, report, shown)
    return save(figure, path, said)


def _distribution(axes: Axes, report: SharpnessReport, shown: list[str]) -> None:
    """A line a type; what is exactly 0 is named in the key, since no logarithm shows it."""
    for kind, dash in zip(shown, DASHES, strict=False):
        one = report.histograms[kind]
        width = one.edges[1] - one.edges[0]
        look: Any = {"color": TYPE_COLOURS[kind], "linewidth": 1.2, "linestyle": dash}
        axes.stairs([count / one.entries / width for count in one.counts], one.edges, **look)
        axes.plot([], [], label=f"{kind}, {one.zeros / one.entries:.0%} are 0" if one.zeros else kind, **look)
    low = min(math.log10(report.histograms[kind].quantile(0.005)) for kind in shown)
    axes.set_xlim(low, max(report.histograms[kind].edges[-1] for kind in shown))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", handlelength=2.4, borderaxespad=0.2, labelspacing=0.25)


def _layers(reports: Mapping[str, SharpnessReport], path: Path, said: Sequence[Verdict]) -> Path:
    """Figure 9: a row a model, all types of a layer together on the left, each type on the right."""
    figure, rows = _page(reports)
    for title, report, left, right in rows:
        heading(left, f"{title}: by layer", "layer (0: embedding)", "$S$, 95 % interval")
        for number, one in layers(report).items():
            _point(left, number, one, "Emb" if number == 0 else None)
        heading(right, f"{title}: by layer and type", "layer", "$S$, 95 % interval")
        kinds = [kind for kind in SHOWN if (kind, 0) in report.type_layers]
        count = sum(layer is not None for layer in report.layers)
        for place, kind in enumerate(kinds):
            own = [report.type_layers[kind, layer] for layer in range(count)]
            moved = [number + 1 + 0.06 * (place - (len(kinds) - 1) / 2) for number in range(count)]
            right.plot(moved, [one.value for one in own], color=TYPE_COLOURS[kind], linewidth=0.9)
            for x, one in zip(moved, own, strict=True):
                _point(right, x, one, kind)
            right.plot([], [], TYPE_MARKS[kind], color=TYPE_COLOURS[kind], label=kind)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=0.8, borderaxespad=0.1)
        for axes, first in ((left, 0), (right, 1)):
            axes.set_xticks(range(first, count + 1))
            axes.set_yscale("log")
    return save(figure, path, said)


def _point(axes: Axes, x: float, one: SharpnessEstimate, kind: str | None) -> None:
    colour = INK if kind is None else TYPE_COLOURS.get(kind, FAINT)
    axes.plot([x, x], [one.low, one.high], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([x], [one.value], "o" if kind is None else TYPE_MARKS.get(kind, "."), color=colour, markersize=4.5)
