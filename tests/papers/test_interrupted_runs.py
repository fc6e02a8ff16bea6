"""Long runs that are killed, run out of disk or cannot write: one clear line, and nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import hessiankit as hk
from hessiankit.cli.parsing import INTERRUPTED
from hessiankit.support.environment import code_version
from papers.__main__ import main
from papers.experiments import placement_grid
from papers.experiments.placement_grid import cases
from papers.experiments.tuning import store
from papers.experiments.tuning.experiment import RunResult, RunSpec, Setting
from papers.experiments.tuning.store import Runs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork")]  # of jax, where another test has imported it

CASES = cases(["post"], sample=4)
SPECS = [RunSpec(Setting(steps=4, layers=1, d_model=8, heads=2), lr, (), 0) for lr in (0.01, 0.02, 0.03, 0.04)]


def finished(case: object) -> placement_grid.Finished:
    return placement_grid.Finished(
        case, 0.0, 0, 0.0, True, "PASSED", ("attention.W_Q",), 1, 0.0, code_version(*placement_grid.CODE)
    )


def ran(spec: RunSpec) -> RunResult:
    return RunResult(spec, (0, 4), (5.5, 1 / 3), 1.0)


def slowly(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: time.sleep(0.05) or run(one)


def grid(path: Path) -> None:
    placement_grid.run_case = slowly(finished)
    placement_grid.run_grid(CASES, path)


def tune(path: Path) -> None:
    store.run = slowly(ran)
    with Runs(path) as runs:
        runs(SPECS)


def start(work: Callable[[Path], None], path: Path, most: int = resource.RLIM_INFINITY) -> tuple[int, int]:
    """Fork a process whose files may not grow beyond so many bytes, what a full disk does to a write; return it and its errors."""
    errors, written = os.pipe()
    if process := os.fork():
        os.close(written)
        return process, errors
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        work(path)
        code = 0
    except BaseException:
        os.write(written, traceback.format_exc().encode())
    finally:
        os._exit(code)


def grid_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Go on with the grid, and return what is done again."""
    again: list[object] = []
    monkeypatch.setattr(placement_grid, "run_case", lambda case: again.append(case) or finished(case))
    assert [one.case for one in placement_grid.run_grid(CASES, path)] == CASES
    return again


def tuning_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    again: list[object] = []
    monkeypatch.setattr(store, "run", lambda spec: again.append(spec) or ran(spec))
    with Runs(path) as runs:
        assert list(runs(SPECS).values()) == [ran(spec) for spec in SPECS]
    return again


AGAIN = {"grid": (grid, grid_again, CASES), "tune": (tune, tuning_again, SPECS)}


@pytest.mark.parametrize("what", AGAIN)
def test_killed_in_the_middle(what, tmp_path, monkeypatch):
    work, again, everything = AGAIN[what]
    path = tmp_path / "lines.jsonl"
    process, errors = start(work, path)
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(errors)
    before = path.read_text().count("\n")
    assert again(path, monkeypatch) == everything[before:]
    assert again(path, monkeypatch) == []


@pytest.mark.parametrize("what", AGAIN)
def test_a_full_disk(what, tmp_path, monkeypatch):
    work, again, everything = AGAIN[what]
    path = tmp_path / "lines.jsonl"
    line = {"grid": json.dumps(asdict(finished(CASES[0]))), "tune": json.dumps(store.record_of(ran(SPECS[0])))}[what]
    process, errors = start(work, path, int(2.5 * len(line)))
    with os.fdopen(errors) as said:
        last = said.read().strip().splitlines()[-1]
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert last.startswith("hessiankit.support.errors.InputError:")
    assert "File too large" in last
    assert "--out" in last
    assert again(path, monkeypatch) == everything[2:]
    assert again(path, monkeypatch) == []


@pytest.mark.parametrize(
    ("command", "where"),
    [("placements --placement post --sample 4", (placement_grid, "run_case")), ("tune-lr --quick --jobs 1", (store, "run"))],
)
def test_ctrl_c_keeps_what_is_done(command, where, tmp_path, monkeypatch, capsys):
    """The third piece of work is interrupted, its line cut off; the same command begins with it again."""
    seen, result = [], {"run_case": finished, "run": ran}[where[1]]

    def stop_at_third(one: Any) -> Any:
        seen.append(one)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return result(one)

    monkeypatch.setattr(*where, stop_at_third)
    asked = [*command.split(), "--out", str(tmp_path)]
    assert main(asked) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    (path,) = tmp_path.glob("*.jsonl")
    assert path.read_text().count("\n") == 2
    path.write_text(path.read_text() + '{"case": {"placem')
    if command.startswith("placements"):
        assert main(asked) == 0
        assert seen == [*CASES[:3], *CASES[2:]]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "lines.jsonl"
    with pytest.raises(hk.InputError, match=r"placement_grid: .*cannot be used: File exists; pass another folder"):
        placement_grid.run_grid(CASES, below)
    with pytest.raises(hk.InputError, match=r"tune-lr: .*cannot be used: File exists; pass another folder"):
        Runs(below)
