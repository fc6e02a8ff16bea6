"""Report of ``hessiankit tune-lr``: tables, JSON, a section of a page, and a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hessiankit.curvature.plot_frame import DPI, FAINT, INK, STYLE, check_suffix, write_picture
from hessiankit.optim.ratios import CAP, POWER
from hessiankit.studies.tuning.comparison import TuningComparison
from hessiankit.studies.tuning.experiment import BETAS, CLIP, WEIGHT_DECAY, Setting, model_of, texts
from hessiankit.studies.tuning.sweep import SearchResult
from hessiankit.studies.tuning.verdict import ArmResult, Interval, judge, summary
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_text
from hessiankit.support.tables import Detail, Piece, Printed, as_markdown, table

HEADERS = ("arm", "lr", "loss (nats/byte)", "difference, paired", "relative steps", "at AdamW's loss", "verdict")
PLACE = ("date", "processor", "cores", "system", "python", "torch")


@dataclass(frozen=True, repr=False)
class TuneReport(Printed):
    """The comparison with its rows judged.

    Attributes:
        comparison: All that was run.
        setting: What all runs share.
        confidence: Of each interval.
        rows: One an arm, the baseline first.
        runs: Number of runs.
        seconds: Time that they took, added up.
        place: Where and with what it was run.
    """

    comparison: TuningComparison
    setting: Setting
    confidence: float = 0.95
    runs: int = 0
    seconds: float = 0.0
    rows: tuple[ArmResult, ...] = field(init=False)
    place: dict[str, Any] = field(default_factory=environment)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", judge(self.comparison.arms, confidence=self.confidence))

    @property
    def summary(self) -> str:
        """One sentence, no stronger than the intervals."""
        return summary(self.rows)

    def cells(self) -> list[list[str]]:
        """Return the table's rows under :data:`HEADERS`."""
        return [
            [
                row.arm.name,
                f"{row.arm.lr:.3g}",
                _shown(row.loss),
                _shown(row.difference, "+.3f"),
                _shown(row.steps, ".2f"),
                row.steps_to_baseline if k else str(self.setting.steps),
                row.verdict,
            ]
            for k, row in enumerate(self.rows)
        ]

    def sweep_cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows of the searches: mean final loss by learning rate, one row a learning rate."""
        sweeps = self.comparison.sweeps
        lrs = sorted({lr for one in sweeps for lr in one.losses})
        rows = [[f"{lr:.3g}", *(_of_sweep(one.losses.get(lr, {}), lr == one.best) for one in sweeps)] for lr in lrs]
        return ["lr", *(one.name for one in sweeps)], rows

    def _headline(self) -> str:
        return self.summary

    def _parts(self) -> Iterator[Piece]:
        headers, rows = self.sweep_cells()
        searches = f"searches, seeds {_seeds(self.comparison.sweeps[0].seeds)}: mean (number of seeds)"
        title, drop = f"seeds {_seeds(self.comparison.seeds)}", ("at AdamW's loss", "relative steps")
        yield Detail(table(headers, rows, title=searches))
        yield from (Detail(text) for text in (*map(str, self.comparison.sweeps), "", self.measured, ""))
        yield table(HEADERS, self.cells(), title=title, prose=("verdict",), drop=drop)
        yield from (Detail(text) for text in ("", self.notes, ""))
        yield self.summary

    @property
    def measured(self) -> str:
        """Where the measured ratios come from."""
        pilot = self.comparison.pilot
        values = ", ".join(f"{kind} {value:.2g} ± {error:.1g}" for kind, (value, error) in sorted(pilot.sharpness.items()))
        ratios = ", ".join(f"{kind} {ratio:.3g}" for kind, ratio in pilot.ratios)
        return (
            f"Sharpness (eq. 4, ± standard error) of the tuned baseline after {pilot.step} steps: {values}; "
            f"order {pilot.order}; measured ratios (S_Norm / S)^{POWER:g} within "
            f"[{1 / CAP:g}, {CAP:g}], the end of the interval next to 1: {ratios}."
        )

    @property
    def notes(self) -> str:
        """How to read the table."""
        count = len(self.rows) - 1
        return (
            f"Intervals hold with {100 * self.confidence:g} % each. A verdict of better or worse also holds when all {count} "
            "comparisons are counted (Bonferroni), unless it says that it is taken alone. Relative steps: steps to the lowest "
            "loss that both runs of a seed reach, arm over baseline; below 1 the arm is sooner. At AdamW's loss: mean step at "
            "which the arm first reaches its seed's final AdamW loss, and in how many runs."
        )

    @property
    def described(self) -> str:
        """What was trained on what."""
        setting = self.setting
        text, held_out = texts(setting.text)
        size = sum(p.numel() for p in model_of(setting, 0).parameters())
        return (
            f"Byte-level GPT-2-like model of {size} parameters (L = {setting.layers}, d = {setting.d_model}, "
            f"{setting.heads} heads, context {setting.length}, learned positions, LayerNorm, GELU, tied head), {setting.steps} "
            f"steps of {setting.batch_size} sequences; {text.name}: {len(text)} bytes of {len(text.files)} files, held out: "
            f"{len(held_out)} bytes of {len(held_out.files)} other files, {setting.windows} fixed windows of them evaluated. "
            f"AdamW with betas {BETAS[0]}, {BETAS[1]}, weight decay {WEIGHT_DECAY} on matrices, gradients clipped to norm "
            f"{CLIP:g}, {100 * setting.warm_up:g} % linear warm-up, cosine to lr x {setting.floor:g}. "
            f"{self.runs} runs, {self.seconds / 60:.0f} minutes of one core in all."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it, the loss curves among it."""
        return {
            "setting": asdict(self.setting),
            "confidence": self.confidence,
            "runs": self.runs,
            "seconds": self.seconds,
            "summary": self.summary,
            "sweeps": [_sweep_dict(one) for one in self.comparison.sweeps],
            "pilot": asdict(self.comparison.pilot),
            "seeds": list(self.comparison.seeds),
            "arms": [row.to_dict() for row in self.rows],
            "curves": {
                arm.name: {"steps": runs[0].steps, "losses": [[_finite(x) for x in run.losses] for run in runs]}
                for arm, runs in self.comparison.arms
            },
            "environment": self.place,
        }


