"""The benchmark of real sizes, at small ones: its grid, every method beside differences, what is missing or does not fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_cases import PLAN, QUIET, check_page, record

from benchmarks import __main__ as command
from benchmarks import real_sizes
from benchmarks.plan import Plan
from benchmarks.real_sizes import HUGGING_FACE
from benchmarks.report import command as command_of
from benchmarks.residence import Memory
from benchmarks.suites import common
from benchmarks.suites import scale as suite

SHORT = replace(PLAN, repeats=1)
TINY = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}


def cell(problem: str, method: str = "double", dtype: str = "float64") -> dict[str, Any]:
    return {"problem": problem, "method": method, "batch": 1, "dtype": dtype, "threads": 1}


def row_of(problem: str, method: str = "double", dtype: str = "float64", plan: Plan = SHORT) -> dict[str, Any]:
    (row,) = suite.run(cell(problem, method, dtype), plan, QUIET)["rows"]
    return row  # type: ignore[no-any-return]


def test_grid() -> None:
    whole = suite.cells(Plan(dtypes=("float64", "float32"), threads=(1, 2)))
    real = [one for one in whole if one["problem"] not in suite.EVERYDAY]
    assert {one["dtype"] for one in real} == {"float32"}
    assert {one["dtype"] for one in whole if one not in real} == {"float64"}
    assert {one["method"] for one in real if one["problem"] == "vit-b16"} == set(suite.USUAL)
    assert [one["method"] for one in whole if one["problem"] == "paper-mnist"] == ["hessian", "bounds", "frobenius_norms"]
    assert not any("65536" in one["problem"] for one in whole)
    assert any("65536" in one["problem"] for one in suite.cells(Plan(dtypes=("float32",), device="cuda")))
    chosen = "scale --problems bert-base-L32 small --methods double hessian --memory-gib 3 --dtype float32"
    plan = command.plan_of(command.parser().parse_args(chosen.split()))
    assert [(one["problem"], one["method"]) for one in suite.cells(plan)] == [("bert-base-L32", "double"), ("small", "hessian")]
    records = [{"cell": one, "settings": plan.settings()} for one in suite.cells(plan)[:1]]
    assert "--sizes bert-base-L32 --methods double --batches 1 --dtype float32 --threads 1" in command_of("scale", records)
    assert command_of("scale", records).endswith("--memory-gib 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("scale --methods guess", "no method is called 'guess'; there are: hessian_operator, double, "),
        ("scale --problems bert-base", "no problem is called 'bert-base'"),
        ("scale --memory-gib 0", "leaves no memory"),
        ("scale dense --dtype bfloat16", "--dtype bfloat16 is of scale alone"),
    ],
)
def test_options_that_cannot_be_used(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments.split()) == command.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("method", ["hessian_operator:block_size=2,kind='hessian'", "double", "curvlinops"])
def test_products_of_attention_are_those_of_differences(method: str) -> None:
    if method == "curvlinops":
        pytest.importorskip("curvlinops")
    row = row_of("attention-causal-L16", method)
    assert (row["status"], row["reference"], row["ours"]) == ("right", "float64", method.startswith("hessian"))
    assert row["error"] < 1e-8
    assert row["setup_ratio"] > 0 < row["ratio"]["median"]
    printed = check_page(
        "scale", cell("attention-causal-L16", method), {"parameters": 16640, "gradient": row["time"], "rows": [row]}
    )
    assert f"| {method} |" in printed


def test_half_precision_is_compared_with_float64() -> None:
    row = row_of("attention-L16", "hessian_operator", "bfloat16")
    assert row["status"] == "right"
    assert 1e-5 < row["error"] < 0.1


def test_a_wrong_product_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.METHODS, "double", suite.Method(lambda case: lambda v: v))
    row = row_of("attention-causal-L16")
    assert (row["status"], row["ours"]) == ("wrong", False)
    result = {"parameters": 1, "gradient": row["time"], "rows": [row]}
    assert "**wrong**" in suite.table([record("scale", cell("attention-causal-L16"), result)])


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("hessian_operator:guess=1", "hessian_operator has no argument guess"),
        ("double:guess=1", "double has no argument guess"),
        ("hessian-eigenthings", "hessian-eigenthings is not installed"),
    ],
)
def test_what_is_missing_is_said(method: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "installed", lambda package: False)
    result = suite.run(cell("attention-L16", method), SHORT, QUIET)
    assert [(row["status"], row["why"]) for row in result["rows"]] == [("missing", why)]
    assert f"missing: {why}" in suite.table([record("scale", cell("attention-L16", method), result)])
    assert suite.plot([record("scale", cell("attention-L16", method), result)]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of memory")
def test_what_does_not_fit_is_said() -> None:
    row = row_of("attention-L2048", "double", dtype="float32", plan=replace(SHORT, memory_gib=0.01))
    assert (row["status"], row["why"], row["time"]) == ("out of memory", "set-up: more than 0.01 GiB", None)
    assert torch.ones(2**25).sum() == 2**25  # the limit is gone
    result = {"parameters": 1, "gradient": None, "rows": [row]}
    assert "more than 0.01 GiB" in suite.table([record("scale", cell("attention-L2048"), result)])


@pytest.mark.parametrize("method", ["hessian", "bounds", "frobenius_norms"])
def test_everyday_work_is_compared_with_the_dense_hessian(method: str) -> None:
    result = suite.run(cell("tiny", method), SHORT, QUIET)
    assert [row["status"] for row in result["rows"]] == ["right"]
    assert result["rows"][0]["error"] < 1e-8
    assert "Everyday sizes" in suite.table([record("scale", cell("tiny", method), result)])


def test_the_top_eigenvalue_is_that_of_the_matrix() -> None:
    case = real_sizes.make("small", 1, torch.float32, "cpu")
    matrix = common.dense(case)
    found = suite._eigenvalue(case, lambda v: matrix @ v, Memory("cpu"), SHORT, lambda: 0.0)
    values = torch.linalg.eigvalsh(matrix.double())
    assert found["value"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-4)
    assert found["residual"] < 1e-3
    result = suite.run(cell("decoder-L8", dtype="float32"), SHORT, QUIET)
    assert result["rows"][0]["eigenvalue"]["products"] > 5
    assert "largest magnitude" in suite.table([record("scale", cell("decoder-L8", dtype="float32"), result)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-134M-L5", {**TINY, "vocab_size": 13}),
        ("bert-base-L5", {**TINY, "vocab_size": 13}),
        ("vit-b16", {**TINY, "image_size": 8, "patch_size": 4, "num_labels": real_sizes.CLASSES}),
    ],
)
def test_models_of_transformers(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    known = real_sizes.read(name)
    assert known is not None
    monkeypatch.setitem(HUGGING_FACE, known[0], (HUGGING_FACE[known[0]][0], options))
    row = row_of(name)
    assert row["status"] == "right", row
    assert row["error"] < 1e-6
