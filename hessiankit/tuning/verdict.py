"""What the runs of an arm say beside those of the baseline: numbers with intervals, and a sentence no stronger than these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hessiankit.tuning.arms import Arm
from hessiankit.tuning.experiment import RunResult
from hessiankit.tuning.statistics import (
    Interval,
    first_step,
    mean_interval,
    paired_difference,
    relative_steps,
    simultaneous,
)


@dataclass(frozen=True)
class ArmResult:
    """One row of the table.

    Attributes:
        arm: The arm.
        loss: Mean held-out loss after the last step, nats a byte; None where a run diverged.
        difference: Mean of the arm's loss less the baseline's, seed by seed; None for the baseline, or where a run diverged.
        together: The same with the confidence at which all differences of the comparison hold at once.
        steps: Geometric mean of the steps to equal loss, relative to the baseline (:func:`relative_steps`).
        reached: For every seed the step at which the arm first reaches the baseline's final loss; None where it never does.
        diverged: Number of runs that diverged.
        comparisons: Number of arms compared with the baseline; 0 for the baseline itself.
    """

    arm: Arm
    loss: Interval | None
    difference: Interval | None
    together: Interval | None
    steps: Interval | None
    reached: tuple[float | None, ...]
    diverged: int
    comparisons: int

    @property
    def verdict(self) -> str:
        """One sentence that the intervals allow.

        >>> def row(low, high, wide):
        ...     one, all = (Interval((low + high) / 2, low - w, high + w, 5, 0.95) for w in (0, wide))
        ...     return ArmResult(Arm("x", 0.1), one, one, all, None, (), 0, 2).verdict
        >>> row(0.1, 0.3, 0.05), row(-0.1, 0.3, 0.0)
        ('worse by 0.200 ± 0.100', 'no difference resolved (0.100 ± 0.200)')
        >>> row(-0.3, -0.1, 0.2)
        'better by 0.200 ± 0.100 taken alone, not resolved among 2 comparisons'
        """
        total = len(self.reached)
        if self.diverged:
            return f"diverged in {self.diverged} of {total} runs"
        if not self.comparisons:
            return "the baseline"
        if self.difference is None or self.together is None:
            return "nothing to compare with: the baseline diverged"
        if math.isinf(self.difference.high):
            return f"one seed: difference {self.difference.value:+.3f}, nothing is known of its error"
        found = f"{abs(self.difference.value):.3f} ± {self.difference.half_width:.3f}"
        way = "worse" if self.difference.value > 0 else "better"
        if self.difference.holds(0.0):
            return f"no difference resolved ({self.difference.value:.3f} ± {self.difference.half_width:.3f})"
        alone = f" taken alone, not resolved among {self.comparisons} comparisons" if self.together.holds(0.0) else ""
        return f"{way} by {found}{alone}"

    @property
    def steps_to_baseline(self) -> str:
        """The mean step at which the arm reaches the baseline's final loss, and in how many runs it does."""
        there = [step for step in self.reached if step is not None]
        count = f"{len(there)} of {len(self.reached)}"
        return f"{math.fsum(there) / len(there):.0f} ({count})" if there else f"never ({count})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        intervals = {
            "loss": self.loss,
            "difference": self.difference,
            "simultaneous": self.together,
            "relative_steps": self.steps,
        }
        return {
            "arm": self.arm.name,
            "lr": self.arm.lr,
            "ratios": dict(self.arm.ratios),
            **{name: _numbers(one) for name, one in intervals.items()},
            "reached_at": list(self.reached),
            "diverged": self.diverged,
            "verdict": self.verdict,
        }


def judge(arms: Sequence[tuple[Arm, tuple[RunResult, ...]]], *, confidence: float = 0.95) -> tuple[ArmResult, ...]:
    """Return one row an arm; the first arm is the baseline.

    Args:
        arms: Each arm with its runs, in the same order of seeds.
        confidence: Of each interval.
    """
    _, reference = arms[0]
    rows = []
    for k, (arm, runs) in enumerate(arms):
        assert [run.spec.seed for run in runs] == [run.spec.seed for run in reference]
        diverged = sum(run.diverged for run in runs)
        sound = not any(math.isinf(run.final) for run in (*runs, *reference))
        finals, others = [run.final for run in runs], [run.final for run in reference]
        compared = len(arms) - 1 if k else 0
        level = simultaneous(confidence, compared)
        ratios = [relative_steps(run.steps, run.losses, other.losses) for run, other in zip(runs, reference, strict=True)]
        logs = [math.log(ratio) for ratio in ratios if ratio is not None]
        rows.append(
            ArmResult(
                arm,
                mean_interval(finals, confidence) if sound else None,
                paired_difference(finals, others, confidence) if sound and k else None,
                paired_difference(finals, others, level) if sound and k else None,
                mean_interval(logs, confidence).exponential() if len(logs) == len(runs) and k else None,
                tuple(_reached(run, other) for run, other in zip(runs, reference, strict=True)),
                diverged,
                compared,
            )
        )
    return tuple(rows)


def summary(rows: Sequence[ArmResult]) -> str:
    """Return one sentence on all arms, made of the verdicts.

    The order of precedence is theirs: an arm is called better or worse only where its interval excludes 0 with all comparisons
    counted.
    """
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "diverged": [], "not resolved": []}
    for row in rows[1:]:
        word = row.verdict.split()[0]
        resolved = word in kinds and "alone" not in row.verdict
        kinds[word if resolved else "not resolved"].append(row.arm.name)
    told = [f"{kind}: {', '.join(names) if names else 'none'}" for kind, names in kinds.items() if names or kind != "diverged"]
    return f"Beside {rows[0].arm.name} tuned to lr {rows[0].arm.lr:.3g}: " + "; ".join(told) + "."


def _reached(run: RunResult, other: RunResult) -> float | None:
    return first_step(run.steps, run.losses, other.final) if math.isfinite(other.final) else None


def _numbers(one: Interval | None) -> dict[str, float | None] | None:
    if one is None:
        return None
    ends = {"low": one.low, "high": one.high}
    finite = {name: None if math.isinf(end) else end for name, end in ends.items()}
    return {"value": one.value, **finite, "confidence": one.confidence}
