"""Comparison of an arm's runs with the baseline's: numbers with intervals, and a sentence no stronger than these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scipy.special import stdtrit

from hessiankit.support.errors import InputError
from papers.experiments.tuning.experiment import RunResult
from papers.experiments.tuning.sweep import Arm

if TYPE_CHECKING:
    from papers.experiments.runs import Run


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval; with a single seed the interval is the whole line.

    Attributes:
        value: The mean.
        low: Lower end.
        high: Upper end.
        count: Number of values n.
        confidence: Probability with which such an interval holds the true mean of normally distributed values.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.000 [-0.484, 4.484]
    """

    value: float
    low: float
    high: float
    count: int
    confidence: float

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".3f") -> str:
        """Return the value and the ends, or the value alone where the interval is the whole line."""
        value, low, high = (format(x, form) for x in (self.value, self.low, self.high))
        return value if math.isinf(self.high) else f"{value} [{low}, {high}]"

    def to_dict(self) -> dict[str, float | None]:
        """Return value, ends (None where infinite) and confidence."""
        ends = {name: None if math.isinf(end) else end for name, end in (("low", self.low), ("high", self.high))}
        return {"value": self.value, **ends, "confidence": self.confidence}

    @property
    def half_width(self) -> float:
        """Half the distance between its ends, the x of ``value +- x``."""
        return (self.high - self.low) / 2

    def holds(self, value: float) -> bool:
        """Return whether a value lies inside."""
        return self.low <= value <= self.high

    def exponential(self) -> Interval:
        """Return the interval of a geometric mean from that of the mean of logarithms."""
        return Interval(math.exp(self.value), math.exp(self.low), math.exp(self.high), self.count, self.confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean m with the interval m +- t s / sqrt(n), where s^2 = sum (x - m)^2 / (n - 1).

    t is the quantile (1 + confidence) / 2 of Student's distribution with n - 1 degrees of freedom.

    Args:
        values: n finite numbers; with one of them the interval is the whole line.
        confidence: Above 0 and below 1.

    Raises:
        InputError: There are no values, one is not finite, or the confidence is no probability.

    >>> print(mean_interval([1.0, 3.0], 0.5))  # s = sqrt 2, and the upper quartile of one degree of freedom is 1
    2.000 [1.000, 3.000]
    """
    if not values or not all(map(math.isfinite, values)):
        raise InputError(f"mean_interval: {len(values)} values {list(values)}; expected one or more, all finite")
    if not 0 < confidence < 1:
        raise InputError(f"mean_interval: confidence={confidence}; expected a probability above 0 and below 1, such as 0.95")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1, confidence)
    variance = math.fsum((x - mean) ** 2 for x in values) / (n - 1)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n, confidence)


def paired_difference(values: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the interval of the mean of ``values[k] - baseline[k]``, of which pair k shares its seed.

    Runs of one seed share their initial parameters and their batches; what these contribute to both losses cancels, which the
    difference of two separate intervals would not know.

    Raises:
        InputError: The numbers of values differ; otherwise as :func:`mean_interval`.
    """
    if len(values) != len(baseline):
        raise InputError(f"paired_difference: {len(values)} values and {len(baseline)} of the baseline; expected pairs")
    return mean_interval([x - y for x, y in zip(values, baseline, strict=True)], confidence)


def first_step(steps: Sequence[int], losses: Sequence[float], level: float) -> float | None:
    """Return where a loss curve, straight between its points, first reaches a level from above; None if it never does.

    >>> first_step([0, 10, 20], [5.0, 3.0, 2.0], 4.0), first_step([0, 10], [5.0, 3.0], 2.9)
    (5.0, None)
    """
    previous: tuple[int, float] | None = None
    for step, loss in zip(steps, losses, strict=True):
        if loss <= level:
            if previous is None:
                return float(step)
            before, above = previous
            return before + (step - before) * (above - level) / (above - loss)
        previous = (step, loss) if math.isfinite(loss) else None
    return None


def relative_steps(steps: Sequence[int], losses: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the steps of a run divided by those of its baseline, both up to the lowest loss that both reach at their ends.

    That level is the larger of the two final losses. Below 1: the run gets there sooner. Unlike the step at which the run reaches
    the baseline's final loss, this is defined for runs that never do.

    Returns:
        The ratio, or None if a final loss is not finite or a curve is there from the start.

    >>> relative_steps([0, 10, 20], [5.0, 3.0, 2.0], [5.0, 4.0, 3.0])  # 3.0 after 10 steps rather than 20
    0.5
    """
    level = max(losses[-1], baseline[-1])
    if not math.isfinite(level):
        return None
    own, other = first_step(steps, losses, level), first_step(steps, baseline, level)
    return own / other if own and other else None


def simultaneous(confidence: float, comparisons: int) -> float:
    """Return the confidence of each of several intervals that makes all of them hold together (Bonferroni).

    >>> round(simultaneous(0.95, 5), 6)
    0.99
    """
    return 1 - (1 - confidence) / max(comparisons, 1)


@dataclass(frozen=True)
class ArmResult:
    """One row of the table.

    Attributes:
        arm: The arm.
        loss: Mean held-out loss after the last step, nats a byte; None where a run diverged.
        difference: Mean of the arm's loss minus the baseline's, seed by seed; None for the baseline, or where a run diverged.
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
        intervals = {"loss": self.loss, "difference": self.difference}
        intervals |= {"simultaneous": self.together, "relative_steps": self.steps}
        return {
            "arm": self.arm.name,
            "lr": self.arm.lr,
            "ratios": dict(self.arm.ratios),
            **{name: None if one is None else one.to_dict() for name, one in intervals.items()},
            "reached_at": list(self.reached),
            "diverged": self.diverged,
            "verdict": self.verdict,
        }


def judge(arms: Sequence[tuple[Arm, Sequence[RunResult | Run]]], *, confidence: float = 0.95) -> tuple[ArmResult, ...]:
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
        sound = not any(math.isinf(run.losses[-1]) for run in (*runs, *reference))
        finals, others = [run.losses[-1] for run in runs], [run.losses[-1] for run in reference]
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
                tuple(
                    first_step(run.steps, run.losses, other.losses[-1]) if math.isfinite(other.losses[-1]) else None
                    for run, other in zip(runs, reference, strict=True)
                ),
                diverged,
                compared,
            )
        )
    return tuple(rows)


def summary(rows: Sequence[ArmResult]) -> str:
    """Return one sentence on all arms, made of the verdicts.

    An arm is called better or worse only where its interval excludes 0 with all comparisons counted.
    """
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "diverged": [], "not resolved": []}
    for row in rows[1:]:
        word = row.verdict.split()[0]
        resolved = word in kinds and "alone" not in row.verdict
        kinds[word if resolved else "not resolved"].append(row.arm.name)
    parts = [f"{kind}: {', '.join(names) if names else 'none'}" for kind, names in kinds.items() if names or kind != "diverged"]
    return f"Beside {rows[0].arm.name} tuned to lr {rows[0].arm.lr:.3g}, " + "; ".join(parts) + "."
