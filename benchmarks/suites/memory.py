"""Peak memory, each method in a fresh process: the highest resident size less the one after imports and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.charts import methods
from benchmarks.entries import MEMORY_SHARE
from benchmarks.fresh import OverBudget, run_fresh
from benchmarks.packaged import CURVLINOPS, installed
from benchmarks.peers import FUNC_HESSIAN, REVERSE, Peer
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import DTYPES, Case, make, parameters_of
from benchmarks.residence import Memory
from benchmarks.routes.torch_routes import ROUTES
from benchmarks.suites.common import BLOCK_SIZES, case_of, dense
from benchmarks.tables import CELL_HEADERS, cell_rows, markdown, mebibytes, short
from hessiankit import hessian_operator
from hessiankit.support.memory import available_memory
from hessiankit.verify.reference_base import bytes_per_direction

CHUNK = 16
OURS = ("hessian", "hessian_operator")


def _columns(peer: Peer) -> Callable[[Case], Tensor]:
    def run(case: Case) -> Tensor:
        push, out = peer.products(case), case.theta.new_empty(case.size, case.size)
        for start in range(0, case.size, CHUNK):
            units = case.theta.new_zeros(min(CHUNK, case.size - start), case.size)
            units[:, start:].fill_diagonal_(1.0)
            out[start : start + CHUNK] = push(units)
        return out

    return run


def _operator(case: Case) -> Tensor:
    operator = hessian_operator(case.module, case.inputs, case.target, loss=case.loss)
    return operator @ case.theta.new_ones(case.size, CHUNK)


WORK: dict[str, Callable[[Case], Tensor]] = {
    OURS[0]: dense,
    OURS[1]: _operator,
    REVERSE.name: _columns(REVERSE),
    FUNC_HESSIAN.name: lambda case: ROUTES["torch.func.hessian"].matrix(case.flat_loss, case.theta),
    CURVLINOPS.name: _columns(CURVLINOPS),
}
MATRIX = {name for name in WORK if name != "hessian_operator"}


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    size = parameters_of(cell["problem"])
    matrix = size**2 * DTYPES[cell["dtype"]].itemsize
    rows: list[dict[str, Any]] = []
    free = MEMORY_SHARE * available_memory(torch.device(plan.device))
    for k, name in enumerate(WORK):
        tell(name, k, len(WORK))
        row: dict[str, Any] = {"name": name, "status": "right", "why": "", "error": None, "bytes": None, "time": None}
        rows.append(row)
        if name == "curvlinops" and not installed("curvlinops"):
            row.update(status="missing", why="curvlinops is not installed")
            continue
        need = 2 * matrix if name in MATRIX else 0
        if name not in OURS and need <= free:
            one = case_of({**cell, "batch": 1}, plan)
            need += bytes_per_direction(one.flat_loss, one.theta) * cell["batch"] * (size if name == FUNC_HESSIAN.name else CHUNK)
        if need > free:
            row.update(status="skipped", why=f"forecast {need / 2**30:.1f} GiB", forecast_bytes=need)
            continue
        arguments = {**{key: cell[key] for key in ("problem", "batch", "dtype")}, "device": plan.device, "method": name}
        try:
            found = run_fresh(
                "benchmarks.suites.memory:peak",
                arguments,
                threads=cell["threads"],
                seconds=plan.limit_seconds,
                tell=lambda *_: None,
            )
            row.update(found)
        except OverBudget as error:
            row.update(status="skipped", why=f"over budget: {error}")
        except RuntimeError as error:
            row.update(status="failed", why=str(error))
    own = rows[0]["bytes"]
    for row in rows[1:]:
        if row["bytes"] is not None and own:
            row["times_ours"] = row["bytes"] / own
    return {"parameters": size, "rows": rows, "matrix_bytes": matrix}


def peak(problem: str, batch: int, dtype: str, device: str, method: str, tell: Tell) -> dict[str, Any]:
    """Run one method once and return the bytes by which memory rose at its highest. For a process of its own."""
    work = WORK[method]
    work(make("tiny", 1, dtype, device))  # imports what is imported late, and starts the threads
    case = make(problem, batch, dtype, device)
    memory = Memory(device)
    _, taken = memory.peak(lambda: work(case))
    return {"bytes": taken, "baseline_bytes": memory.before, "how": memory.how}


def table(records: Sequence[dict[str, Any]]) -> str:
    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            outcome = mebibytes(row["bytes"]) if row["bytes"] is not None else f"{row['status']}: {row['why']}"
            yield row["name"], outcome, short(row.get("times_ours")), mebibytes(result["matrix_bytes"])

    return markdown([*CELL_HEADERS, "method", "peak (MiB)", "of hessian's", "P x P (MiB)"], cell_rows(records, rows, 3))


BENCHMARK = Benchmark(
    "memory",
    "Peak memory of the dense Hessian and of the operator beside three other methods, each in a fresh process.",
    lambda plan: plan.grid((*BLOCK_SIZES, "large", "gpt2-untied")),
    run,
    table,
    lambda records: methods(records, "Peak memory", ("MiB", lambda row: row["bytes"] / 2**20 if row["bytes"] else None)),
    "- peak: highest resident size less that after imports, inputs and a run on the smallest problem. It includes the result,\n"
    f"  a P x P matrix, or for `hessian_operator` the operator and its product with {CHUNK} vectors.\n"
    f"- `reverse over reverse` and `curvlinops` push {CHUNK} directions together.\n"
    "- Below a few MiB the numbers are the allocator's, not the method's.",
    isolate=False,
    title="Memory",
)
