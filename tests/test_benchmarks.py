"""The benchmarks run and report completely. Their times are never judged here."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import tables
from benchmarks.contest import contest, contestants
from benchmarks.entries import Part, Ring
from benchmarks.gpt2 import TinyGPT2
from benchmarks.packaged import JaxHessian, installed
from benchmarks.peers import Compiled, FuncHessian, JvpOfGrad, JvpOfJacrev, ReverseOverReverse, Whole, plain_columns
from benchmarks.plan import Cell, Plan, Tell
from benchmarks.problems import GPT2, SIZES, Case, make, parameters_of
from benchmarks.suites import BENCHMARKS, common, growth, hvp, limit, memory, scalars
from hessiankit import hessian
from hessiankit.errors import InputError

QUIET: Tell = lambda what, done, total: None  # noqa: E731
PLAN = Plan(repeats=2, limit_seconds=60.0, compile=False)


def whole(case: Case) -> Part:
    return Part(slice(0, case.size), slice(0, case.size))


def closed(case: Case) -> Callable[[], Tensor]:
    return lambda: hessian(case.module, case.inputs, case.target, loss=case.loss).matrix


def first_cell(name: str, **fixed: Any) -> Cell:
    return {**BENCHMARKS[name].cells(replace(PLAN, quick=True))[0], **fixed}


def record(name: str, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    return {"cell": cell, "result": json.loads(json.dumps(result, allow_nan=False)), "environment": {"date": "2026-01-01"}}


def check_page(name: str, cell: Cell, result: dict[str, Any]) -> str:
    records = [record(name, cell, result)]
    assert BENCHMARKS[name].plot(records) is not None
    return BENCHMARKS[name].table(records)


# Problems


def test_problems_have_the_papers_sizes() -> None:
    assert {name: parameters_of(name) for name in SIZES} == {
        "tiny": 112,
        "small": 704,
        "paper-mnist": 2816,
        "medium": 11264,
        "large": 720896,
    }
    for name in ("tiny", "small-affine", "paper-mnist", "L5d4f6-x2", *GPT2):
        case = make(name, 2, "float32")
        assert case.size == parameters_of(name) == sum(p.numel() for p in case.module.parameters())
        assert {p.dtype for p in case.parameters.values()} == {torch.float32}
    assert make("gpt2-untied", 1).size - make("gpt2-tied", 1).size == 64 * 32


def test_problems_are_the_same_every_time_and_look_at_the_future_never() -> None:
    first, second = (make("small-affine", 2) for _ in range(2))
    assert torch.equal(first.theta, second.theta)
    assert torch.equal(first.inputs, second.inputs)
    model, ids = make("gpt2-tied", 1).module, make("gpt2-tied", 1).inputs
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 64
    assert torch.equal(model(ids)[0, :-1], model(changed)[0, :-1])
    with pytest.raises(InputError, match="no problem is called 'huge'; there are: tiny, "):
        make("huge", 1)


def test_flat_loss_is_the_loss() -> None:
    for name, loss in (("tiny-affine", nn.MSELoss()), ("gpt2-tied", None)):
        case = make(name, 2)
        out = case.module(case.inputs)
        expected = loss(out, case.target) if loss else nn.functional.cross_entropy(out.transpose(1, 2), case.target)
        torch.testing.assert_close(case.flat_loss(case.theta), expected, rtol=1e-12, atol=0)


# Contests


def test_contest_marks_what_is_wrong_and_ranks_what_is_right() -> None:
    case = make("tiny-affine", 2)
    result = contest(case, whole(case), closed(case), [JvpOfGrad(), JvpOfJacrev(), FuncHessian()], PLAN, QUIET)
    ours, good, bad, func = result["rows"]
    assert [row["status"] for row in (ours, good)] == ["right", "right"]
    assert {row["status"] for row in (bad, func)} == {"wrong" if bad["error"] > 1e-8 else "right"}
    assert good["ratios"] == [a / b for a, b in zip(good["seconds"], ours["seconds"], strict=True)]
    assert len(good["seconds"]) == result["rounds"] == 2
    assert good["timed_columns"] == case.size == 128
    bad.update(status="wrong", error=0.583, ratio=None, time={"median": 1e-9, "low": 1e-9, "high": 1e-9})
    func.update(status="wrong", error=None)
    page = tables.contest_tables([record("dense", {"problem": "t", "batch": 2, "dtype": "float64", "threads": 1}, result)])
    best, details = page.split("## All methods")
    assert "vmap(jvp(grad))" in best
    assert "jacfwd" not in best  # the fastest, but wrong
    assert "**wrong by 0.58**" in details
    assert "**wrong: not finite**" in details


@pytest.mark.parametrize("tied", [False, True])
def test_every_chunked_peer_takes_a_language_model(tied: bool) -> None:
    torch.manual_seed(0)
    model = TinyGPT2(5, 3, d_model=4, n_heads=2, n_layers=1, tied=tied).double()
    ids = torch.randint(5, (4, 4))
    case = Case("gpt2", model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), "cross_entropy")
    ring = Ring(case, whole(case), 0.05, "cpu")
    peers = [peer for peer in contestants() if not isinstance(peer, Whole) and not peer.missing(case)]
    statuses = {peer.name: ring.enter(peer).status for peer in peers}
    assert statuses["vmap(jvp(grad))"] == statuses["reverse over reverse"] == "right"
    assert set(statuses.values()) <= {"right", "wrong"}  # none fails; some lose a term in the norms
    assert ring.verdict(ring.error(closed(case)()[:, ring.picks].T)) == "right"


class Lies(Whole):
    name = "lies"
    summary = "the Hessian with one entry changed"

    def matrix(self, case: Case) -> Tensor:
        found = closed(case)().clone()
        found[:, Ring(case, whole(case), 1.0, "cpu").picks[3]] += 1e-3 * found.abs().max()
        return found


class Breaks(Whole):
    name = "breaks"
    summary = "raises"

    def matrix(self, case: Case) -> Tensor:
        raise ValueError("cannot do it\nand more")


def test_contest_sees_a_small_lie_and_survives_a_peer_that_breaks() -> None:
    case = make("tiny", 1)
    result = contest(case, whole(case), closed(case), [Lies(), Breaks()], replace(PLAN, repeats=1), QUIET)
    _, lies, breaks = result["rows"]
    assert lies["status"] == "wrong"
    assert 1e-4 < lies["error"] < 1e-2
    assert (breaks["status"], breaks["why"], breaks["seconds"]) == ("failed", "ValueError: cannot do it", [])
    assert result["best"] is None
    assert contest(case, whole(case), lambda: Lies().matrix(case), [], PLAN, QUIET)["rows"][0]["status"] == "wrong"


def test_slow_peers_are_extrapolated_and_marked() -> None:
    case = make("small", 1)
    plan = replace(PLAN, limit_seconds=0.05, repeats=1)
    result = contest(case, whole(case), closed(case), [ReverseOverReverse()], plan, QUIET)
    row = result["rows"][1]
    assert row["extrapolated"]
    assert row["timed_columns"] < row["columns"] == 704
    assert row["timed_columns"] % row["chunk"] == 0
    text = tables.time_text(row)
    assert text.startswith("~")
    assert text.endswith(f"from {row['timed_columns']} of 704 columns")
    assert tables.ratio_text(row).startswith("~")


def test_extrapolation_is_linear_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tiny", 1)
    ring = Ring(case, whole(case), 1e-9, "cpu")
    entry = ring.enter(ReverseOverReverse())
    entry.timed_columns, entry.chunk = 28, 28
    seconds = iter([3.0, 5.0])  # preparing, pushing
    monkeypatch.setattr("benchmarks.entries.timed", lambda device, work: (work(), next(seconds)))
    assert ring.run(entry) == 3.0 + 5.0 * 112 / 28


def test_too_much_memory_is_refused_with_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tiny", 1)
    monkeypatch.setattr("benchmarks.entries.available_memory", lambda device: 1000)
    entry = Ring(case, whole(case), 1.0, "cpu").enter(FuncHessian())
    assert entry.status == "skipped"
    assert "GiB" in entry.why


def test_a_cell_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes too long is stopped, the ones after it are not tried, and one round is run."""

    class Slow(Whole):
        name = "slow"
        summary = "sleeps"

        def matrix(self, case: Case) -> Tensor:
            time.sleep(30.0)
            return case.theta

    case = make("tiny", 1)
    plan = replace(PLAN, repeats=50, limit_seconds=1.0, budget_seconds=3.0)  # trials end after 0.8 * 3 - 1 s
    result = contest(case, whole(case), closed(case), [ReverseOverReverse(), Slow(), JvpOfGrad()], plan, QUIET)
    status = {row["name"]: (row["status"], row["why"]) for row in result["rows"][1:]}
    assert status["reverse over reverse"] == ("right", "")
    assert status["slow"][0] == status["vmap(jvp(grad))"][0] == "skipped"
    assert re.fullmatch(r"over budget: the trial took more than \d+ s", status["slow"][1])
    assert status["vmap(jvp(grad))"][1] == "over budget: the others have taken the cell's time"
    assert result["rounds"] >= 1
    plan = replace(plan, budget_seconds=1e-6)
    assert contest(case, whole(case), closed(case), [], plan, QUIET)["rounds"] == 1


