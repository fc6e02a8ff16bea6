"""Verdicts and tables from runs made by hand: what they say is what the intervals allow."""

from __future__ import annotations

import json
import math

import pytest

from hessiankit.support.errors import InputError
from papers.experiments.tuning.comparison import Pilot, TuningComparison
from papers.experiments.tuning.comparison_report import TuneReport, draw, section, write_page
from papers.experiments.tuning.experiment import PAPER, RunResult, RunSpec, Setting
from papers.experiments.tuning.sweep import Arm, SearchResult, at_baseline_lr
from papers.experiments.tuning.verdict import judge, summary

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


def test_differences_by_hand():
    rows = judge([BASE, WORSE])
    # deviations .01, -.01, 0, .02, -.02: s^2 = .001 / 4, quantile of 4 degrees 2.776445
    assert rows[1].difference.value == pytest.approx(0.3)
    assert rows[1].difference.half_width == pytest.approx(2.776445105 * math.sqrt(0.001 / 4 / 5), rel=1e-8)
    assert rows[1].loss.half_width > 10 * rows[1].difference.half_width  # what the seeds share is in the one and not the other
    assert rows[0].difference is None
    assert rows[0].verdict == "the baseline"


def test_verdicts():
    rows = judge([BASE, WORSE, BETTER, SAME, WEAK, LOST])
    assert [row.verdict for row in rows[1:]] == [
        "worse by 0.300 ± 0.020",
        "better by 0.300 ± 0.020",
        "no difference resolved (0.004 ± 0.099)",
        "better by 0.056 ± 0.045 taken alone, not resolved among 5 comparisons",
        "diverged in 2 of 5 runs",
    ]
    assert rows[4].together.half_width > rows[4].difference.half_width
    assert rows[4].together.confidence == pytest.approx(0.99)
    assert rows[5].loss is rows[5].difference is rows[5].steps is None
    assert summary(rows) == (
        "Beside AdamW tuned to lr 0.01: better: better; worse: worse; diverged: lost; not resolved: same, weak."
    )


def test_a_wider_error_takes_the_verdict_back():
    assert judge([BASE, WEAK])[1].verdict == "better by 0.056 ± 0.045"
    assert judge([BASE, WEAK], confidence=0.99)[1].verdict.startswith("no difference resolved")


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


def test_one_seed_says_nothing_of_its_error():
    one = [(arm, runs[:1]) for arm, runs in (BASE, WORSE)]
    row = judge(one)[1]
    assert row.verdict == "one seed: difference +0.310, nothing is known of its error"
    assert row.to_dict()["difference"] == {"value": pytest.approx(0.31), "low": None, "high": None, "confidence": 0.95}
    assert summary(judge(one)).endswith("better: none; worse: none; not resolved: worse.")


def test_a_baseline_that_diverges_is_no_baseline():
    rows = judge([LOST, BASE])
    assert rows[1].verdict == "nothing to compare with: the baseline diverged"
    assert rows[1].reached[3] is None


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
    assert found["curves"]["lost"]["losses"][3][-1] is None
    text = section(report, "python -m papers tune-lr", "x.png")
    assert "| worse | 0.01 |" in text
    assert text.count("|---|") == 2
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tune-lr -->x<!-- /tune-lr -->\nafter\n")
    text = section(report, "python -m papers tune-lr", None)
    for _ in range(2):
        write_page(page, report, "python -m papers tune-lr", None)
        assert page.read_text() == f"before\n<!-- tune-lr -->\n{text}\n<!-- /tune-lr -->\nafter\n"
    assert "worse" in report._repr_html_()
    path = draw(report, tmp_path / "x.png")
    assert path.read_bytes() == draw(report, tmp_path / "y.png").read_bytes()
    with pytest.raises(InputError, match="ends in"):
        draw(report, tmp_path / "x.jpg")
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
