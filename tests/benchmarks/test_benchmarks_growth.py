"""The benchmark of growth: exponents fitted and predicted, limits, and the picture."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmark_cases import PLAN, QUIET, check_page, first_cell, record

from benchmarks.problems import parameters_of
from benchmarks.suites import BENCHMARKS, common, growth


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


def test_growth_predicts_the_exponents_of_the_formula() -> None:
    points = {axis: [growth.AXES[axis][k] for k in (0, -1)] for axis in growth.AXES}
    found = {}
    for axis, ends in points.items():
        made = [{"x": x, "operations": parameters_of(name) ** 2 * batch * common.tokens_of(name)} for x, name, batch in ends]
        found[axis] = growth._exponents([{**p, "time": {"median": p["operations"]}} for p in made])["predicted"]
    assert found == pytest.approx({"B": 1.0, "L": 1.0, "d": 4.0, "layers": 2.0})
