"""Growth of the dense Hessian's time: exponents in batch, tokens, width and layers, fitted and predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.charts import label, methods
from benchmarks.counting import exponent, lift_operations
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import Case, make, parameters_of, tokens_of
from benchmarks.suites.common import dense
from benchmarks.tables import cell_rows, markdown, short
from benchmarks.timing import spread, timed

NAMES = {"B": "batch B", "L": "tokens L", "d": "width d (d_ff = 4 d)", "layers": "layers"}
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
    chosen, start = AXES[cell["axis"]][: 3 if plan.quick else None], time.perf_counter()
    for k, (x, problem, batch) in enumerate(chosen):
        tell(f"{cell['axis']} = {x}", k, len(chosen))
        size = parameters_of(problem)
        operations = lift_operations(size, batch * tokens_of(problem))
        if points:
            forecast = points[-1]["time"]["median"] * operations / points[-1]["operations"]
            if time.perf_counter() - start + forecast * (plan.repeats + 1) > plan.limit_seconds:
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
    def names(record: dict[str, Any]) -> list[str]:
        cell = record["cell"]
        return [NAMES[cell["axis"]], cell["dtype"], str(cell["threads"])]

    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        times = ", ".join(f"{p['x']}: {short(p['time']['median'])}" for p in result["points"])
        times += "".join(f"; {p['x']} skipped: forecast {short(p['forecast_seconds'])} s" for p in result["skipped_points"])
        yield *(short(result[k]) for k in ("fitted", "tail", "predicted")), times

    headers = ["axis", "dtype", "threads", "fitted", f"fitted, last {TAIL}", "predicted", "median seconds at each value"]
    return markdown(headers, cell_rows(records, rows, 3, names))


def plot(records: Sequence[dict[str, Any]]) -> Any:
    """Draw the fitted exponents beside the predicted one, a row an axis; no other method was measured."""
    named = {"fitted": "fitted to all points", "tail": f"fitted to the last {TAIL}", "predicted": "predicted, of P^2 B L"}

    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"name": text, "status": "right", "exponent": result.get(key)} for key, text in named.items()]

    def name(record: dict[str, Any]) -> str:
        return label({"cell": {**record["cell"], "problem": NAMES[record["cell"]["axis"]]}})

    fitted = [{**record, "result": {"rows": rows(record["result"])}} for record in records]
    exponent_of = ("exponent of the time", lambda row: row["exponent"])
    return methods(fitted, "How the dense Hessian's time grows", exponent_of, compared=False, name=name)


BENCHMARK = Benchmark(
    "growth",
    "Exponents of the dense Hessian's time in batch, tokens, width (d_ff = 4 d) and layers, beside the predicted ones.",
    cells,
    run,
    table,
    plot,
    "- fitted: slope of log seconds over log x by least squares, over all points and over the largest three.\n"
    "- predicted: the slope of P^2 B L over the largest points (see `benchmarks/counting.py`): 1 in B and L, 4 in d,\n"
    "  2 in layers. Small problems have smaller slopes, because tracing costs the same for all of them.",
    title="How the time grows",
)
