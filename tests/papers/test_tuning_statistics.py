"""Intervals and steps to equal loss, against values worked out by hand and against coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hessiankit.support.errors import InputError
from papers.experiments.tuning.verdict import Interval, first_step, mean_interval, paired_difference, relative_steps, simultaneous


def test_interval_by_hand():
    # mean 3, s^2 = (4 + 1 + 0 + 1 + 4) / 4 = 2.5; Student's 97.5 % quantile of 4 degrees of freedom is 2.776445 (tables)
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 3
    assert found.half_width == pytest.approx(2.776445105 * math.sqrt(2.5 / 5), rel=1e-9)
    assert (found.low + found.high) / 2 == pytest.approx(3)
    assert found.count == 5


def test_interval_covers_as_often_as_it_says():
    """5000 samples of 4: the count of intervals that hold the mean is binomial; with the normal quantile it would be 85 %."""
    samples = np.random.default_rng(0).normal(7.0, 3.0, (5000, 4))
    for confidence in (0.8, 0.95):
        covered = sum(mean_interval(row.tolist(), confidence).holds(7.0) for row in samples) / 5000
        assert abs(covered - confidence) < 4 * math.sqrt(confidence * (1 - confidence) / 5000)


def test_pairs_cancel_what_they_share():
    shared = [0.0, 10.0, -7.0, 3.0]
    baseline = [2.0 + s for s in shared]
    values = [2.5 + s + e for s, e in zip(shared, (0.1, -0.1, 0.1, -0.1), strict=True)]
    found = paired_difference(values, baseline)
    # differences .6, .4, .6, .4: mean .5, s^2 = .04 / 3, quantile of 3 degrees 3.182446
    assert found.value == pytest.approx(0.5)
    assert found.half_width == pytest.approx(3.182446305 * math.sqrt(0.04 / 3 / 4), rel=1e-9)
    assert mean_interval(values).half_width > 10
    with pytest.raises(InputError, match="4 values and 3 of the baseline"):
        paired_difference(values, baseline[:3])


def test_one_value_has_no_interval():
    found = mean_interval([2.0])
    assert found.holds(1e300)
    assert str(found) == "2.000"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_refuses_what_has_no_mean(values):
    with pytest.raises(InputError, match="expected one or more, all finite"):
        mean_interval(values)


def test_refuses_a_confidence_that_is_none():
    with pytest.raises(InputError, match="confidence=95"):
        mean_interval([1.0, 2.0], 95)


def test_first_step():
    steps, losses = [0, 100, 200, 300], [5.0, 3.0, 3.5, 2.0]
    assert first_step(steps, losses, 4.0) == 50
    assert first_step(steps, losses, 3.0) == 100
    assert first_step(steps, losses, 2.5) == pytest.approx(200 + 100 * 1.0 / 1.5)
    assert first_step(steps, losses, 1.9) is None
    assert first_step(steps, losses, 6.0) == 0
    assert first_step(steps, [5.0, math.inf, math.inf, 2.0], 4.0) == 300  # nothing is drawn through what is not finite


def test_relative_steps_are_reciprocal():
    steps = [0, 100, 200, 300, 400]
    fast, slow = [5.0, 3.0, 2.5, 2.2, 2.0], [5.0, 4.0, 3.2, 2.7, 2.5]
    assert relative_steps(steps, fast, slow) == 0.5  # 2.5 at step 200 rather than 400
    assert relative_steps(steps, slow, fast) == 2.0
    assert relative_steps(steps, slow, slow) == 1.0
    assert relative_steps(steps, [5.0, 4.0, math.inf, math.inf, math.inf], slow) is None


def test_geometric_mean_and_simultaneous_confidence():
    logs = [math.log(0.5), math.log(2.0)]
    found = mean_interval(logs).exponential()
    assert found.value == pytest.approx(1.0)
    assert found.low * found.high == pytest.approx(1.0)
    assert simultaneous(0.9, 2) == pytest.approx(0.95)
    assert simultaneous(0.9, 0) == 0.9
    assert Interval(1.0, 0.9, 1.1, 3, 0.95).half_width == pytest.approx(0.1)
