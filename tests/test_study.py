"""The main job and the command line, on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hessiankit.cli.main import main

SMALL = ("--d-model", "4", "--d-ff", "5", "--steps", "5", "--batch", "4")


def test_quick_run_prints_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--quick", "--table", "--seed", "3", *SMALL, "--out", str(tmp_path), "--json", str(tmp_path / "all.json")]
    assert main(["study", *given]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "blocks.0.attention.W_Q x blocks.0.attention.W_K",
        "trained 2-norm",
        "reverse-over-reverse",
        "closed form",
        "PASSED",
    ):
        assert expected in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert json.loads((tmp_path / "all.json").read_text()).keys() == report.keys()
    options = report["options"]
    assert (options["d_ff"], options["d_model"], options["seed"], options["full"]) == (5, 4, 3, True)
    assert [(r["loss"], r["stage"]) for r in report["reports"]] == [
        ("mse", "initialisation"), ("mse", "trained"), ("cross_entropy", "initialisation"), ("cross_entropy", "trained"),
    ]  # fmt: skip
    assert report["timing"]["max_rel_error"] < 1e-10
    assert report["environment"]["torch"]
    for name in ("hessian_mse.png", "hessian_cross_entropy.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_disagreement_is_exit_code_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from derivations.softmax import LinearisedSoftmax

    right = LinearisedSoftmax.pull

    def other(self: LinearisedSoftmax, bar: Any, tangents: Any = None) -> Any:
        found = right(self, bar, tangents)
        return found if tangents is None or bar is not None else tuple(None if c is None else -c for c in found)

    monkeypatch.setattr(LinearisedSoftmax, "pull", other)
    assert main(["study", "--quick", "--loss", "mse", "--no-full", *SMALL, "--out", str(tmp_path)]) == 1


def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["study", "--quick", "--out", str(tmp_path / "file")]) == 2
    assert f"study: cannot make the folder {tmp_path}" in capsys.readouterr().err
