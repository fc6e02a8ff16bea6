"""What a handful of runs with different seeds allows to say: Student's intervals, paired differences, steps to equal loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from hessiankit.errors import InputError


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
        if math.isinf(self.high):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

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

    Args:
        steps: Steps of the evaluations, rising.
        losses: Losses there.
        level: The loss to reach.

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