def _shown(one: Interval | None, form: str = ".3f") -> str:
    return "-" if one is None else one.text(form)


def _of_sweep(losses: dict[int, float], best: bool) -> str:
    if not losses:
        return ""
    mean = sum(losses.values()) / len(losses)
    text = "diverged" if mean == float("inf") else f"{mean:.3f}"
    return f"{'* ' if best else ''}{text} ({len(losses)})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])


def _sweep_dict(one: SearchResult) -> dict[str, Any]:
    losses = {str(lr): {str(seed): _finite(x) for seed, x in of.items()} for lr, of in sorted(one.losses.items())}
    return {"name": one.name, "best": one.best, "inside": one.inside, "extended": list(one.extended), "losses": losses}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


MARK = "tune-lr"


def section(report: TuneReport, command: str, picture: str | None) -> str:
    """Return the section: command, setting, searches, arms, verdicts, picture."""
    headers, rows = report.sweep_cells()
    place = ", ".join(f"{key} {report.place[key]}" for key in PLACE[1:])
    parts = [
        f"```bash\n{command}\n```",
        f"**{report.summary}**",
        as_markdown(HEADERS, report.cells()),
        report.notes,
        *([f"![Loss against learning rate, loss curves, paired differences]({picture})"] if picture else []),
        "The searches that chose the learning rates: mean final loss (number of seeds), \\* the choice.",
        as_markdown(headers, [[cell.replace("*", "\\*") for cell in row] for row in rows]),
        "\n".join(f"- {one}" for one in report.comparison.sweeps),
        report.measured,
        report.described,
        f"{report.place['date']}; {place}.",
    ]
    return "\n\n".join(parts)


