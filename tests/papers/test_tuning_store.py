"""Finished runs are kept: an interrupt loses none, going on changes no digit, and the number of processes changes none."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from papers.experiments.tuning import store
from papers.experiments.tuning.experiment import PAPER, RunResult, RunSpec, Setting, run
from papers.experiments.tuning.store import Runs, record_of

TINY = Setting(steps=4, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=2, windows=4)
SPECS = [RunSpec(TINY, lr, ratios, seed) for lr, ratios in ((0.01, ()), (0.02, PAPER)) for seed in (0, 1)]


def digits(found: dict[RunSpec, RunResult]) -> list[tuple[float, ...]]:
    return [found[spec].losses for spec in SPECS]


def refuse(spec: RunSpec) -> RunResult:
    raise AssertionError(f"{spec} is done again")


def test_a_line_holds_a_run(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = RunResult(SPECS[3], (0, 2, 4), (5.5, 1 / 3, math.inf), 1.25)
    path.write_text(json.dumps(record_of(result)) + "\n")
    assert list(Runs(path).known.values()) == [result]
    assert "Infinity" not in path.read_text()


def test_going_on_after_an_interrupt_gives_the_same_digits(tmp_path, monkeypatch):
    with Runs(tmp_path / "whole.jsonl") as runs:
        whole = runs(SPECS)
    path = tmp_path / "cut.jsonl"
    done = []

    def interrupted(spec):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(spec)
        return run(spec)

    monkeypatch.setattr(store, "run", interrupted)
    with pytest.raises(KeyboardInterrupt), Runs(path) as runs:
        runs(SPECS)
    assert len(Runs(path).known) == 2
    path.write_text(path.read_text() + '{"spec": {"setting": {"te')  # a line that was cut off
    monkeypatch.setattr(store, "run", run)
    with Runs(path) as runs:
        assert digits(runs(SPECS)) == digits(whole)
    monkeypatch.setattr(store, "run", refuse)
    with Runs(path) as runs:
        assert digits(runs(SPECS)) == digits(whole)


@pytest.mark.slow
def test_two_processes_give_the_digits_of_one(tmp_path):
    told = []
    with Runs(tmp_path / "two.jsonl", jobs=2, tell=lambda *given: told.append(given), expected=4) as runs:
        found = runs(SPECS)
    assert digits(found) == [run(spec).losses for spec in SPECS]
    assert [done for _, done, _ in told] == [0, 1, 2, 3, 4]
    assert {total for *_, total in told} == {4}


def test_runs_of_other_code_do_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = run(SPECS[0])
    entry = record_of(result)
    path.write_text(
        json.dumps({**entry, "version": "torch 1, code 0"}) + "\n[]\n" + json.dumps({"version": entry["version"]}) + "\n"
    )
    assert not Runs(path).known
    path.write_text(json.dumps(entry))
    assert [one.losses for one in Runs(path).known.values()] == [result.losses]


def test_the_same_run_is_done_once_and_counted_once(tmp_path):
    done = []
    with Runs(tmp_path / "runs.jsonl", tell=lambda _, count, total: done.append((count, total)), expected=1) as runs:
        runs([SPECS[0], SPECS[0]])
        runs([replace(SPECS[0])])
        assert len(runs.finished(TINY)) == 1
        assert runs.finished(replace(TINY, steps=5)) == []
        runs(SPECS[1:2])
    assert done == [(0, 1), (1, 1), (1, 1), (1, 1), (2, 2)]
