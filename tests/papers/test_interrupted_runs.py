"""Long runs that are interrupted, run out of disk or cannot write: one clear line, and nothing that was finished is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from monitoring_cases import full_disk

import hessiankit as hk
from hessiankit.cli.program import INTERRUPTED
from hessiankit.support.environment import code_version
from papers.__main__ import main
from papers.experiments import placement_grid
from papers.experiments.placement_grid import cases
from papers.experiments.tuning import experiment, store
from papers.experiments.tuning.experiment import RunResult, RunSpec, Setting
from papers.experiments.tuning.store import Runs

CASES = cases(["post"], sample=4)
SPECS = [RunSpec(Setting(steps=4, layers=1, d_model=8, heads=2), lr, (), 0) for lr in (0.01, 0.02, 0.03, 0.04)]


def finished(case: object) -> placement_grid.Finished:
    return placement_grid.Finished(
        case, 0.0, 0, 0.0, True, "PASSED", ("attention.W_Q",), 1, 0.0, code_version(*placement_grid.CODE)
    )


def ran(spec: RunSpec) -> RunResult:
    return RunResult(spec, (0, 4), (5.5, 1 / 3), 1.0)


def grid(path: Path) -> list[Any]:
    return list(placement_grid.run_grid(CASES, path))


def tune(path: Path) -> list[Any]:
    with Runs(path) as runs:
        return list(runs(SPECS).values())


RUNS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[Path], list[Any]], list[Any]]] = {
    "grid": (placement_grid, "run_case", finished, grid, CASES),
    "tune": (store, "run", ran, tune, SPECS),
}
"""Where one piece of work is done, what it gives, all of it, and the pieces."""


@pytest.mark.parametrize("what", RUNS)
def test_a_full_disk_and_a_torn_line_lose_one_piece_of_work(what, tmp_path, monkeypatch):
    module, name, result, work, pieces = RUNS[what]
    path, done = tmp_path / "lines.jsonl", []

    def until_the_disk_is_full(piece: Any) -> Any:
        done.append(piece)
        if len(done) == 3:
            disk.__enter__()
        return result(piece)

    disk = full_disk(monkeypatch)
    monkeypatch.setattr(module, name, until_the_disk_is_full)
    with pytest.raises(hk.InputError, match=r"No space left on device.*--out"):
        work(path)
    disk.__exit__(None, None, None)
    path.write_text(path.read_text() + '{"case": {"placem')  # as a process leaves it that is killed
    assert work(path) == [result(piece) for piece in pieces]
    assert done == [*pieces[:3], *pieces[2:]]
    assert work(path) == [result(piece) for piece in pieces]
    assert len(done) == 5


@pytest.mark.parametrize(
    ("command", "what"),
    [("placements --placement post --sample 4", "grid"), ("tune-lr --quick --jobs 1 --text text.txt", "tune")],
)
def test_ctrl_c_keeps_what_is_done(command, what, tmp_path, monkeypatch, capsys):
    module, name, result, *_ = RUNS[what]
    seen = []

    def stop_at_third(piece: Any) -> Any:
        seen.append(piece)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return result(piece)

    monkeypatch.setattr(module, name, stop_at_third)
    monkeypatch.setattr(experiment, "QUICK", SPECS[0].setting)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    assert main([*command.split(), "--out", str(tmp_path)]) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    (path,) = tmp_path.glob("*.jsonl")
    assert path.read_text().count("\n") == 2


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "lines.jsonl"
    with pytest.raises(hk.InputError, match=r"placement_grid: .*cannot be used: File exists; pass another folder"):
        placement_grid.run_grid(CASES, below)
    with pytest.raises(hk.InputError, match=r"tune-lr: .*cannot be used: File exists; pass another folder"):
        Runs(below)