def fill(page: str, text: str) -> str:
    """Return a page with ``text`` between the marks, or with marks and text at its end where it has none.

    >>> print(fill("a\\n<!-- tune-lr -->old<!-- /tune-lr -->\\nb", "new"))
    a
    <!-- tune-lr -->
    new
    <!-- /tune-lr -->
    b
    """
    marked = f"<!-- {MARK} -->\n{text}\n<!-- /{MARK} -->"
    pattern = re.compile(rf"<!-- {MARK} -->.*?<!-- /{MARK} -->", re.DOTALL)
    return pattern.sub(lambda _: marked, page) if pattern.search(page) else f"{page.rstrip()}\n\n{marked}\n".lstrip()


def write_page(path: Path, report: TuneReport, command: str, picture: str | None) -> None:
    """Write the section into a page, which is made if there is none."""
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else "# Learning rates compared\n"
    except OSError as error:
        raise InputError(f"tune-lr: cannot read {path}: {error.strerror}; name another page") from error
    write_text("tune-lr", path, fill(page, section(report, command, picture)))


# Okabe and Ito's palette, distinct with every kind of colour vision; the dashes differ too
COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A", "#6B4C9A")
DASHES = ("-", "-", "-", "--", "--", "-.", "-.", ":", ":")
MARKS = ("o", "s", "^")
ROOM = 0.5
"""Nats a byte above the best that the pictures have room for."""


