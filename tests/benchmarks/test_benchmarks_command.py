"""Runs of the benchmarks: their files, interruptions, processes, command line and clocks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_cases import PLAN, wrong_matrix

from benchmarks import __main__ as command
from benchmarks import runner
from benchmarks.contest import CLOSED
from benchmarks.fresh import OverBudget
from benchmarks.peers import JVP
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.suites import BENCHMARKS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]


def counting(ran: list[Cell], stop_at: int | None = None) -> Benchmark:
    def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
        if len(ran) == stop_at:
            raise KeyboardInterrupt
        ran.append(cell)
        time = {"median": 1.0, "low": 1.0, "high": 1.0}
        rows = [
            {"name": CLOSED, "status": "right", "time": time},
            {"name": "peer", "status": "right", "time": time, "ratio": time},
        ]
        return {"parameters": 3, "rows": rows}

    return replace(BENCHMARKS["dense"], run=run, cells=lambda plan: plan.grid(("tiny",), (1, 2, 4)))


def test_interruption_loses_one_cell_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[Cell] = []
    first = runner.measure(counting(ran, stop_at=2), PLAN, tmp_path, isolate=False)
    assert first.interrupted
    assert [cell["batch"] for cell in ran] == [1, 2]
    content = json.loads((tmp_path / "dense.json").read_text())
    assert (content["complete"], len(content["records"])) == (False, 2)
    second = runner.measure(counting(ran), PLAN, tmp_path, isolate=False)
    assert [cell["batch"] for cell in ran] == [1, 2, 4]
    assert (second.found, len(second.records), second.interrupted) == (2, 3, False)
    assert json.loads((tmp_path / "dense.json").read_text())["complete"]
    assert (tmp_path / "dense.png").stat().st_size > 1000
    assert (tmp_path / "dense.md").read_text() in capsys.readouterr().out
    runner.measure(counting(ran), replace(PLAN, repeats=7), tmp_path, isolate=False)  # other settings: measured again
    assert len(ran) == 6


def test_a_cell_over_its_budget_is_skipped_and_tried_again_with_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def over(*_: Any, seconds: float, **__: Any) -> dict[str, Any]:
        asked.append(seconds)
        raise OverBudget(f"stopped after {seconds:.0f} s")

    monkeypatch.setattr(runner, "run_fresh", over)
    for budget in (7.0, 7.0, 9.0):
        assert not runner.measure(counting([]), replace(PLAN, budget_seconds=budget), tmp_path, isolate=True).doubtful
    assert asked == [7.0] * 3 + [9.0] * 3
    assert "skipped: over budget: stopped after 9 s" in (tmp_path / "dense.md").read_text()


def test_the_command_runs_a_benchmark_under_its_old_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suites.dense.contestants", lambda: [JVP])
    threads = torch.get_num_threads()
    arguments = ["dense_hessian", "--quick", "--batches", "1", "--in-process", "--out", str(tmp_path / "new")]
    assert command.main(arguments) == 0
    assert torch.get_num_threads() == threads
    content = json.loads((tmp_path / "new" / "dense.json").read_text())
    assert [row["name"] for row in content["records"][0]["result"]["rows"]] == [CLOSED, "vmap(jvp(grad))"]
    assert content["records"][0]["environment"]["threads"] == 1


def test_a_wrong_closed_form_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suites.dense.contestants", list)
    monkeypatch.setattr("benchmarks.suites.dense.dense", wrong_matrix)
    assert command.main(["dense", "--quick", "--batches", "1", "--in-process", "--out", str(tmp_path)]) == command.WRONG


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("dance", "no benchmark is called dance; there are: dense, "),
        ("", "name a benchmark, or pass --all, --list or --report"),
        ("dense --sizes huge", "no problem is called 'huge'"),
        ("dense --limit-seconds 0", "leaves no time; pass more than 0"),
        ("dense --budget-seconds -1", "--budget-seconds -1 is negative"),
        ("scale --methods guess", "no method is called 'guess'; there are: hessian_operator, double, "),
        ("scale --memory-gib 0", "leaves no memory"),
        ("dense --device cuda --clock process", "--clock process does not count a GPU's time"),
        ("scale dense --dtype bfloat16", "--dtype bfloat16 is of scale alone"),
    ],
)
def test_options_that_cannot_be_used(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # of the parser
        assert command.main(arguments.split()) == command.USAGE
    assert message in capsys.readouterr().err
