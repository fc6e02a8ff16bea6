"""Table 3 of HybridNorm: Pre-Norm and HybridNorm under three initialisations, with intervals over seeds.

The paper trains a 550M model once for each of six cells: Pre-Norm ends at losses of 2.75 (normal), 2.76 (depth-scaled) and 2.76
(Megatron), HybridNorm at 2.76, 2.76 and 2.74, and takes normal for the one and Megatron for the other as defaults. Differences of
0.01 to 0.02 in single runs carry no statement of noise.

Here: eight blocks of width 64 on the bytes of Python's standard library, 240 steps, four seeds a cell, which share initial random
numbers and batches (``papers.experiments.catalogue``). Drawn: held-out losses of every seed, their mean with Student's 95 %
interval, and differences to the paper's choice of the same placement, seed by seed, with intervals that hold for the four of
them together (Bonferroni). A run counts as diverged that ends half a nat above its own best evaluation, or with no number; such
cells are marked and have no interval.

What came out: no run diverges. For HybridNorm the paper's choice, Megatron, is the best of the three: normal is worse by 0.157
[0.018, 0.296], depth-scaled not told apart (0.037 [-0.016, 0.090]). For Pre-Norm the paper's choice, normal, is the worst:
depth-scaled is better by 0.101 [0.034, 0.168] and Megatron by 0.125 [0.039, 0.211]. Seeds of one cell spread by 0.04 to 0.13,
more than any difference in Table 3. 240 steps at width 64 show the beginning of training only, where a smaller last layer of each
branch helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_rows, write_verdicts
from figures._trained import Arms, arms, seeds_of, short_of, spec_of
from figures._verdicts import Verdict, above_zero
from hessiankit.curvature.plot_frame import Picture
from papers.experiments.runs import Run
from papers.experiments.spec import scale_of
from papers.experiments.tuning.verdict import Interval, mean_interval, paired_difference, simultaneous

NAME = Path(__file__).stem
QUICK_SEEDS = (0, 1, 2)
PLACEMENTS = ("Pre-Norm", "HybridNorm")
SCHEMES = ("normal", "depth-scaled", "megatron")
CHOSEN = {"Pre-Norm": "normal", "HybridNorm": "megatron"}
"""The paper's defaults, Section 4.4."""
PRINTED = {
    ("Pre-Norm", "normal"): (2.75, 20.29), ("Pre-Norm", "depth-scaled"): (2.76, 20.49), ("Pre-Norm", "megatron"): (2.76, 20.44),
    ("HybridNorm", "normal"): (2.76, 20.44), ("HybridNorm", "depth-scaled"): (2.76, 20.40),
    ("HybridNorm", "megatron"): (2.74, 20.00),
}  # fmt: skip
"""Training loss and perplexity on C4."""


@dataclass(frozen=True)
class Cell:
    """One placement with one initialisation.

    Attributes:
        placement: The paper's name.
        scheme: The initialisation.
        losses: Held-out losses at the end, one a seed.
        diverged: Which of them count as diverged.
        train: Mean training losses of the last tenth of the steps, one a seed.
    """

    placement: str
    scheme: str
    losses: tuple[float, ...]
    diverged: tuple[bool, ...]
    train: tuple[float, ...]

    @property
    def mean(self) -> Interval | None:
        """The mean loss with its interval; None where a run has diverged."""
        return None if any(self.diverged) else mean_interval(self.losses)

    def less(self, other: Cell) -> Interval | None:
        """Return this cell's loss minus another's, seed by seed; None where a run of either has diverged."""
        confidence = simultaneous(0.95, len(PLACEMENTS) * (len(SCHEMES) - 1))
        return None if any(self.diverged + other.diverged) else paired_difference(self.losses, other.losses, confidence)