def test_compiled_peer_pads_to_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compile_nothing(function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def run(theta: Tensor, V: Tensor) -> Tensor:
            seen.append(len(V))
            return function(theta, V)

        return run

    monkeypatch.setattr(torch, "compile", compile_nothing)
    case = make("tiny", 1)
    entry = Ring(case, whole(case), 1.0, "cpu").enter(Compiled(JvpOfGrad(), case, 24))
    assert (entry.status, entry.chunk, set(seen)) == ("right", 24, {24})


@pytest.mark.skipif(not installed("jax"), reason="jax is not installed")
def test_the_block_in_jax_is_the_block() -> None:
    for name in ("tiny-affine-x2", "tiny"):
        case = make(name, 2)
        columns = list(range(0, case.size, 7))
        torch.testing.assert_close(JaxHessian().matrix(case)[:, columns].T, plain_columns(case, columns), rtol=0, atol=1e-12)


# Every benchmark, on the smallest cell


def test_pair_is_the_block_of_the_dense_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suites.pair.contestants", lambda: [ReverseOverReverse(), FuncHessian()])
    cell = first_cell("pair")
    result = BENCHMARKS["pair"].run(cell, PLAN, QUIET)
    assert [row["status"] for row in result["rows"]] == ["right", "right"]
    assert result["rows"][0]["columns"] == 32
    assert "W_1 x W_2" in check_page("pair", cell, result)


def test_hvp_compares_hessian_and_gauss_newton() -> None:
    cell = first_cell("hvp", batch=2)
    result = hvp.run(cell, replace(PLAN, repeats=1), QUIET)
    status = {(row["quantity"], row["name"]): row["status"] for row in result["rows"]}
    assert {name[0] for name in status} == {"Hessian x 1", "Hessian x 16", "GGN x 1", "GGN x 16"}
    assert all(status[key] == "right" for key in status)
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
    assert by_name["trace", "hessiankit.curvature_diagonal"]["status"] == "right"
    assert by_name["trace", "Hutchinson"]["status"] == by_name["diagonal", "Hutchinson"]["status"] == "skipped"
    assert "1000000000 probes" in by_name["trace", "Hutchinson"]["why"]
    ways = {"slow": lambda: time.sleep(9.0) or torch.ones(()), "quick": lambda: torch.ones(())}
    slow, quick = scalars._race("trace", ways, None, 1e-8, replace(PLAN, repeats=1, limit_seconds=0.3))
    assert (slow["status"], slow["why"], slow["time"]) == ("skipped", "over budget: slow took more than 0 s", None)
    assert quick["status"] == "right"
    assert quick["time"] is not None


def test_scalars_take_a_later_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    def diagonal(module: nn.Module, inputs: Tensor, target: Tensor, *, loss: str) -> dict[str, Tensor]:
        found = hessian(module, inputs, target, loss=loss)
        return {name: found.block(name, name).diagonal().reshape(found.shapes[name]) for name in found.names}

    monkeypatch.setattr(scalars, "hook", lambda name: diagonal if name == "curvature_diagonal" else None)
    result = scalars.run(first_cell("scalars"), replace(PLAN, repeats=1), QUIET)
    assert [(r["name"], r["status"]) for r in result["rows"][:1]] == [("hessiankit.curvature_diagonal", "right")]


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
    result = memory.run(first_cell("memory", problem="L16d2048f8192"), replace(PLAN, limit_seconds=0.01), QUIET)
    assert {row["status"] for row in result["rows"]} == {"skipped"}
    why = {row["name"]: row["why"] for row in result["rows"]}
    assert "over budget" in why.pop("hessian_operator")
    assert all("forecast" in text for text in why.values())


def test_growth_fits_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "AXES", {"B": [(b, "L3d4f4", b) for b in (1, 2, 4)]})
    cell = first_cell("growth")
    result = growth.run(cell, replace(PLAN, repeats=1), QUIET)
    assert result["predicted"] == pytest.approx(1.0)
    assert math.isfinite(result["fitted"])
    assert "predicted" in check_page("growth", cell, result)
    skipped = growth.run(cell, replace(PLAN, limit_seconds=1e-9), QUIET)
    assert [len(skipped["points"]), len(skipped["skipped_points"])] == [1, 2]
    assert "skipped: forecast" in BENCHMARKS["growth"].table([record("growth", cell, skipped)])
    stopped = record("growth", cell, {"skipped": "over budget: stopped after 9 s"})
    assert "skipped: over budget" in BENCHMARKS["growth"].table([stopped])
    assert BENCHMARKS["growth"].plot([stopped]) is None


