"""Pages of measurements: that of stored results, and how often intervals hold the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import coverage
from benchmarks.report import command as command_of
from benchmarks.report import write
from benchmarks.suites import BENCHMARKS

TIME = {"median": 1.0, "low": 0.9, "high": 1.1}
ROWS = [
    {"name": "closed form", "status": "right", "time": TIME, "error": 1e-15},
    {"name": "peer", "status": "right", "time": {**TIME, "median": 4.0}, "ratio": TIME, "error": 0.0},
]


def record(problem: str = "small", batch: int = 1, *, result: Any = None, **settings: Any) -> dict[str, Any]:
    cell = {"problem": problem, "batch": batch, "dtype": "float32", "threads": 2}
    known = {"repeats": 3, "limit_seconds": 20.0, "compile": True, "device": "cpu", "quick": False, "source": "a"} | settings
    place = {"date": "2026-01-02T03:04", "processor": "a processor"}
    return {
        "key": "k",
        "cell": cell,
        "settings": known,
        "environment": place,
        "result": result or {"parameters": 704, "rows": ROWS},
    }


def stored(folder: Path, *records: dict[str, Any]) -> Path:
    (folder / "dense.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"torn')
    return folder


def test_commands_measure_every_cell() -> None:
    records = [record(), record("medium"), record("medium", 32), record("large", repeats=2, compile=False, device="cuda")]
    assert command_of("hvp", records).splitlines() == [
        "python -m benchmarks hvp --sizes small medium --batches 1 32 --dtype float32 --threads 2 --repeats 3 --limit-seconds 20",
        "python -m benchmarks hvp --sizes large --batches 1 --dtype float32 --threads 2 --repeats 2 --limit-seconds 20 "
        "--no-compile --device cuda",
    ]
    top = command.parser()
    for line in command_of("hvp", records).splitlines():  # what it says can be typed
        assert top.parse_args(line.split()[3:]).names == ["hvp"]


def test_writes_a_page_and_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    assert command.main(["--report", str(page), "--out", str(tmp_path)]) == command.USAGE
    assert "finds no results" in capsys.readouterr().err
    assert not page.exists()
    stored(tmp_path, record(), record(), record(batch=2, source="b"), record(batch=3), record(batch=4, quick=True))
    assert command.main(["--report", str(page), "--out", str(tmp_path)]) == 0
    assert "dense: 3 cells, of 2 versions of the code" in capsys.readouterr().err  # the last record of a cell, and no quick one
    assert page.read_text().startswith("# Speed and memory\n\n<!-- benchmark dense -->\n## The dense Hessian\n")
    assert (page.parent / "benchmarks_dense.png").stat().st_size > 1000
    assert "| closed form |" in (page.parent / "page_dense.md").read_text()


def test_a_page_with_a_summary_gets_the_small_table_and_nothing_else(tmp_path: Path) -> None:
    cell = {"problem": "small", "batch": 1, "dtype": "float64", "threads": 1}
    wrong = {"name": "torch.func.hessian", "status": "wrong", "error": 0.5, "time": None}
    plain = {**ROWS[1], "name": "closed form, plain torch", "ours": True, "time": {**TIME, "median": 0.025}}
    rows = [{**ROWS[0], "time": {**TIME, "median": 0.0125}}, plain, {**ROWS[1], "name": "reverse over reverse"}, wrong]
    shown = record(result={"parameters": 704, "rows": rows}) | {"cell": cell}
    stored(tmp_path, record(), shown)  # the other one is of float32 and two threads
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark summary -->\nold\n<!-- /benchmark summary -->\nafter\n")
    assert write(page, tmp_path, BENCHMARKS, lambda _: None) == 1
    text = page.read_text()
    assert (text.split("\n")[0], text.split("\n")[-2]) == ("before", "after")
    assert [line for line in text.splitlines() if "small" in line] == [
        "| small | 704 | 1 | 12.5 ms | wrong |  | 1.0 x | reverse over reverse |"
    ]


# Coverage of intervals ------------------------------------------------------------------------------------------------

INTERVALS = Path(__file__).parents[2] / "docs" / "intervals.md"


def silent(*_: object) -> None:
    """Tell nobody."""


def test_operators_have_the_matrices_that_they_are_of() -> None:
    made = coverage.operators()
    for name, values in coverage.spectra().items():
        found = torch.linalg.eigvalsh(made[name].to_matrix())
        torch.testing.assert_close(found, values.sort().values, rtol=0, atol=1e-10)
    assert len(made["1/j"].slices) == 4


def test_the_page_has_a_row_for_every_interval_and_setting() -> None:
    lines = [
        line.strip("| ").split(" | ")[:2] for line in INTERVALS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    shown = {tuple(cells) for cells in lines}
    scalars = ("trace", "sum of squares", "trace of a parameter", "entry of the diagonal")
    sums = ("trace", "frobenius squared", "effective rank", "stable rank")
    for setting, _ in coverage.jobs():
        whats = (
            scalars if setting.endswith(" products") else sums if "directions" in setting
            else ("sharpness", "sharpness, labels nearly certain") if "draws" in setting
            else ("trace", "trace of a parameter", "entry of the diagonal") if setting == "hessian_diagonal"
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
    lines = INTERVALS.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    shown = {tuple(row[:2]): float(row[3].rstrip("%")) / 100 for row in cells if row[3].endswith("%")}
    for row in coverage.measure(300, silent, [coverage.jobs()[number]]):
        mean = sum(row.shares.values()) / len(row.shares)
        assert abs(mean - shown[row.what, row.setting]) <= 3 * (0.05 * 0.95 / 300) ** 0.5
