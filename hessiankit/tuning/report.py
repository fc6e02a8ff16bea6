"""What ``hessiankit tune-lr`` found: tables in a terminal and a notebook, JSON, Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hessiankit.environment import environment
from hessiankit.optim.measured import CAP, POWER
from hessiankit.tables import Detail, Piece, Printed, table
from hessiankit.tuning.comparison import Comparison
from hessiankit.tuning.experiment import BETAS, CLIP, WEIGHT_DECAY, Setting, model_of, texts
from hessiankit.tuning.statistics import Interval
from hessiankit.tuning.verdict import ArmResult, judge, summary

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

    comparison: Comparison
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
                _signed(row.difference),
                _shown(row.steps, digits=2),
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


def _shown(one: Interval | None, digits: int = 3) -> str:
    if one is None:
        return "-"
    if one.high == float("inf"):
        return f"{one.value:.{digits}f}"
    return f"{one.value:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def _signed(one: Interval | None) -> str:
    return "-" if one is None else f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def _of_sweep(losses: dict[int, float], best: bool) -> str:
    if not losses:
        return ""
    mean = sum(losses.values()) / len(losses)
    text = "diverged" if mean == float("inf") else f"{mean:.3f}"
    return f"{'* ' if best else ''}{text} ({len(losses)})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])


def _sweep_dict(one: Any) -> dict[str, Any]:
    losses = {str(lr): {str(seed): _finite(x) for seed, x in of.items()} for lr, of in sorted(one.losses.items())}
    return {"name": one.name, "best": one.best, "inside": one.inside, "extended": list(one.extended), "losses": losses}


def _finite(x: float) -> float | None:
    return None if x in (float("inf"), float("-inf")) or x != x else x
