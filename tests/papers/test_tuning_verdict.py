"""Comparisons of learning rates: intervals, verdicts and the search, on runs made by hand, so that the answers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from hessiankit.support.errors import InputError
from papers.experiments.tuning.comparison import Pilot, TuningComparison
from papers.experiments.tuning.comparison_report import TuneReport, draw, section, write_page
from papers.experiments.tuning.experiment import PAPER, RunResult, RunSpec, Setting
from papers.experiments.tuning.sweep import Arm, SearchResult, at_baseline_lr, sweep, together
from papers.experiments.tuning.verdict import (
    first_step,
    judge,
    mean_interval,
    paired_difference,
    summary,
)

# Intervals


def test_interval_by_hand():
    # mean 3, s^2 = (4 + 1 + 0 + 1 + 4) / 4 = 2.5; Student's 97.5 % quantile of 4 degrees of freedom is 2.776445 (tables)
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 3
    assert found.half_width == pytest.approx(2.776445105 * math.sqrt(2.5 / 5), rel=1e-9)


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


def test_what_has_no_interval():
    assert mean_interval([2.0]).holds(1e300)
    assert judge([(arm, runs[:1]) for arm, runs in (BASE, WORSE)])[1].verdict.startswith("one seed: difference +0.310")
    for values in ([], [1.0, math.nan]):
        with pytest.raises(InputError, match="expected one or more, all finite"):
            mean_interval(values)
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


# Verdicts


SETTING = Setting(steps=20, layers=1, d_model=8, heads=2, length=8, windows=4)
SHARED = (2.0, 2.3, 1.8, 2.1, 2.2)


def arm_of(name: str, shifts: list[float]) -> tuple[Arm, tuple[RunResult, ...]]:
    """Return an arm whose run k ends ``shifts[k]`` above what seed k gives everyone."""
    runs = []
    for seed, (shared, shift) in enumerate(zip(SHARED, shifts, strict=False)):
        end = shared + shift
        runs.append(RunResult(RunSpec(SETTING, 0.01, (), seed), (0, 10, 20), (end + 2, end + 1, end), 1.0))
    return Arm(name, 0.01), tuple(runs)


BASE = arm_of("AdamW", [0.0] * 5)
WORSE = arm_of("worse", [0.31, 0.29, 0.30, 0.32, 0.28])
BETTER = arm_of("better", [-0.31, -0.29, -0.30, -0.32, -0.28])
SAME = arm_of("same", [0.1, -0.1, 0.05, -0.05, 0.02])
WEAK = arm_of("weak", [-0.10, -0.04, -0.09, -0.03, -0.02])
LOST = arm_of("lost", [0.0, 0.1, 8.0, math.inf, 0.0])


def test_verdicts():
    rows = judge([BASE, WORSE, BETTER, SAME, WEAK, LOST])
    assert rows[0].verdict == "the baseline"
    assert [row.verdict for row in rows[1:]] == [
        "worse by 0.300 ± 0.020",
        "better by 0.300 ± 0.020",
        "no difference resolved (0.004 ± 0.099)",
        "better by 0.056 ± 0.045 taken alone, not resolved among 5 comparisons",
        "diverged in 2 of 5 runs",
    ]
    assert rows[4].together.confidence == pytest.approx(0.99)
    assert rows[5].loss is rows[5].difference is rows[5].steps is None
    assert summary(rows) == (
        "Beside AdamW tuned to lr 0.01, better: better; worse: worse; diverged: lost; not resolved: same, weak."
    )
    assert judge([BASE, WEAK], confidence=0.99)[1].verdict.startswith("no difference resolved")
    rows = judge([LOST, BASE])
    assert rows[1].verdict == "nothing to compare with: the baseline diverged"
    assert rows[1].reached[3] is None


def test_steps_to_equal_loss():
    base, worse, better = judge([BASE, WORSE, BETTER])
    assert base.steps is None
    # straight from end + 1 at step 10 to end at step 20: the better arm is at the baseline's end 0.3 above its own, at step 17
    assert better.reached == pytest.approx((16.9, 17.1, 17.0, 16.8, 17.2))
    assert better.steps_to_baseline == "17 (5 of 5)"
    logs = [math.log(step / 20) for step in better.reached]
    assert better.steps.value == pytest.approx(math.exp(sum(logs) / 5))
    assert worse.reached == (None,) * 5
    assert worse.steps_to_baseline == "never (0 of 5)"
    assert worse.steps.value == pytest.approx(1 / better.steps.value)


def report_of(arms) -> TuneReport:
    losses = {0.005: {9: 2.4}, 0.01: {9: 2.1}, 0.02: {9: math.inf}}
    sweeps = tuple(SearchResult(name, 0.01, losses, (9,), (), True) for name in ("AdamW", "Blockwise eq (5)"))
    pilot = Pilot(PAPER, {"Norm": (2.0, 0.1), "Emb": (1.0, 0.1)}, 4)
    return TuneReport(TuningComparison(sweeps, pilot, tuple(arms), tuple(range(5))), SETTING)


def test_tables_json_page_and_picture(tmp_path):
    report = report_of([BASE, WORSE, BETTER, SAME, WEAK, LOST])
    printed = str(report)
    assert "worse by 0.300 ± 0.020" in printed
    assert "* 2.100 (1)" in printed
    assert "diverged (1)" in printed
    assert "order Emb < Norm" in printed
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["arms"][1]["verdict"] == "worse by 0.300 ± 0.020"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tune-lr -->x<!-- /tune-lr -->\nafter\n")
    text = section(report, "python -m papers tune-lr", None)
    assert "| worse | 0.01 |" in text
    for _ in range(2):
        write_page(page, report, "python -m papers tune-lr", None)
        assert page.read_text() == f"before\n<!-- tune-lr -->\n{text}\n<!-- /tune-lr -->\nafter\n"
    assert draw(report, tmp_path / "x.png").stat().st_size > 1000
    with pytest.raises(InputError, match="tune-lr: cannot write"):
        write_page(tmp_path / "no" / "x.md", report, "python -m papers tune-lr", None)


def test_controls_have_the_factor_of_the_parameters():
    arms = at_baseline_lr(0.004, {"Emb": 1, "QK": 1, "FFN": 1, "VO": 1, "Norm": 1}, (("Emb", 2.0),))
    assert [(arm.name, arm.lr, arm.ratios) for arm in arms[2:]] == [
        ("Norm x 2", 0.004, (("Norm", 2.0),)),
        ("Emb x 10 only", 0.004, (("Emb", 10.0),)),
        ("all x 2", 0.008, ()),
        ("all x 5.8", 0.0232, ()),
    ]
    assert arms[0].ratios == (("Emb", 10.0), ("FFN", 6.0), ("QK", 8.0), ("VO", 4.0))
    assert str(arms[1]) == "Blockwise measured at AdamW's lr: lr 0.004 (Emb x2)"


# The search

GRID = [1e-3, 2e-3, 4e-3, 8e-3]
START = RunSpec(Setting(), 0.0)


class Counter:
    """Stands for the runs: a loss by learning rate and seed, and what was asked for."""

    def __init__(self, loss: Callable[[float, int], float]) -> None:
        self.loss, self.asked = loss, []

    def __call__(self, specs: list[RunSpec]) -> dict[RunSpec, RunResult]:
        self.asked.append(specs)
        return {s: RunResult(s, (0, 9), (5.0, self.loss(s.lr, s.seed)), 0.0) for s in specs}

    @property
    def runs(self) -> set[RunSpec]:
        return {spec for specs in self.asked for spec in specs}


def parabola(best: float, noise: float = 0.0) -> Callable[[float, int], float]:
    return lambda lr, seed: 2 + 0.1 * math.log2(lr / best) ** 2 + noise * math.sin(1000 * lr + seed)


@pytest.mark.parametrize(("best", "found"), [(2.1e-3, 2e-3), (2.7e-3, 2.83e-3), (1.5e-3, 1.41e-3)])
def test_the_optimum_is_refined_inside_the_grid(best, found):
    (result,) = together([sweep("x", START, GRID, [7, 8, 9])], counter := Counter(parabola(best)))
    assert result.best == found
    assert result.inside
    assert not result.extended
    assert set(result.means) >= {found}
    assert all(len(result.losses[lr]) == 3 for lr in result.means)
    assert len(counter.runs) <= 16


@pytest.mark.parametrize("best", [1.3e-4, 0.06])
def test_a_grid_that_ends_too_early_grows(best):
    (result,) = together([sweep("x", START, GRID, [7, 8])], Counter(parabola(best)))
    assert result.inside
    assert result.extended
    assert abs(math.log2(result.best / best)) < 0.3
    assert "grid extended by" in str(result)


def test_one_seed_does_not_decide():
    """Seed 7 alone prefers 8e-3; over all the seeds 4e-3 is better, and the search moves there."""

    def loss(lr, seed):
        return parabola(4e-3)(lr, seed) - (0.5 if seed == 7 and lr > 7e-3 else 0.0) + (0.5 if seed != 7 and lr > 7e-3 else 0.0)

    (result,) = together([sweep("x", START, GRID, [7, 8, 9])], Counter(loss))
    assert result.best == 4e-3
    assert result.inside


def test_divergence_is_no_optimum():
    def loss(lr, seed):
        return math.inf if lr > 3e-3 else parabola(8e-3)(lr, seed)

    (result,) = together([sweep("x", START, GRID, [7])], Counter(loss))
    assert result.best == 2.83e-3
    assert math.isinf(result.losses[4e-3][7])
    with pytest.raises(InputError, match="diverges at every learning rate"):
        together([sweep("x", START, GRID, [7])], Counter(lambda lr, seed: math.inf))
