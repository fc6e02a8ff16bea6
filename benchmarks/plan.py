"""The plan of a run: the options of the command line, and the description of a benchmark."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.problems import BATCHES
from hessiankit.support.progress import Tell

__all__ = ["Benchmark", "Cell", "Plan", "Tell", "source_digest"]

BUDGET = 6.0
LEAST_BUDGET = 600.0
"""Seconds that a cell may take in all by default, at least: ``torch.compile`` alone may take minutes."""
Cell: TypeAlias = dict[str, Any]
"""One point of a grid: the benchmark's own settings, such as problem, batch, dtype, threads."""


@dataclass(frozen=True)
class Plan:
    """Options of a run.

    Attributes:
        quick: The smallest grid that shows something.
        threads: Numbers of threads, each its own cells.
        dtypes: Names of dtypes, each its own cells.
        sizes: Problems to take; empty: the benchmark's own choice.
        batches: Batch sizes to take; empty: the benchmark's own choice.
        repeats: Timed rounds.
        limit_seconds: What the timed rounds of a cell may take; a peer that would take longer is extrapolated from some of
            its columns.
        budget_seconds: What a cell may take in all, trials and compiling included; then it is stopped, and skipped; 0 for
            the default, see ``budget``.
        compile: Whether ``torch.compile`` is tried.
        device: ``"cpu"`` or ``"cuda"``.
        clock: Clock of the contests on a CPU, of ``benchmarks.timing.CLOCKS``.
        methods: Methods to take, where each has cells of its own; empty: the benchmark's own choice.
        memory_gib: What a method may allocate at real sizes.
    """

    quick: bool = False
    threads: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] = ("float64",)
    sizes: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    repeats: int = 5
    limit_seconds: float = 120.0
    compile: bool = True
    device: str = "cpu"
    clock: str = "wall"
    budget_seconds: float = 0.0
    methods: tuple[str, ...] = ()
    memory_gib: float = 8.0

    @property
    def budget(self) -> float:
        """The seconds after which a cell is stopped.

        >>> Plan(limit_seconds=120.0).budget, Plan(limit_seconds=1.0).budget, Plan(budget_seconds=30.0).budget
        (720.0, 600.0, 30.0)
        """
        return self.budget_seconds or max(LEAST_BUDGET, BUDGET * self.limit_seconds)

    def settings(self) -> dict[str, Any]:
        """Return the options that a cell's result depends on, beside the cell itself."""
        return {name: getattr(self, name) for name in ("repeats", "limit_seconds", "compile", "device", "clock", "memory_gib")}

    def to_dict(self) -> dict[str, Any]:
        """Return all options as plain data."""
        return asdict(self)

    def grid(self, sizes: Sequence[str], batches: Sequence[int] = BATCHES) -> list[Cell]:
        """Return a cell for every size, batch, dtype and number of threads; with ``quick`` the first size, two batches."""
        chosen = self.sizes or (tuple(sizes[:1]) if self.quick else tuple(sizes))
        counts = self.batches or (tuple(batches[:2]) if self.quick else tuple(batches))
        return [
            {"problem": size, "batch": batch, "dtype": dtype, "threads": threads}
            for size in chosen
            for batch in counts
            for dtype in self.dtypes
            for threads in self.threads
        ]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of the suite.

    Attributes:
        name: What the command line calls it.
        summary: One line.
        cells: The grid for a plan.
        run: Measures one cell and returns plain data.
        table: Markdown of the finished records.
        plot: A figure of them; None where there is nothing to draw.
        notes: How to read the table, as Markdown.
        isolate: Whether a cell gets a process of its own (memory makes its own processes).
        title: Its heading on a page of several.
    """

    name: str
    summary: str
    cells: Callable[[Plan], list[Cell]]
    run: Callable[[Cell, Plan, Tell], dict[str, Any]]
    table: Callable[[list[dict[str, Any]]], str]
    plot: Callable[[list[dict[str, Any]]], Any]
    notes: str = ""
    isolate: bool = field(default=True)
    title: str = ""


SHOWS_ONLY = ("__init__.py", "__main__.py", "runner.py", "store.py", "tables.py", "charts.py", "report.py")
"""Files of the benchmarks that do not change what is measured."""


def source_digest() -> str:
    """Return a digest of the code that is measured: a cell measured with other code is measured again."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("hessiankit", "derivations", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            if folder == "benchmarks" and path.name in SHOWS_ONLY:
                continue
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
