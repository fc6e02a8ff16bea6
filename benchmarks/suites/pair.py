"""One block of the Hessian between two parameters: every method computes only its columns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import hessiankit
from benchmarks.charts import methods
from benchmarks.contest import contest, contestants
from benchmarks.entries import Part
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.suites.common import BLOCK_SIZES, case_of
from benchmarks.tables import NOTES, contest_tables

PAIRS = {"W_1 x W_2": ("feedforward.W_1", "feedforward.W_2"), "Q x V": ("attention.W_Q", "attention.W_V")}


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    rows, columns = PAIRS[cell["pair"]]
    case = case_of(cell, plan, (rows, columns))
    part = Part(case.slices[columns], case.slices[rows])

    def closed() -> Tensor:
        found = hessiankit.hessian(case.module, case.inputs, case.target, loss=case.loss, params=(rows, columns))
        return found.block(rows, columns)

    result = contest(case, part, closed, [p for p in contestants() if p.matrix is None], plan, tell)
    for row in result["rows"]:
        row["quantity"] = cell["pair"]
    return result


BENCHMARK = Benchmark(
    "pair",
    "One block of the Hessian: W_1 x W_2 (feed-forward) and Q x V (attention).",
    lambda plan: [{**cell, "pair": pair} for cell in plan.grid(BLOCK_SIZES) for pair in PAIRS],
    run,
    contest_tables,
    lambda records: methods(records, "One block of the Hessian"),
    NOTES + "\n- The closed form computes the Hessian of the two parameters, three blocks, of which one is kept.\n"
    "- P counts both parameters.",
    title="One block",
)
