"""Report of ``python -m papers tune-lr``: tables, JSON, a section of a page, and a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from hessiankit.curvature.plot_frame import FAINT, INK, OKABE_ITO, STYLE, Picture, check_suffix, dress, write_picture
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError
from hessiankit.support.files import fill, write_text
from hessiankit.support.tables import Detail, Piece, Printed, as_markdown, table
from hessiankit.training.optim.ratios import CAP, POWER
from papers.experiments.tuning.comparison import TuningComparison
from papers.experiments.tuning.experiment import BETAS, CLIP, PAPER, WEIGHT_DECAY, Setting, model_of, texts
from papers.experiments.tuning.sweep import SearchResult
from papers.experiments.tuning.verdict import ArmResult, Interval, judge, summary

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
            "comparisons are counted (Bonferroni), unless it says that it is taken alone. Relative steps are the arm's steps "
            "over the baseline's, to the lowest loss that both runs of a seed reach; below 1 the arm is faster. The column "
            "'at AdamW's loss' is the mean step at which an arm reaches AdamW's final loss of its seed, with their number."
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


def section(report: TuneReport, command: str, picture: str | None) -> str:
    """Return the section: command, setting, searches, arms, verdicts, picture."""
    headers, rows = report.sweep_cells()
    place = ", ".join(f"{key} {report.place[key]}" for key in PLACE[1:])
    parts = [
        f"```bash\n{command}\n```",
        f"**{report.summary}**",
        as_markdown(HEADERS, report.cells()),
        report.notes,
        *([f"![Loss against learning rate; paired differences with their verdicts]({picture})"] if picture else []),
        "The searches that chose the learning rates, with mean final loss and number of seeds; \\* marks the choice.",
        as_markdown(headers, [[cell.replace("*", "\\*") for cell in row] for row in rows]),
        "\n".join(f"- {one}" for one in report.comparison.sweeps),
        report.measured,
        report.described,
        f"{report.place['date']}; {place}.",
    ]
    return "\n\n".join(parts)


def write_page(path: Path, report: TuneReport, command: str, picture: str | None) -> None:
    """Write the section into a page, which is made if there is none."""
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else "# Learning rates compared\n"
    except OSError as error:
        raise InputError(f"tune-lr: cannot read {path}: {error.strerror}; name another page") from error
    write_text("tune-lr", path, fill(page, {"tune-lr": section(report, command, picture)}))


MARKS, DASHES = "os^D", ("-", "--", "-.", ":")
"""Of searches."""
ROOM = 0.7
"""Nats a byte above the best, and away from 0, that the pictures have room for."""


def draw(report: TuneReport, path: Path) -> Path:
    """Write the picture and return its path: the searches, each arm's difference with its verdict, and what eq. (5) did.

    Raises:
        InputError: If the suffix is not one of ``.png``, ``.svg``, ``.pdf``, or the file cannot be written.
    """
    check_suffix("tune-lr", path)
    setting, baseline = report.setting, report.rows[0]
    size = sum(p.numel() for p in model_of(setting, 0).parameters())
    scale = f"{len(baseline.reached)} seeds, {size / 1e6:.2g} million parameters, {setting.steps} steps"
    with mpl.rc_context({**STYLE, "font.size": 8}):
        figure = Picture(10.6, 0.27 * max(len(report.rows), 9) + 1.5)
        left, right = (figure.add_axes((x, 0.14, width, 0.62)) for x, width in ((0.05, 0.27), (0.535, 0.23)))
        figure.text(0.01, 0.94, f"Learning rates by block type beside tuned AdamW ({scale})", fontsize=10)
        for row in report.rows[1:]:
            if row.arm.ratios == PAPER and row.arm.lr == baseline.arm.lr and (one := row.difference) is not None:
                status = "seen at this size" if one.high < 0 else "not seen at this size" if one.low > 0 else "open"
                claim = "The Sharpness Disparity Principle, Sec. 6.1: eq. (5) at AdamW's learning rate ends lower"
                figure.text(0.01, 0.88, f"{claim}: {status} ({row.verdict}).", fontsize=8)
        draw_searches(left, report.comparison.sweeps)
        _titled(left, "searches: final loss by learning rate", "learning rate of the norms", "held-out loss (nats/byte)")
        draw_differences(right, report.rows[1:])
        title = f"loss minus that of AdamW, paired by seed, {100 * report.confidence:g} % interval"
        _titled(right, title, "nats/byte; left of 0 the arm is better")
        write_picture("tune-lr", figure, path)
    return path


def draw_searches(axes: Axes, searches: Sequence[SearchResult]) -> None:
    """Draw final loss against learning rate: a mark a run, a line through the means, a ring around the choice.

    Runs that diverged, or whose loss is above the axes, lie on the upper edge.
    """
    finite = [x for one in searches for of in one.losses.values() for x in of.values() if math.isfinite(x)]
    low, top = min(finite), min(max(finite), min(finite) + ROOM)
    room = max(top - low, 1e-3)
    for one, colour, mark, dash in zip(searches, OKABE_ITO, MARKS, DASHES, strict=False):
        runs = [(lr, min(x, top)) for lr, of in one.losses.items() for x in of.values()]
        means = {lr: min(math.fsum(of.values()) / len(of), top) for lr, of in sorted(one.losses.items())}
        axes.plot(*zip(*runs, strict=True), mark, color=colour, markersize=3, alpha=0.6, markeredgewidth=0)
        axes.plot([one.best], [means[one.best]], "o", color=colour, markersize=9, fillstyle="none", markeredgewidth=1.1)
        axes.plot(*zip(*means.items(), strict=True), color=colour, linestyle=dash, linewidth=1.2)
        axes.plot([], [], mark, color=colour, linestyle=dash, markersize=3.5, linewidth=1.2, label=one.name)
    axes.set_xscale("log")
    axes.set_ylim(low - 0.08 * room, top + 0.35 * room)  # room for the legend
    axes.legend(fontsize=7, frameon=False, loc="upper left", ncols=2, handlelength=2.4, columnspacing=1.0)


def draw_differences(axes: Axes, rows: Sequence[ArmResult]) -> None:
    """Draw a row an arm: its mean paired difference with the interval, blue below 0, orange above, grey where it holds 0.

    The verdict is written at the right. An interval that goes on beyond the axes ends in an arrow.
    """
    found = [row.difference for row in rows if row.difference is not None]
    ends = [x for one in found for x in (one.value, one.low, one.high) if abs(x) < ROOM]
    left, right = min([*ends, -0.06]) - 0.02, max([*ends, 0.02]) + 0.02
    for k, row in enumerate(rows):
        text = textwrap.fill(row.verdict, 44)
        axes.text(1.02, k, text, transform=axes.get_yaxis_transform(), va="center", fontsize=6.5, color=FAINT)
        if (one := row.difference) is not None:
            colour = "#0072b2" if one.high < 0 else "#d55e00" if one.low > 0 else FAINT
            axes.plot([max(one.low, left), min(one.high, right)], [k, k], color=colour, linewidth=1.4, solid_capstyle="butt")
            axes.plot([one.value], [k], "o", color=colour, markersize=4)
            for x, mark in [(left, "<")] * (one.low < left) + [(right, ">")] * (one.high > right):
                axes.plot([x], [k], mark, color=colour, markersize=4, clip_on=False)
    axes.axvline(0.0, color=INK, linewidth=0.6)
    axes.set_xlim(left, right)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.arm.name for row in rows], fontsize=7.5)


def _titled(axes: Axes, title: str, x: str, y: str = "") -> None:
    dress(axes)
    axes.set_title(title, fontsize=8.5, loc="left", pad=8)
    axes.set_xlabel(x, fontsize=7.5, labelpad=3)
    axes.set_ylabel(y, fontsize=7.5, labelpad=3)