def draw(report: TuneReport, path: Path) -> Path:
    """Write the picture and return its path.

    Raises:
        InputError: If the suffix is not one of ``.png``, ``.svg``, ``.pdf``, or the file cannot be written.
    """
    check_suffix("tune-lr", path)
    with mpl.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(11.0, 3.9), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        places = ((0.045, 0.24), (0.335, 0.24), (0.8, 0.19))  # left edge and width; the names stand before the last one
        left, middle, right = (figure.add_axes((x, 0.13, width, 0.74)) for x, width in places)
        _sweeps(left, report)
        _curves(middle, report)
        _differences(right, report)
        for axes in (left, middle, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(which="both", labelsize=7, colors=INK, width=0.6, length=2.5)
        write_picture("tune-lr", figure, path)
    return path


def draw_search(axes: Axes, one: SearchResult, top: float, colour: str, mark: str, dash: Any = "-") -> None:
    """Draw a search: a dot a run, a line through the means, a ring around the choice; larger losses lie on ``top``."""
    dots = [(lr, min(x, top)) for lr, of in one.losses.items() for x in of.values()]
    means = {lr: min(math.fsum(of.values()) / len(of), top) for lr, of in sorted(one.losses.items())}
    axes.plot(*zip(*dots, strict=True), mark, color=colour, markersize=3, alpha=0.6, markeredgewidth=0)
    axes.plot(list(means), list(means.values()), color=colour, linestyle=dash, linewidth=1.2)
    axes.plot([one.best], [means[one.best]], "o", color=colour, markersize=9, fillstyle="none", markeredgewidth=1.1)
    axes.plot([], [], mark, color=colour, linestyle=dash, markersize=3.5, linewidth=1.2, label=one.name)


def draw_interval(axes: Axes, row: float, one: Interval, left: float, right: float, colour: str) -> None:
    """Draw a value with its interval at a height; where the interval goes on beyond the axes it ends in an arrow."""
    axes.plot([max(one.low, left), min(one.high, right)], [row, row], color=colour, linewidth=1.4, solid_capstyle="butt")
    axes.plot([one.value], [row], "o", color=colour, markersize=4)
    for x, mark in [(left, "<")] * (one.low < left) + [(right, ">")] * (one.high > right):
        axes.plot([x], [row], mark, color=colour, markersize=4, clip_on=False)


def _sweeps(axes: Axes, report: TuneReport) -> None:
    """Final loss against learning rate; runs that diverged, or whose loss is above the axes, lie on the upper edge."""
    sweeps = report.comparison.sweeps
    finite = [x for one in sweeps for of in one.losses.values() for x in of.values() if math.isfinite(x)]
    low = min(finite)
    top = min(max(finite), low + ROOM)
    room = max(top - low, 1e-3)
    for one, colour, mark in zip(sweeps, COLOURS, MARKS, strict=False):
        draw_search(axes, one, top, colour, mark)
    axes.set_xscale("log")
    axes.set_ylim(low - 0.06 * room, top + 0.3 * room)  # room for the legend
    axes.legend(fontsize=6.8, frameon=False, loc="upper left", handlelength=1.8, borderaxespad=0.2)
    _dress(axes, "searches: final loss by learning rate", "learning rate (of the norms)", "held-out loss (nats/byte)")


def _curves(axes: Axes, report: TuneReport) -> None:
    """Mean loss of each arm with the band of its seeds, from the first fifth of the budget on."""
    ends = []
    for (_, runs), colour, dash in zip(report.comparison.arms, COLOURS, DASHES, strict=False):
        columns = list(zip(*(run.losses for run in runs), strict=True))
        points = [(s, c) for s, c in zip(runs[0].steps, columns, strict=True) if all(map(math.isfinite, c))]
        steps = [s for s, _ in points]
        axes.plot(steps, [math.fsum(c) / len(c) for _, c in points], color=colour, linestyle=dash, linewidth=1.2)
        axes.fill_between(steps, [min(c) for _, c in points], [max(c) for _, c in points], color=colour, alpha=0.12, linewidth=0)
        ends += [x for s, c in points for x in c if s >= report.setting.steps / 5]
    low = min(ends)
    axes.set_xlim(report.setting.steps / 5, report.setting.steps)
    axes.set_ylim(low - 0.03, min(max(ends), low + 1.5 * ROOM))
    _dress(axes, "loss curves: mean and range of the seeds", "step", "held-out loss (nats/byte)")


def _differences(axes: Axes, report: TuneReport) -> None:
    """A row an arm: mean paired difference with its interval; the name carries the line that the curves have."""
    rows = report.rows
    ends = [x for row in rows if row.difference for x in (row.difference.low, row.difference.high) if math.isfinite(x)]
    left, right = max(min(ends, default=-0.1), -ROOM), min(max(ends, default=0.1), ROOM)
    room = max(right, 0.0) - min(left, 0.0) or 0.1
    left, right = min(left, 0.0) - 0.04 * room, max(right, 0.0) + 0.04 * room
    across = axes.get_yaxis_transform()  # x in fractions of the width
    for k, (row, colour, dash) in enumerate(zip(rows, COLOURS, DASHES, strict=False)):
        axes.text(-0.16, k, row.arm.name, transform=across, ha="right", va="center", fontsize=7.0)
        axes.plot([-0.13, -0.02], [k, k], transform=across, linestyle=dash, clip_on=False, color=colour, linewidth=1.4)
        one = row.difference
        if row.diverged or (one is not None and one.value > right):
            text = f"diverged in {row.diverged} of {len(row.reached)}" if row.diverged or one is None else f"{one.value:+.2f} →"
            axes.text(0.98, k, text, transform=across, ha="right", va="center", fontsize=6.5, color=FAINT)
        elif one is not None:
            draw_interval(axes, k, one, left, right, colour)
    axes.axvline(0.0, color=INK, linewidth=0.6)
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    _dress(axes, f"paired difference, {100 * report.confidence:g} % interval", "nats/byte more than tuned AdamW", "")


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=8.5, loc="left", pad=8)
    axes.set_xlabel(x, fontsize=7.5, labelpad=3)
    axes.set_ylabel(y, fontsize=7.5, labelpad=3)
