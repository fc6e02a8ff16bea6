"""``python -m papers tune-lr``: what it prints, writes, keeps and refuses."""

from __future__ import annotations

import argparse
import json

import pytest

from papers.__main__ import parser
from papers.experiments.tune_lr import command_of
from papers.experiments.tune_lr import run as run_tune
from papers.experiments.tuning import experiment, store
from papers.experiments.tuning.experiment import Setting
from papers.experiments.tuning.store import Runs

TINY = Setting(steps=8, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=4, windows=8)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(experiment, "QUICK", TINY)


def parsed(*given: str) -> argparse.Namespace:
    return parser().parse_args(["tune-lr", "--quick", "--jobs", "1", *given])


def refuse(spec):
    raise AssertionError(f"{spec} is done again")


@pytest.mark.slow
def test_the_whole_comparison_and_once_more(capsys, tmp_path, monkeypatch):
    given = ["--seeds", "2", "--tuning-seeds", "1", "--grid", "0.002", "0.004", "--out", str(tmp_path / "out")]
    files = ["--json", str(tmp_path / "x.json"), "--markdown", str(tmp_path / "page.md")]
    assert run_tune(parsed(*given, *files)) == 0
    first = capsys.readouterr()
    assert "0 of this setting done" in first.err
    for words in (
        "Blockwise eq (5) at its own lr",
        "Norm x 2",
        "Emb x 10 only",
        "all x 2",
        "measured ratios",
        "Beside AdamW tuned to",
    ):
        assert words in first.out
    found = json.loads((tmp_path / "x.json").read_text())
    assert len(found["arms"]) == 9
    assert found["seeds"] == [0, 1]
    tuning = {int(seed) for one in found["sweeps"] for of in one["losses"].values() for seed in of}
    assert tuning == {1000}  # no arm is chosen by the runs that judge it
    assert (tmp_path / "page.png").read_bytes() == (tmp_path / "out" / "learning_rates.png").read_bytes()
    page = (tmp_path / "page.md").read_text()
    assert "python -m papers tune-lr --seeds 2 --tuning-seeds 1 --grid 0.002 0.004 --quick" in page
    assert str(tmp_path / "out") not in page
    path = tmp_path / "out" / "runs.jsonl"
    known = Runs(path).known
    assert len(path.read_text().splitlines()) == len(known)
    assert {spec.seed for spec in known} == {0, 1, 1000}

    monkeypatch.setattr(store, "run", refuse)  # all runs are kept, and the tables are the same
    assert run_tune(parsed(*given)) == 0
    assert capsys.readouterr().out == first.out


def test_ctrl_c_keeps_what_is_done(capsys, tmp_path, monkeypatch):
    done = []

    def interrupted(spec):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(spec)
        return run(spec)

    run = store.run
    monkeypatch.setattr(store, "run", interrupted)
    assert run_tune(parsed("--out", str(tmp_path))) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(Runs(tmp_path / "runs.jsonl").known) == 3


def test_the_command_that_the_page_names():
    args = parsed("--steps", "30", "--text", "a/b.txt", "--confidence", "0.9", "--markdown", "docs/x.md", "--out", "somewhere")
    assert command_of(args) == (
        "python -m papers tune-lr --steps 30 --text a/b.txt --confidence 0.9 --quick --markdown docs/x.md"
    )
