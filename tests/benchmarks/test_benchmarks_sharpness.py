"""The benchmark of sharpness: its grid, its arithmetic and its table, on the small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_cases import QUIET

from benchmarks import __main__ as command
from benchmarks.plan import Plan
from benchmarks.suites import sharpness as suite

SMALL: dict[str, Any] = {"problem": "gpt2-0.1M", "batch": 2, "dtype": "float64", "device": "cpu"}


def test_grid() -> None:
    quick = Plan(quick=True)
    assert suite.cells(quick) == [{"problem": "gpt2-0.1M", "batch": 4, "dtype": "float64", "threads": 1}]
    whole = Plan(dtypes=("float64", "float32"), threads=(1, 2))
    assert [(cell["problem"], cell["dtype"]) for cell in suite.cells(whole)][::2] == [(name, "float32") for name in suite.MODELS]
    assert suite.cells(replace(whole, sizes=("small",))) == []
    options = command.parser().parse_args(["sharpness", "--sizes", "gpt2-124M", "--batches", "2"])
    assert {(cell["problem"], cell["batch"]) for cell in suite.cells(command.plan_of(options))} == {("gpt2-124M", 2)}


@pytest.mark.slow
def test_a_step_of_training_leaves_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    work = suite.Work(**SMALL)
    assert work.size == sum(p.numel() for p in work.model.parameters()) == 120_576
    before = [p.detach().clone() for p in work.model.parameters()]
    work.train()
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert all(p.grad is None for p in work.model.parameters())
    assert work.forward().shape == (2, 64, 256)
    assert work.sharpness(2)["Norm"] > 0


def test_rows_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    calls: list[str] = []

    def fresh(function: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        calls.append(function.partition(":")[2])
        return getattr(suite, calls[-1])(**arguments, tell=QUIET)

    monkeypatch.setattr(suite, "run_fresh", fresh)
    cell = {key: SMALL[key] for key in ("problem", "batch", "dtype")} | {"threads": 1}
    result = suite.run(cell, Plan(repeats=2, limit_seconds=20.0), QUIET)
    assert calls == ["times", "peak", "peak"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [suite.TRAINING, suite.FORWARD, suite.ONE, suite.SEVERAL, suite.MORE]
    for several, one, more in zip(*(rows[name]["seconds"] for name in (suite.SEVERAL, suite.ONE, suite.MORE)), strict=True):
        assert one + (suite.DRAWS - 1) * more == pytest.approx(several)
    assert rows[suite.ONE]["bytes"] > 2**20 < rows[suite.TRAINING]["bytes"]
    printed = suite.table([{"cell": cell, "result": result}])
    assert printed.count("gpt2-0.1M | 120576") == 5
    assert "| sharpness, 1 draw |" in printed


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(suite, "available_memory", lambda device: 2**30)
    cell = {"problem": "gpt2-124M", "batch": 4, "dtype": "float32", "threads": 1}
    result = suite.run(cell, Plan(), QUIET)
    assert result == {"skipped": "about 8 GiB wanted, 1.0 GiB free"}
    assert "skipped: about 8 GiB wanted" in suite.table([{"cell": cell, "result": result}])
