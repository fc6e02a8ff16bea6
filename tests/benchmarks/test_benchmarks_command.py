"""Runs of the benchmarks: their files, interruptions, processes, command line and clocks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_cases import PLAN, QUIET, first_cell, wrong_matrix

from benchmarks import __main__ as command
from benchmarks import runner
from benchmarks.contest import CLOSED
from benchmarks.fresh import OverBudget, run_fresh
from benchmarks.peers import JVP
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.suites import BENCHMARKS
from benchmarks.timing import deadline, in_turn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]

# Runs, files, interruptions


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
    content = json.loads((tmp_path / "dense.json").read_text())
    assert content["complete"]
    assert all(content["environment"][key] for key in ("date", "python", "torch", "numpy", "processor"))
    assert (tmp_path / "dense.png").stat().st_size > 1000
    assert (tmp_path / "dense.md").read_text() in capsys.readouterr().out


def test_other_settings_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Cell] = []
    for plan in (PLAN, PLAN, replace(PLAN, repeats=7)):
        runner.measure(counting(ran), plan, tmp_path, isolate=False)
    assert len(ran) == 6
    monkeypatch.setattr(runner, "source_digest", lambda: "other code")
    runner.measure(counting(ran), PLAN, tmp_path, isolate=False)
    assert len(ran) == 9


def test_a_cell_in_a_process_of_its_own_tells_and_fails_in_words() -> None:
    told: list[tuple[str, int, int]] = []
    arguments = {"name": "growth", "cell": first_cell("growth"), "options": replace(PLAN, quick=True, repeats=1).to_dict()}
    tell = lambda *state: told.append(state)  # noqa: E731
    result = run_fresh("benchmarks.runner:run_cell", arguments, threads=1, seconds=120.0, tell=tell)
    assert [point["x"] for point in result["points"]] == [2, 4, 8]
    assert told == [("B = 2", 0, 3), ("B = 4", 1, 3), ("B = 8", 2, 3)]
    with pytest.raises(RuntimeError, match=r"exit code 1: AttributeError: .*nothing"):
        run_fresh("benchmarks.fresh:nothing", {}, threads=1, seconds=60.0, tell=QUIET)
    with pytest.raises(OverBudget, match="stopped after 0 s"):
        run_fresh("benchmarks.fresh:nothing", {}, threads=1, seconds=0.01, tell=QUIET)


def fails(error: Callable[[float], Exception], asked: list[float]) -> Callable[..., dict[str, Any]]:
    """Return a stand-in for ``run_fresh`` that notes the budget and raises."""

    def run(*_: Any, seconds: float, **__: Any) -> dict[str, Any]:
        asked.append(seconds)
        raise error(seconds)

    return run


def test_a_failed_cell_is_reported_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run_fresh", fails(lambda _: RuntimeError("exit code -9"), []))
    outcome = runner.measure(counting([]), PLAN, tmp_path, isolate=True)
    assert len(outcome.failed) == 3
    assert outcome.doubtful
    assert "failed: exit code -9" in capsys.readouterr().err


def test_a_cell_over_its_budget_is_skipped_and_tried_again_with_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(runner, "run_fresh", fails(lambda seconds: OverBudget(f"stopped after {seconds:.0f} s"), asked))
    for budget in (7.0, 7.0, 5.0, 9.0):
        outcome = runner.measure(counting([]), replace(PLAN, budget_seconds=budget), tmp_path, isolate=True)
        assert (len(outcome.records), outcome.failed, outcome.doubtful) == (3, [], [])
    assert asked == [7.0] * 3 + [9.0] * 3
    assert "skipped: over budget: stopped after 9 s" in (tmp_path / "dense.md").read_text()
    assert json.loads((tmp_path / "dense.json").read_text())["complete"]


# The command line


def test_the_dry_run_says_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "never"
    arguments = ["growth", "dense", "--sizes", "tiny", "--limit-seconds", "90", "--budget-seconds", "450", "--out", str(out)]
    assert command.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "growth     16 cells, 0.4 h of rounds",
        "dense      16 cells, 0.4 h of rounds",
        "all        32 cells, 0.8 h of rounds; at most 450 s each, 4.0 h in all",
    ]
    assert not out.exists()


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
        ("dense --repeats 0", "'0' is not a positive whole number"),
        ("dense --threads two", "'two' is not a positive whole number"),
        ("dance", "no benchmark is called dance; there are: dense, "),
        ("", "name a benchmark, or pass --all, --list or --report"),
        ("dense --sizes huge", "no problem is called 'huge'"),
        ("dense --limit-seconds 0", "leaves no time; pass more than 0"),
        ("dense --budget-seconds -1", "--budget-seconds -1 is negative"),
        ("dense --quick --out {file}", "choose another folder"),
    ],
)
def test_options_that_cannot_be_used(arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    try:
        code: object = command.main(arguments.format(file=file).split())
    except SystemExit as stop:  # of the parser
        code = stop.code
    assert code == command.USAGE
    assert message in capsys.readouterr().err


# Clocks


def test_in_turn_rotates() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[int], float]:
        def run(k: int) -> float:
            order.append(name)
            return float(k)

        return run

    after = list(in_turn({name: call(name) for name in "abc"}, 4))
    assert "".join(order) == "abcbcacababc"
    assert [len(seconds["c"]) for seconds in after] == [1, 2, 3, 4]
    assert after[1] == {"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0]}


@pytest.mark.skipif(sys.platform == "win32", reason="no interval timer")
def test_deadline_interrupts() -> None:
    with pytest.raises(TimeoutError, match="sleeping took more than 0 s"), deadline(0.05, "sleeping"):
        time.sleep(5.0)