def cell_of(placement: str, scheme: str, runs: Sequence[Run]) -> Cell:
    """Return what the runs of a cell showed."""
    tenth = max(1, runs[0].spec.steps // 10)
    return Cell(
        placement, scheme, tuple(run.losses[-1] for run in runs), tuple(run.diverged for run in runs),
        tuple(math.fsum(run.train_losses[-tenth:]) / tenth for run in runs),
    )  # fmt: skip


def measure(runs: Arms) -> list[Cell]:
    """Return the cells."""
    return [cell_of(name, scheme, runs[f"{name}, {scheme}"]) for name in PLACEMENTS for scheme in SCHEMES]


def compared(cells: Sequence[Cell]) -> dict[tuple[str, str], Interval | None]:
    """Return the difference of every cell to its placement's chosen initialisation."""
    chosen = {cell.placement: cell for cell in cells if cell.scheme == CHOSEN[cell.placement]}
    return {(c.placement, c.scheme): c.less(chosen[c.placement]) for c in cells if c.scheme != CHOSEN[c.placement]}


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train 24 models (about 3 minutes of one core, less if other figures trained some before), draw, and write the numbers.

    ``quick`` takes four blocks of width 16, 30 steps and three seeds: seconds.
    """
    runs = arms("hybridnorm/table3", out, quick=quick, run=run, seeds=QUICK_SEEDS if quick else None, text=text)
    spec, seeds, cells = spec_of(runs), seeds_of(runs), measure(runs)
    apart = compared(cells)
    rows = [
        {
            "placement": cell.placement, "initialisation": cell.scheme, "seed": seed, "held-out loss": cell.losses[k],
            "training loss, last tenth": cell.train[k], "diverged": cell.diverged[k],
        }
        for cell in cells
        for k, seed in enumerate(seeds)
    ]  # fmt: skip
    means = []
    for cell in cells:
        less = apart.get((cell.placement, cell.scheme))
        loss, perplexity = PRINTED[cell.placement, cell.scheme]
        means.append({
            "placement": cell.placement, "initialisation": cell.scheme, **_ends("held-out loss", cell.mean),
            **_ends("difference from the paper's choice", less), "diverged": sum(cell.diverged), "paper's loss": loss,
            "paper's C4 perplexity": perplexity,
        })  # fmt: skip
    said = [verdict(apart, scale_of(spec, len(seeds)), short_of(spec))]
    with style():
        drawn = save(picture(cells, apart), out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", means), write_rows(out / f"{NAME}_runs.csv", rows)]
    return [drawn, *numbers, write_verdicts(out, NAME, said)]


def verdict(apart: dict[tuple[str, str], Interval | None], scale: str, missing: str) -> Verdict:
    """Return whether the initialisation that the paper chooses for a placement is better than its two others."""
    parts = []
    for placement, choice in CHOSEN.items():
        others = {scheme: less for (name, scheme), less in apart.items() if name == placement}
        seen = ", ".join(f"{scheme} {_text(less)}" for scheme, less in others.items())
        known = [less for less in others.values() if less is not None]
        decided = known if len(known) == len(others) else []
        criterion = f"{placement}: the losses of the other initialisations are above {choice}'s"
        parts.append(above_zero(criterion, decided, seen, missing))
    words = "Pre-Norm has its lowest loss under the normal initialisation, HybridNorm under Megatron's"
    return Verdict("hybridnorm/table3-order", words, scale, tuple(parts))


def picture(cells: Sequence[Cell], apart: dict[tuple[str, str], Interval | None]) -> Picture:
    """Draw losses by cell, and differences to the paper's choice."""
    with style():
        figure = page(7.6, 3.3)
        figure.text(0.225, 0.93, "Initialisation of Pre-Norm and HybridNorm (HybridNorm, Table 3)", fontsize=10)
        grid = figure.add_gridspec(1, 2, left=0.225, right=0.97, top=0.8, bottom=0.15, wspace=0.1)
        left, right = (figure.add_subplot(grid[0, k]) for k in range(2))
        heading(left, "Means with 95 % intervals; below: seeds", "held-out loss (nats per token)")
        heading(right, "Loss minus that of the paper's choice", "nats per token; all four intervals hold at 95 %")
        for k, cell in enumerate(cells):
            look: Any = _look(cell)
            y = len(cells) - k
            for loss, gone in zip(cell.losses, cell.diverged, strict=True):
                if math.isfinite(loss):
                    left.plot(loss, y - 0.22, "x" if gone else "|", color=look["color"], markersize=5)
            _bar(left, cell.mean, y, look)
            if cell.scheme == CHOSEN[cell.placement]:
                right.text(
                    0, y, "the paper's choice", fontsize=7.5, color=FAINT, ha="center", va="center", backgroundcolor="white"
                )
            else:
                _bar(right, apart[cell.placement, cell.scheme], y, look)
        right.axvline(0, color=FAINT, linewidth=0.6, zorder=0)
        reach = max(map(abs, right.get_xlim()))
        right.set_xlim(-reach, reach)
        names = [f"{cell.placement}, {cell.scheme}" for cell in cells]
        for axes, labels in ((left, names), (right, [""] * len(cells))):
            axes.set_yticks(range(len(cells), 0, -1), labels)
            axes.set_ylim(0.4, len(cells) + 0.6)
    return figure


def _bar(axes: Axes, interval: Interval | None, y: float, look: dict[str, Any]) -> None:
    if interval is None:
        axes.text(0.5, y, "diverged", transform=axes.get_yaxis_transform(), fontsize=7.5, color=look["color"], va="center")
        return
    axes.errorbar(interval.value, y, xerr=interval.half_width, capsize=2.5, linewidth=1.0, **look)


def _look(cell: Cell) -> dict[str, Any]:
    k = list(PLACEMENTS).index(cell.placement)
    return {"color": METHOD_COLOURS[k], "marker": METHOD_MARKS[k]}


def _text(interval: Interval | None) -> str:
    return "diverged" if interval is None else str(interval)


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    value, low, high = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
    return {name: value, f"{name}, low": low, f"{name}, high": high}
