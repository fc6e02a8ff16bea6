"""Every benchmark runs on its smallest cell and reports completely. Times are never judged here."""

from __future__ import annotations

import math
import re
import sys
import time
from dataclasses import replace

import pytest
import torch
from benchmark_cases import PLAN, QUIET, check_page, closed, first_cell, record

from benchmarks import tables
from benchmarks.packaged import installed
from benchmarks.problems import make
from benchmarks.suites import BENCHMARKS, attention, common, hvp, limit, memory, scalars
from hessiankit import hessian

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]


def test_hvp_compares_hessian_and_gauss_newton() -> None:
    pytest.importorskip("curvlinops")
    cell = first_cell("hvp", batch=2)
    result = hvp.run(cell, replace(PLAN, repeats=1), QUIET)
    status = {(row["quantity"], row["name"]): row["status"] for row in result["rows"]}
    assert {name[0] for name in status} == {"Hessian x 1", "Hessian x 16", "GGN x 1", "GGN x 16"}
    jax = installed("jax")
    assert all(found == "right" or ("jax" in name and not jax) for (_, name), found in status.items())
    assert "set-up (s)" in check_page("hvp", cell, result)


def test_ggn_reference_is_the_outer_product_part() -> None:
    case = make("tiny-affine", 2)
    V = torch.randn(3, case.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    outer = hessian(case.module, case.inputs, case.target, loss=case.loss).outer()
    torch.testing.assert_close(hvp.ggn_reference(case, V), V @ outer, rtol=0, atol=1e-11)


def test_hvp_skips_what_would_take_too_long() -> None:
    result = hvp.run(first_cell("hvp"), replace(PLAN, limit_seconds=1e-6), QUIET)
    assert [row["status"] for row in result["rows"]] == ["skipped"] * 4
    assert "forecast" in tables.detail_table([record("hvp", first_cell("hvp"), result)])


def test_scalars_agree_and_forecast_hutchinson() -> None:
    cell = first_cell("scalars", batch=2)
    result = scalars.run(cell, replace(PLAN, repeats=1), QUIET)
    rows = {(row["quantity"], row["name"]): row for row in result["rows"]}
    assert all(row["status"] == "right" for row in rows.values())
    matrix = closed(make("tiny", 2))()
    count = rows["trace", "Hutchinson, 1% standard error"]["probes"]
    off = float((matrix - matrix.diag().diag()).square().sum())
    assert count == math.ceil(2 * off / (0.01 * float(matrix.trace())) ** 2)
    assert f"of {count} probes" in check_page("scalars", cell, result)


def test_scalars_go_without_probes_and_stop_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = first_cell("scalars", batch=2)
    monkeypatch.setattr(scalars, "PROBES", 10**9)
    rows = scalars.run(cell, replace(PLAN, repeats=1), QUIET)["rows"]
    by_name = {(row["quantity"], row["name"]): row for row in rows}
    assert by_name["trace", "hessiankit.hessian_diagonal"]["status"] == "right"
    assert by_name["trace", "Hutchinson"]["status"] == by_name["diagonal", "Hutchinson"]["status"] == "skipped"
    assert "1000000000 probes" in by_name["trace", "Hutchinson"]["why"]
    ways = {"slow": lambda: time.sleep(9.0) or torch.ones(()), "quick": lambda: torch.ones(())}
    slow, quick = common.race("trace", scalars._made(ways), None, 1e-8, replace(PLAN, repeats=1, limit_seconds=0.3))
    assert (slow["status"], slow["why"], slow["time"]) == ("skipped", "over budget: slow took more than 0 s", None)
    assert quick["status"] == "right"
    assert quick["time"] is not None


def test_memory_measures_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORK", {"hessian": memory.WORK["hessian"]})
    cell = first_cell("memory", problem="small")
    result = memory.run(cell, PLAN, QUIET)
    (row,) = result["rows"]
    assert row["status"] == "right", row["why"]
    if sys.platform == "linux":
        assert result["matrix_bytes"] <= row["bytes"] < 2**29
    assert "peak (MiB)" in check_page("memory", cell, result)


def test_memory_skips_what_does_not_fit() -> None:
    pytest.importorskip("curvlinops")
    result = memory.run(first_cell("memory", problem="L16d2048f8192"), replace(PLAN, limit_seconds=0.01), QUIET)
    assert {row["status"] for row in result["rows"]} == {"skipped"}
    why = {row["name"]: row["why"] for row in result["rows"]}
    assert "over budget" in why.pop("hessian_operator")
    assert all("forecast" in text for text in why.values())


def test_limit_counts_operations() -> None:
    cell = first_cell("limit", batch=2)
    result = limit.run(cell, replace(PLAN, repeats=1), QUIET)
    assert result["operations"] == 112**2 * 2 * 4
    assert result["fraction"] == pytest.approx(result["operations"] / result["time"]["median"] / result["square_rate"])
    assert "GFLOP/s" in check_page("limit", cell, result)


@pytest.mark.parametrize(
    ("problem", "limit_seconds", "message"),
    [("large", 60.0, r"GiB for 720896 x 720896"), ("tiny", 1e-9, r"forecast 2 x .* s at the least, limit 1e-09 s a cell")],
)
def test_cells_beyond_the_limits_are_skipped(problem: str, limit_seconds: float, message: str) -> None:
    cell = first_cell("dense", problem=problem)
    result = BENCHMARKS["dense"].run(cell, replace(PLAN, limit_seconds=limit_seconds), QUIET)
    assert re.search(message, result["skipped"])
    assert result["skipped"] in tables.contest_tables([record("dense", cell, result)])
    assert result["skipped"] in BENCHMARKS["limit"].table(
        [record("limit", cell, limit.run(cell, replace(PLAN, limit_seconds=limit_seconds), QUIET))]
    )


@pytest.mark.parametrize("problem", ["attention-L32", "attention-causal-L32", "head-C50"])
def test_functions_of_torch_beside_torchs_own(problem: str) -> None:
    cell = first_cell("attention", problem=problem)
    result = attention.run(cell, replace(PLAN, limit_seconds=0.01), QUIET)
    assert [row["name"] for row in result["rows"]] == ["hessiankit", "torch"] * 2
    assert all(row["error"] < 1e-10 and row["time"] for row in result["rows"])
    assert "double backward" in check_page("attention", cell, result)
    small = attention.run(cell, replace(PLAN, limit_seconds=0.01, memory_gib=1e-6), QUIET)
    assert "skipped: forecast" in check_page("attention", cell, small)
