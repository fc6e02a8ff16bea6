"""How the time of the dense Hessian grows: exponents in batch, tokens, width and layers, fitted and predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.charts import lines
from benchmarks.counting import exponent, lift_operations
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import Case, make, parameters_of, tokens_of
from benchmarks.suites.common import dense
from benchmarks.tables import markdown, short
from benchmarks.timing import spread, timed

AXES: dict[str, list[tuple[int, str, int]]] = {
    "B": [(b, "L16d8f32", b) for b in (2, 4, 8, 16, 32, 64, 128)],
    "L": [(n, f"L{n}d8f32", 4) for n in (8, 16, 32, 64, 128)],
    "d": [(d, f"L16d{d}f{4 * d}", 4) for d in (4, 8, 16, 24, 32)],
    "layers": [(n, f"L16d8f32-x{n}", 4) for n in (1, 2, 3, 4, 6)],
}
"""Axis -> (its value, the problem, the batch)."""
TAIL = 3


def cells(plan: Plan) -> list[Cell]:
    return [
        {"axis": axis, "dtype": dtype, "threads": threads} for axis in AXES for dtype in plan.dtypes for threads in plan.threads
    ]


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    asked = AXES[cell["axis"]][: 3 if plan.quick else None]
    for k, (x, problem, batch) in enumerate(asked):
        tell(f"{cell['axis']} = {x}", k, len(asked))
        size = parameters_of(problem)
        operations = lift_operations(size, batch * tokens_of(problem))
        if points:
            forecast = points[-1]["time"]["median"] * operations / points[-1]["operations"]
            if forecast * (plan.repeats + 1) > plan.limit_seconds:
                skipped.append({"x": x, "forecast_seconds": forecast})
                continue
        seconds = _seconds(make(problem, batch, cell["dtype"], plan.device), plan)
        points.append({"x": x, "parameters": size, "operations": operations, "seconds": seconds, "time": spread(seconds)})
    return {"points": points, "skipped_points": skipped, **_exponents(points)}


def _seconds(case: Case, plan: Plan) -> list[float]:
    dense(case)
    return [timed(plan.device, lambda: dense(case))[1] for _ in range(plan.repeats)]


def _exponents(points: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    if len(points) < 2:
        return {"fitted": None, "tail": None, "predicted": None}
    x, y = [p["x"] for p in points], [p["time"]["median"] for p in points]
    first, last = points[-min(TAIL, len(points))], points[-1]
    return {
        "fitted": exponent(x, y),
        "tail": exponent(x[-TAIL:], y[-TAIL:]),
        "predicted": math.log(last["operations"] / first["operations"]) / math.log(last["x"] / first["x"]),
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        cell, result = record["cell"], record["result"]
        times = ", ".join(f"{p['x']}: {short(p['time']['median'])}" for p in result["points"])
        times += "".join(f"; {p['x']} skipped: forecast {short(p['forecast_seconds'])} s" for p in result["skipped_points"])
        values = [short(result[k]) for k in ("fitted", "tail", "predicted")]
        rows.append([cell["axis"], cell["dtype"], str(cell["threads"]), *values, times])
    return markdown(["axis", "dtype", "threads", "fitted", f"fitted, last {TAIL}", "predicted", "median seconds"], rows)


def plot(records: Sequence[dict[str, Any]]) -> Any:
    panels = []
    for axis in dict.fromkeys(record["cell"]["axis"] for record in records):
        curves = []
        for record in records:
            points, cell = record["result"]["points"], record["cell"]
            if cell["axis"] == axis and points:
                slope = record["result"]["tail"]
                name = f"{cell['dtype']}, {cell['threads']} thr." + ("" if slope is None else f": {slope:.2f}")
                curves.append((name, [p["x"] for p in points], [p["time"]["median"] for p in points]))
        if curves:
            panels.append((axis, curves))
    return lines(panels, "Time of the dense Hessian")


BENCHMARK = Benchmark(
    "growth",
    "Exponents of the dense Hessian's time in batch, tokens, width (d_ff = 4 d) and layers, beside the predicted ones.",
    cells,
    run,
    table,
    plot,
    "- fitted: slope of log seconds over log x by least squares, over all points and over the largest.\n"
    "- predicted: the slope of P^2 B L over the largest points (see `benchmarks/counting.py`): 1 in B and L, 4 in d,\n"
    "  2 in layers. Small problems stay below it, because tracing costs the same for all of them.",
)
