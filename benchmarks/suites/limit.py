"""Distance from the machine's limit: the operations of the output over the rate of its matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.charts import methods
from benchmarks.counting import lift_operations
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import DTYPES
from benchmarks.suites.common import BLOCK_SIZES, beyond_memory, beyond_time, case_of, dense
from benchmarks.tables import CELL_HEADERS, cell_rows, markdown, short, with_range
from benchmarks.timing import several, spread, timed

SQUARE = 1024
WIDEST = 2048
"""Rows and columns of the product measured at the problem's size, at most."""


def gemm_rate(rows: int, inner: int, columns: int, dtype: str, device: str, repeats: int) -> float:
    """Return floating point operations a second of (rows x inner) (inner x columns), the best of some."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator).to(device, DTYPES[dtype])
    b = torch.randn(inner, columns, generator=generator).to(device, DTYPES[dtype])
    out = torch.empty(rows, columns, dtype=a.dtype, device=device)
    several(device, lambda: torch.mm(a, b, out=out))
    return 2.0 * rows * inner * columns / min(several(device, lambda: torch.mm(a, b, out=out)) for _ in range(max(2, repeats)))


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    if skipped := beyond_memory(cell, plan) or beyond_time(cell, plan):
        return skipped
    case = case_of(cell, plan)
    tell("rate of matrix products", 0, 2)
    widest = min(WIDEST, max(p.numel() for p in case.parameters.values()))
    square = gemm_rate(SQUARE, SQUARE, SQUARE, cell["dtype"], plan.device, plan.repeats)
    here = gemm_rate(widest, case.rows, widest, cell["dtype"], plan.device, plan.repeats)
    tell("dense Hessian", 1, 2)
    dense(case)
    seconds = [timed(plan.device, lambda: dense(case))[1] for _ in range(plan.repeats)]
    time = spread(seconds)
    assert time is not None
    operations = lift_operations(case.size, case.rows)
    return {
        "parameters": case.size,
        "operations": operations,
        "seconds": seconds,
        "time": time,
        "square_rate": square,
        "size_rate": here,
        "size_shape": [widest, case.rows, widest],
        "rate": operations / time["median"],
        "fraction": operations / time["median"] / square,
        "size_fraction": operations / time["median"] / here,
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        rates = [short(result[k] / 1e9) for k in ("rate", "square_rate", "size_rate")]
        fractions = [f"{100 * result[k]:.1f} %" for k in ("fraction", "size_fraction")]
        yield with_range(result["time"]), *rates, " x ".join(map(str, result["size_shape"])), *fractions

    headers = ["hessian (s)", "GFLOP/s", f"product {SQUARE}", "product at size", "its size", "of the first", "of the second"]
    return markdown([*CELL_HEADERS, *headers], cell_rows(records, rows, 6))


def plot(records: Sequence[dict[str, Any]]) -> Any:
    """Draw, a row a problem, the time of the dense Hessian and of bare matrix products with as many operations."""

    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        rates = {
            "closed form": "rate",
            f"torch.mm, {SQUARE} square": "square_rate",
            "torch.mm at the problem's size": "size_rate",
        }
        operations = result.get("operations", 0)
        timed_rows = {name: operations / result[rate] for name, rate in rates.items() if rate in result}
        return [{"name": name, "status": "right", "time": {"median": seconds}} for name, seconds in timed_rows.items()]

    timed_records = [{**record, "result": {"rows": rows(record["result"])}} for record in records]
    return methods(timed_records, "Dense Hessian and matrix products of as many operations")


BENCHMARK = Benchmark(
    "limit",
    "The rate at which the dense Hessian's operations are done, beside the measured rate of matrix products.",
    lambda plan: plan.grid(BLOCK_SIZES),
    run,
    table,
    plot,
    "- GFLOP/s: P^2 B L operations over the median time. This is the count for lifting the curvature to the weights with\n"
    "  symmetry used once (derived in `benchmarks/counting.py`).\n"
    f"- product: the measured rate of `torch.mm`, once for square matrices of size {SQUARE}, once at the sizes of this problem:\n"
    f"  (largest weight, at most {WIDEST}) x (tokens) x (the same).\n"
    "- The count is no proven lower bound: a fraction above 100 % would mean that the algorithm needs fewer operations.",
    title="Beside the rate of matrix products",
)
