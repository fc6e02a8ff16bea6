"""The dense Hessian: the closed form beside every route to it that torch, jax and the packages offer."""

from __future__ import annotations

from typing import Any

from benchmarks.charts import methods
from benchmarks.contest import contest, contestants
from benchmarks.entries import Part
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import GPT2
from benchmarks.suites.common import BLOCK_SIZES, beyond_memory, beyond_time, case_of, dense
from benchmarks.tables import NOTES, contest_tables


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    if skipped := beyond_memory(cell, plan) or beyond_time(cell, plan):
        return skipped
    case = case_of(cell, plan)
    every = slice(0, case.size)
    return contest(case, Part(every, every), lambda: dense(case), contestants(), plan, tell)


BENCHMARK = Benchmark(
    "dense",
    "The dense Hessian of a block and of a toy GPT-2, by closed form and by its peers.",
    lambda plan: plan.grid((*BLOCK_SIZES, *GPT2)),
    run,
    contest_tables,
    lambda records: methods(records, "Dense Hessian"),
    NOTES,
    title="The dense Hessian",
)
