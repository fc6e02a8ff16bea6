"""Cost of the comparison with the module's own gradient: results with it and without it, beside one gradient of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.charts import methods
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import Case, parameters_of
from benchmarks.suites.common import case_of
from benchmarks.tables import CELL_HEADERS, cell_rows, in_brief, ratio_text, time_text
from benchmarks.timing import all_rounds, rounds_within, spread, timed
from hessiankit import check, hessian, hessian_operator

DENSE = 3000
"""Parameters beyond which only products are timed, since P x P would hide what one gradient costs."""


def _gradient(case: Case) -> None:
    value = (case.module(case.inputs) - case.target).square().mean()
    torch.autograd.grad(value, list(case.module.parameters()))


def _work(case: Case) -> dict[str, Callable[[], Any]]:
    def call(function: Callable[..., Any], **options: Any) -> Callable[[], Any]:
        return lambda: function(case.module, case.inputs, case.target, loss=case.loss, **options)

    work: dict[str, Callable[[], Any]] = {"one gradient": lambda: _gradient(case)}
    if parameters_of(case.name) <= DENSE:
        work |= {"hessian": call(hessian), "hessian, without": call(hessian, handshake=False)}
    work |= {"hessian_operator": call(hessian_operator), "hessian_operator, without": call(hessian_operator, handshake=False)}
    if parameters_of(case.name) <= DENSE // 4:
        work["check"] = call(check, dtype=None)
    return work


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    """Time every way in turn; the share is what the handshake adds, of the whole."""
    work = _work(case_of(cell, plan))
    once = sum(timed(plan.device, way)[1] for way in work.values())
    calls = {name: lambda _, way=way: timed(plan.device, way)[1] for name, way in work.items()}  # type: ignore[misc]
    seconds = all_rounds(calls, max(1, rounds_within(plan.limit_seconds, once, 4 * plan.repeats)))
    rows: list[dict[str, Any]] = []
    for name, found in seconds.items():
        ratio = spread([a / b for a, b in zip(found, seconds["one gradient"], strict=True)])
        without = seconds.get(f"{name}, without")
        share = None if without is None else spread([1 - b / a for a, b in zip(found, without, strict=True)])
        rows.append({"name": name, "status": "right", "time": spread(found), "ratio": ratio, "share": share})
    return {"rows": rows, "parameters": parameters_of(cell["problem"])}


def table(records: list[dict[str, Any]]) -> str:
    """Return the times, in units of one gradient too, and the shares."""

    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            share = "" if row["share"] is None else f"{100 * row['share']['median']:.0f} %"
            yield row["name"], time_text(row), ratio_text(row), share

    headers = [*CELL_HEADERS, "what", "time", "of one gradient", "share of the handshake"]
    return in_brief(headers, cell_rows(records, rows, 3), lambda row: bool(row[-1]), text=5)


BENCHMARK = Benchmark(
    "handshake",
    "What the comparison with the module's own loss and gradient adds to a Hessian and an operator.",
    lambda plan: plan.grid(("small", "paper-mnist", "large"), (1, 8)),
    run,
    table,
    lambda records: methods(records, "With and without the handshake", compared=False),
    "- *without*: `handshake=False`. The module itself is called once either way, to check arguments; the handshake adds the\n"
    "  backward and the comparison.\n"
    "- `check` compares loss and gradient as rows of its report, without a separate handshake; it is listed for scale.",
    title="The handshake",
)
