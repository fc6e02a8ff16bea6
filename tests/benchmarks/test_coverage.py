"""How often intervals hold the truth: the script that measures it, and the page that shows its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import coverage

PAGE = Path(__file__).parents[2] / "docs" / "intervals.md"


def silent(*_: object) -> None:
    """Tell nobody."""


def test_operators_have_the_matrices_that_they_are_of() -> None:
    made = coverage.operators()
    for name, values in coverage.spectra().items():
        found = torch.linalg.eigvalsh(made[name].to_matrix())
        torch.testing.assert_close(found, values.sort().values, rtol=0, atol=1e-10)
    assert len(made["1/j"].slices) == 4


def test_the_page_has_a_row_for_every_interval_and_setting() -> None:
    lines = [line.strip("| ").split(" | ")[:2] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    shown = {tuple(cells) for cells in lines}
    scalars = ("trace", "sum of squares", "trace of a parameter", "entry of the diagonal")
    sums = ("trace", "frobenius squared", "effective rank", "stable rank")
    for setting, _ in coverage.jobs():
        whats = (
            scalars if setting.endswith(" products") else sums if "directions" in setting
            else ("sharpness", "sharpness, labels nearly certain") if "draws" in setting
            else ("Frobenius error of an approximation",)
        )  # fmt: skip
        assert {(what, setting) for what in whats} <= shown


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4, 7])
def test_settings_are_measured(number: int) -> None:
    job = coverage.jobs()[number]
    for row in coverage.measure(2, silent, [job]):
        assert row.setting == job[0]
        assert all(0 <= share <= 1 for share in row.shares.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(coverage.jobs())))
def test_intervals_hold_as_often_as_the_page_says(number: int) -> None:
    """Means over the problems, within three standard errors of 300 seeds of one problem."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    shown = {tuple(row[:2]): float(row[3].rstrip("%")) / 100 for row in cells if row[3].endswith("%")}
    for row in coverage.measure(300, silent, [coverage.jobs()[number]]):
        mean = sum(row.shares.values()) / len(row.shares)
        assert abs(mean - shown[row.what, row.setting]) <= 3 * (0.05 * 0.95 / 300) ** 0.5
