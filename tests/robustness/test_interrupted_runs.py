"""Long runs that are killed, run out of disk or cannot write: one clear line, and nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import hessiankit as hk
from hessiankit.studies import placement_grid
from hessiankit.studies.placement_grid import cases
from hessiankit.studies.tuning import store
from hessiankit.studies.tuning.experiment import RunResult, RunSpec, Setting
from hessiankit.studies.tuning.store import Runs
from hessiankit.support.environment import code_version

pytestmark = pytest.mark.slow

CASES = cases(["post"], sample=4)
SPECS = [RunSpec(Setting(steps=4, layers=1, d_model=8, heads=2), lr, (), 0) for lr in (0.01, 0.02, 0.03, 0.04)]


def finished(case: object) -> placement_grid.Finished:
    return placement_grid.Finished(
        case, 0.0, 0, 0.0, True, "PASSED", ("attention.W_Q",), 1, 0.0, code_version(*placement_grid.CODE)
    )


def ran(spec: RunSpec) -> RunResult:
    return RunResult(spec, (0, 4), (5.5, 1 / 3), 1.0)


SCRIPT = """
import sys, time, pathlib
sys.path.insert(0, "tests/robustness")
from hessiankit.studies import placement_grid
from hessiankit.studies.tuning import store
from test_interrupted_runs import CASES, SPECS, finished, ran
path = pathlib.Path(sys.argv[1])
def slowly(run):
    return lambda one: time.sleep(0.05) or run(one)
placement_grid.run_case, store.run = slowly(finished), slowly(ran)
"""
GRID = SCRIPT + "placement_grid.run_grid(CASES, path)"
TUNE = SCRIPT + "with store.Runs(path) as runs:\n    runs(SPECS)"
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
"""A file that may not grow beyond this many bytes: what a full disk does to a write, without one."""


def process(script: str, path: Path, **options: object) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=root, env=environment, text=True, **options)


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


AGAIN = {"grid": (GRID, grid_again, CASES), "tune": (TUNE, tuning_again, SPECS)}


@pytest.mark.parametrize("what", AGAIN)
def test_killed_in_the_middle(what, tmp_path, monkeypatch):
    script, again, everything = AGAIN[what]
    path = tmp_path / "lines.jsonl"
    running = process(script, path)
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline
            assert running.poll() in (None, 0)
            time.sleep(0.01)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    before = path.read_text().count("\n")
    assert again(path, monkeypatch) == everything[before:]
    assert again(path, monkeypatch) == []


@pytest.mark.parametrize("what", AGAIN)
def test_a_full_disk(what, tmp_path, monkeypatch):
    script, again, everything = AGAIN[what]
    path = tmp_path / "lines.jsonl"
    line = {"grid": json.dumps(asdict(finished(CASES[0]))), "tune": json.dumps(store.record_of(ran(SPECS[0])))}[what]
    running = process(LIMITED.format(size=int(2.5 * len(line))) + script, path, stderr=subprocess.PIPE)
    _, told = running.communicate(timeout=120)
    last = told.strip().splitlines()[-1]
    assert running.returncode == 1
    assert last.startswith("hessiankit.support.errors.InputError:"), told
    assert "File too large" in last
    assert "--out" in last
    assert again(path, monkeypatch) == everything[2:]
    assert again(path, monkeypatch) == []


def test_a_torn_line_costs_one_case(tmp_path, monkeypatch):
    path = tmp_path / "cases.jsonl"
    whole = json.dumps(asdict(finished(CASES[0])))
    path.write_text(whole + "\n" + whole[:30])
    assert grid_again(path, monkeypatch) == CASES[1:]
    assert grid_again(path, monkeypatch) == []


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[1]\n", b'"text"\nnull\n3\n'])
def test_lines_of_something_else_are_passed_over(content, tmp_path, monkeypatch):
    path = tmp_path / "cases.jsonl"
    path.write_bytes(content)
    if content.startswith(b"\xff"):
        with pytest.raises(hk.InputError, match=r"cases.jsonl cannot be used"):
            placement_grid.run_grid(CASES, path)
    else:
        assert grid_again(path, monkeypatch) == CASES


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "lines.jsonl"
    with pytest.raises(hk.InputError, match=r"placement_grid: .*cannot be used: File exists; pass another folder"):
        placement_grid.run_grid(CASES, below)
    with pytest.raises(hk.InputError, match=r"tune-lr: .*cannot be used: File exists; pass another folder"):
        Runs(below)


def test_lines_of_other_code_are_done_anew(tmp_path, monkeypatch):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(asdict(replace(finished(CASES[0]), version="old"))) + "\n")
    assert grid_again(path, monkeypatch) == CASES