def test_growth_keeps_to_the_limit_of_the_whole_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "AXES", {"B": [(b, "L3d4f4", b) for b in (1, 2, 3, 4)]})
    clock = iter([0.0, 7.0, 9.5, 9.9])  # the start, and before each point but the first
    monkeypatch.setattr(growth.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(growth, "_seconds", lambda case, plan: [1.0])
    result = growth.run(first_cell("growth"), replace(PLAN, repeats=0, limit_seconds=10.0), QUIET)
    assert [point["x"] for point in result["points"]] == [1, 2]  # 7 and a forecast of 2 are not more than 10
    assert [point["x"] for point in result["skipped_points"]] == [3, 4]


def test_growth_is_drawn_over_the_same_heights_with_its_predicted_slopes() -> None:
    def of(axis: str, dtype: str, y: float) -> dict[str, Any]:
        points = [{"x": x, "operations": x**2.0, "time": {"median": y * x}} for x in (1, 2, 4)]
        cell = {"axis": axis, "dtype": dtype, "threads": 1}
        return record("growth", cell, {"points": points, "skipped_points": [], **growth._exponents(points)})

    records = [of("B", "float64", 1.0), of("B", "float32", 0.5), of("d", "float64", 9.0)]
    figure = growth.plot(records)
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert [len(axes.lines) for axes in (left, right)] == [3, 2]
    assert left.lines[0].get_color() == right.lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "float64, 1 thread",
        "float32, 1 thread",
        "predicted slope",
    ]
    assert left.get_xlabel().splitlines() == ["batch B", "predicted 2; last 3 points: 1.00, 1.00"]
    (x, y) = left.lines[-1].get_data()
    assert math.log(y[1] / y[0]) / math.log(x[1] / x[0]) == pytest.approx(2.0)


def test_growth_predicts_the_exponents_of_the_formula() -> None:
    points = {axis: [growth.AXES[axis][k] for k in (0, -1)] for axis in growth.AXES}
    found = {}
    for axis, ends in points.items():
        made = [{"x": x, "operations": parameters_of(name) ** 2 * batch * common.tokens_of(name)} for x, name, batch in ends]
        found[axis] = growth._exponents([{**p, "time": {"median": p["operations"]}} for p in made])["predicted"]
    assert found == pytest.approx({"B": 1.0, "L": 1.0, "d": 4.0, "layers": 2.0})


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
