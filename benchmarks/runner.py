"""One benchmark from its grid to its files: cells measured or found finished, tables and plot written after each."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.fresh import OverBudget, run_fresh
from benchmarks.plan import Benchmark, Cell, Plan, Tell, source_digest
from benchmarks.store import Store
from benchmarks.tables import document
from hessiankit.curvature.plot_frame import write_picture
from hessiankit.support.environment import environment
from hessiankit.support.files import write_json, write_text
from hessiankit.support.progress import progress_bar


@dataclass
class Outcome:
    """Result of a benchmark: its records in the order of the grid, the number found finished, and the failures."""

    records: list[dict[str, Any]] = field(default_factory=list)
    found: int = 0
    failed: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def doubtful(self) -> list[str]:
        """Cells whose closed form was not confirmed, and cells that failed."""
        ours = [(record["cell"], row) for record in self.records for row in record["result"].get("rows", [])[:1]]
        return [_name(cell) for cell, row in ours if row["status"] in ("wrong", "failed") and row.get("ours", True)] + self.failed


def measure(benchmark: Benchmark, plan: Plan, out: Path, *, isolate: bool) -> Outcome:
    """Measure every cell of a benchmark that is not finished already; write the files; print the table."""
    where = {
        **environment(),
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "jax": _version("jax"),
        "hessian-eigenthings": _version("hessian-eigenthings"),
    }
    versions = ("python", "torch", "numpy", "curvlinops", "jax", "hessian-eigenthings", "processor", "device")
    settings = {**plan.settings(), "quick": plan.quick, "source": source_digest(), **{k: where[k] for k in versions}}
    store, outcome = Store(out / f"{benchmark.name}.jsonl", settings), Outcome()
    cells = benchmark.cells(plan)
    try:
        with progress_bar() as tell:
            for k, cell in enumerate(cells):
                record = store.find(cell, plan.budget)
                if record is not None:
                    outcome.found += 1
                    outcome.records.append(record)
                    continue
                title = f"{benchmark.name} {k + 1}/{len(cells)}, {_name(cell)}"
                tell(title, 0, 1)
                start = time.perf_counter()
                try:
                    result = _one(benchmark, cell, plan, isolate, lambda what, d, n, t=title: tell(f"{t}: {what}", d, n))  # type: ignore[misc]
                except OverBudget as error:
                    result = {"skipped": f"over budget: {error}", "stopped_seconds": plan.budget}
                except RuntimeError as error:  # of the cell's process; the others go on, and the next start tries again
                    outcome.failed.append(f"{_name(cell)}: {error}")
                    print(f"benchmarks: {benchmark.name}, {_name(cell)} failed: {error}", file=sys.stderr)
                    continue
                result["cell_seconds"] = round(time.perf_counter() - start, 1)
                outcome.records.append(store.add(cell, result, {**where, "threads": cell["threads"]}))
                if not sys.stderr.isatty():  # a log has no bar
                    print(f"{title}: {result['cell_seconds']} s", file=sys.stderr, flush=True)
                _write(benchmark, plan, where, outcome, out, last=False)
    except KeyboardInterrupt:
        outcome.interrupted = True
    print(_write(benchmark, plan, where, outcome, out, last=True))
    _report(benchmark, outcome, len(cells), out)
    return outcome


def _one(benchmark: Benchmark, cell: Cell, plan: Plan, isolate: bool, tell: Tell) -> dict[str, Any]:
    if not isolate or not benchmark.isolate:
        torch.set_num_threads(cell["threads"])
        return benchmark.run(cell, plan, tell)
    arguments = {"name": benchmark.name, "cell": cell, "options": plan.to_dict()}
    return run_fresh("benchmarks.runner:run_cell", arguments, threads=cell["threads"], seconds=plan.budget, tell=tell)


def run_cell(name: str, cell: Cell, options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure one cell, in the process that was made for it."""
    from benchmarks.suites import BENCHMARKS

    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    plan = Plan(**given)
    return BENCHMARKS[name].run(cell, plan, tell)


def _write(benchmark: Benchmark, plan: Plan, where: dict[str, Any], outcome: Outcome, out: Path, *, last: bool) -> str:
    """Write JSON and Markdown of the records so far, and at last the plot; return the Markdown."""
    content = {
        "benchmark": benchmark.name,
        "complete": last and not outcome.interrupted and not outcome.failed,
        "failed": outcome.failed,
        "plan": plan.to_dict(),
        "environment": where,
        "records": outcome.records,
    }
    write_json("benchmarks", out / f"{benchmark.name}.json", content)
    figure = benchmark.plot(outcome.records) if outcome.records and last else None
    plot = f"{benchmark.name}.png" if figure is not None else None
    if figure is not None:
        write_picture("benchmarks", figure, out / f"{benchmark.name}.png")
    body = benchmark.table(outcome.records) if outcome.records else "Nothing was measured."
    text = document(benchmark.name, benchmark.summary, body, benchmark.notes, outcome.records, plot)
    write_text("benchmarks", out / f"{benchmark.name}.md", text)
    return text


def _report(benchmark: Benchmark, outcome: Outcome, count: int, out: Path) -> None:
    new = len(outcome.records) - outcome.found
    print(
        f"{benchmark.name}: {new} of {count} cells measured, {outcome.found} found finished, {len(outcome.failed)} failed; "
        f"wrote {out / benchmark.name}.md, .json, .jsonl and, where there is something to draw, .png",
        file=sys.stderr,
    )
    if outcome.interrupted:
        print("benchmarks: interrupted; the same command continues with the cells that are left", file=sys.stderr)
    for line in outcome.doubtful:
        print(f"benchmarks: not confirmed: {line}", file=sys.stderr)


def _name(cell: Cell) -> str:
    return " ".join(f"{key}={value}" for key, value in cell.items())


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
