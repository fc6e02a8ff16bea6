"""Every benchmark runs on its smallest cell, reports completely, and ranks only what is right. Times are never judged here."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_cases import PLAN, QUIET, WRONG, check_page, closed, first_cell, record, whole, wrong_matrix
from torch import Tensor

from benchmarks import tables
from benchmarks.contest import contest
from benchmarks.packaged import installed
from benchmarks.peers import FUNC_HESSIAN, JACREV, JVP, REVERSE, Peer
from benchmarks.problems import Case, make, parameters_of
from benchmarks.suites import BENCHMARKS, attention, common, growth, hvp, limit, memory, scalars, sharpness
from hessiankit import hessian

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]
ONCE = replace(PLAN, repeats=1)


def test_hvp_compares_hessian_and_gauss_newton_with_curvlinops() -> None:
    pytest.importorskip("curvlinops")
    cell = first_cell("hvp", batch=2)
    result = hvp.run(cell, ONCE, QUIET)
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


def test_scalars_agree_and_forecast_hutchinson() -> None:
    cell = first_cell("scalars", batch=2)
    result = scalars.run(cell, ONCE, QUIET)
    rows = {(row["quantity"], row["name"]): row for row in result["rows"]}
    assert all(row["status"] == "right" for row in rows.values())
    matrix = closed(make("tiny", 2))()
    count = rows["trace", "Hutchinson, 1% standard error"]["probes"]
    off = float((matrix - matrix.diag().diag()).square().sum())
    assert count == math.ceil(2 * off / (0.01 * float(matrix.trace())) ** 2)
    assert f"of {count} probes" in check_page("scalars", cell, result)


def test_memory_measures_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORK", {"hessian": memory.WORK["hessian"]})
    cell = first_cell("memory", problem="small")
    result = memory.run(cell, replace(PLAN, limit_seconds=600.0), QUIET)
    (row,) = result["rows"]
    assert row["status"] == "right", row["why"]
    if sys.platform == "linux":
        assert result["matrix_bytes"] <= row["bytes"] < 2**29
    assert "peak (MiB)" in check_page("memory", cell, result)


def test_limit_counts_operations() -> None:
    cell = first_cell("limit", batch=2)
    result = limit.run(cell, ONCE, QUIET)
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


@pytest.mark.parametrize("problem", ["attention-L32", "attention-causal-L32", "head-C50"])
def test_functions_of_torch_beside_torchs_own(problem: str) -> None:
    cell = first_cell("attention", problem=problem)
    result = attention.run(cell, replace(PLAN, limit_seconds=0.01), QUIET)
    assert [row["name"] for row in result["rows"]] == ["hessiankit", "torch"] * 2
    assert all(row["error"] < 1e-10 and row["time"] for row in result["rows"])
    assert "double backward" in check_page("attention", cell, result)


def test_growth_fits_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "AXES", {"B": [(b, "L3d4f4", b) for b in (1, 2, 4)]})
    cell = first_cell("growth")
    result = growth.run(cell, ONCE, QUIET)
    assert result["predicted"] == pytest.approx(1.0)
    assert math.isfinite(result["fitted"])
    assert "predicted" in check_page("growth", cell, result)
    skipped = growth.run(cell, replace(PLAN, limit_seconds=1e-9), QUIET)
    assert [len(skipped["points"]), len(skipped["skipped_points"])] == [1, 2]
    assert "skipped: forecast" in BENCHMARKS["growth"].table([record("growth", cell, skipped)])


def test_growth_predicts_the_exponents_of_the_formula() -> None:
    found = {}
    for axis, ends in ((axis, [points[0], points[-1]]) for axis, points in growth.AXES.items()):
        work = [(x, parameters_of(name) ** 2 * batch * common.tokens_of(name)) for x, name, batch in ends]
        found[axis] = growth._exponents([{"x": x, "operations": n, "time": {"median": n}} for x, n in work])["predicted"]
    assert found == pytest.approx({"B": 1.0, "L": 1.0, "d": 4.0, "layers": 2.0})


def test_sharpness_beside_a_training_step_leaves_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    cell = {"problem": "gpt2-0.1M", "batch": 2, "dtype": "float64"}
    work = sharpness.Work(**cell, device="cpu")
    before = [p.detach().clone() for p in work.model.parameters()]
    work.train()
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert all(p.grad is None for p in work.model.parameters())

    def here(function: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        return getattr(sharpness, function.partition(":")[2])(**arguments, tell=QUIET)

    monkeypatch.setattr(sharpness, "run_fresh", here)
    result = sharpness.run({**cell, "threads": 1}, replace(PLAN, limit_seconds=20.0), QUIET)
    rows = {row["name"]: row for row in result["rows"]}
    times = (rows[name]["seconds"] for name in (sharpness.SEVERAL, sharpness.ONE, sharpness.MORE))
    for several, one, more in zip(*times, strict=True):
        assert one + (sharpness.DRAWS - 1) * more == pytest.approx(several)
    assert rows[sharpness.ONE]["bytes"] > 2**20 < rows[sharpness.TRAINING]["bytes"]
    assert sharpness.table([{"cell": {**cell, "threads": 1}, "result": result}]).count("gpt2-0.1M | 120576") == 5


# A contest checks every entry -----------------------------------------------------------------------------------------


def test_contest_marks_what_is_wrong_and_ranks_what_is_right() -> None:
    case = make("tiny-affine", 2)
    result = contest(case, whole(case), closed(case), [JVP, JACREV, FUNC_HESSIAN], PLAN, QUIET)
    ours, good, bad, func = result["rows"]
    assert [row["status"] for row in (ours, good)] == ["right", "right"]
    assert {row["status"] for row in (bad, func)} == {"wrong" if bad["error"] > 1e-8 else "right"}
    assert good["ratios"] == [a / b for a, b in zip(good["seconds"], ours["seconds"], strict=True)]
    assert len(good["seconds"]) == result["rounds"] == 2
    bad.update(status="wrong", error=0.583, ratio=None, time={"median": 1e-9, "low": 1e-9, "high": 1e-9})
    func.update(status="wrong", error=None)
    page = tables.contest_tables([record("dense", {"problem": "t", "batch": 2, "dtype": "float64", "threads": 1}, result)])
    best, details = page.split("## All methods")
    assert "vmap(jvp(grad))" in best
    assert "jacfwd" not in best  # the fastest, but wrong
    assert "**wrong by 0.58**" in details


def raises(case: Case) -> Tensor:
    raise ValueError("cannot do it\nand more")


def test_contest_sees_a_small_lie_and_survives_a_peer_that_breaks() -> None:
    case = make("tiny", 1)
    result = contest(case, whole(case), closed(case), [WRONG, Peer("breaks", matrix=raises)], replace(PLAN, repeats=1), QUIET)
    _, lies, breaks = result["rows"]
    assert lies["status"] == "wrong"
    assert 1e-4 < lies["error"] < 1e-2
    assert (breaks["status"], breaks["why"], breaks["seconds"]) == ("failed", "ValueError: cannot do it", [])
    assert result["writing"]["median"] > 0
    assert contest(case, whole(case), lambda: wrong_matrix(case), [], PLAN, QUIET)["rows"][0]["status"] == "wrong"


def test_slow_peers_are_extrapolated_and_marked() -> None:
    case = make("small", 1)
    plan = replace(PLAN, limit_seconds=0.05, repeats=1)
    result = contest(case, whole(case), closed(case), [REVERSE], plan, QUIET)
    row = result["rows"][1]
    assert row["extrapolated"]
    assert row["timed_columns"] < row["columns"] == 704
    assert tables.time_text(row).startswith("~")
    assert tables.ratio_text(row).startswith("~")
