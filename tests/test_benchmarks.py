"""The benchmarks run and report completely. Their times are never judged here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.dense_hessian import CLOSED, CONFIGURATIONS, PEERS, Measurement, measure
from benchmarks.timing import in_turn
from hessiankit.environment import environment


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dense_hessian.json").read_text(encoding="utf-8"))
    return content


def test_quick_reports_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert command.main(["dense_hessian", "--quick", "--threads", "1", "--out", str(tmp_path / "new")]) == 0
    assert torch.get_num_threads() == threads
    report = read(tmp_path / "new")
    assert report["complete"]
    assert report["environment"]["threads"] == 1
    assert all(report["environment"][key] for key in ("date", "python", "torch", "numpy", "processor"))
    (tiny,) = report["configurations"]
    assert (tiny["name"], tiny["parameters"], tiny["batch"], tiny["dtype"], tiny["rounds"]) == ("tiny", 274, 8, "float64", 2)
    rows = {row["method"]: row for row in tiny["rows"]}
    assert list(rows) == [CLOSED, *PEERS]
    for method, row in rows.items():
        assert len(row["seconds"]) == len(row["ratios"]) == 2
        times = [row["first_seconds"], row["median_seconds"], row["median_ratio"], *row["seconds"], *row["ratios"]]
        assert all(math.isfinite(value) and value > 0 for value in times)
        assert row["ratios"] == [mine / closed for mine, closed in zip(row["seconds"], rows[CLOSED]["seconds"], strict=True)]
        assert (row["chunk"] is None) == (method == CLOSED)
        assert row["status"] == ("wrong" if row["error"] > 1e-10 else "right")
    assert all(rows[method]["status"] == "right" for method in (CLOSED, "reverse-over-reverse", "jvp(grad)"))
    table = (tmp_path / "new" / "dense_hessian.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == table + "\n"
    lines = [line for line in table.splitlines() if line.startswith("| tiny")]
    assert [line.split("|")[5].strip() for line in lines] == list(rows)
    assert [line.rstrip(" |").endswith("**wrong**") for line in lines] == [row["status"] == "wrong" for row in rows.values()]


def test_interruption_keeps_the_finished_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_round_and_a_half(*arguments: Any) -> Iterator[Measurement]:
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", one_round_and_a_half)
    assert command.main(["dense_hessian", "--quick", "--repeats", "3", "--out", str(tmp_path)]) == command.INTERRUPTED
    report = read(tmp_path)
    assert not report["complete"]
    assert [(c["rounds"], len(c["rows"])) for c in report["configurations"]] == [(1, 1 + len(PEERS))]


def test_interruption_before_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*_: Any) -> Iterator[Measurement]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", nothing)
    assert command.main(["dense_hessian", "--out", str(tmp_path)]) == command.INTERRUPTED
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "'0' is not a positive whole number"),
        (["--threads", "two"], "'two' is not a positive whole number"),
        (["--only", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["dense_hessian", *arguments])
    assert message in capsys.readouterr().err


def test_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["dense_hessian", "--quick", "--out", str(tmp_path / "file")]) == command.USAGE
    assert "choose another folder" in capsys.readouterr().err


def test_configurations_are_what_they_are_called() -> None:
    cases = {configuration.name: configuration.make() for configuration in CONFIGURATIONS}
    sizes = {name: sum(p.numel() for p in case.module.parameters()) for name, case in cases.items()}
    assert sizes == {"tiny": 274, "small": 1034, "block": 2880, "digits": 3466}
    shapes = {name: tuple(case.inputs.shape) for name, case in cases.items()}
    assert shapes == {"tiny": (8, 4, 16), "small": (32, 16, 4), "block": (1, 49, 16), "digits": (128, 16, 4)}
    assert all(case.inputs.dtype == next(case.module.parameters()).dtype == torch.float64 for case in cases.values())
    first, second = (CONFIGURATIONS[0].make().module.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


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


def test_environment_is_complete() -> None:
    assert {"date", "python", "torch", "numpy", "curvlinops", "threads", "processor"} <= set(environment())
