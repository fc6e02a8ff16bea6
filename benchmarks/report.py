"""Measured figures written into a page of prose, between marks.

A page holds, for every benchmark that it shows, a pair of marks; what is between them is replaced, and the rest is left:

    <!-- benchmark dense -->
    <!-- /benchmark dense -->

A part is one table and a plot. The commands, the long table and how to read them are a file beside the page, ``PAGE_dense.md``.

Benchmarks that were measured and have no marks in the page come at its end. A page with the marks of a ``summary`` gets the
one small table of that name, and nothing that it has no marks for.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan import Benchmark
from benchmarks.store import finished
from benchmarks.summary import summary
from benchmarks.tables import DETAILS, place
from hessiankit.curvature.plot_frame import write_picture
from hessiankit.support.files import fill, write_text

Record = dict[str, Any]
HEAD = "# Speed and memory\n"
SUMMARY = "benchmark summary"
PICTURED = 3
"""Cells from which on a benchmark has a plot; of fewer the table says as much."""


def newest(records: Sequence[Record]) -> list[Record]:
    """Return the last record of every cell, without those of quick runs, in the order in which cells came first.

    >>> a, b = ({"cell": {"batch": 1}, "settings": {"quick": False}, "result": n} for n in (1, 2))
    >>> newest([a, b]) == [b]
    True
    """
    last: dict[str, Record] = {}
    for record in records:
        if not record["settings"].get("quick"):
            last[json.dumps(record["cell"], sort_keys=True)] = record
    return list(last.values())


def command(name: str, records: Sequence[Record]) -> str:
    """Return what measures the cells of some records, in one call for each set of options.

    >>> cell = {"problem": "small", "batch": 1, "dtype": "float64", "threads": 1}
    >>> command("dense", [{"cell": cell, "settings": {"repeats": 3, "limit_seconds": 20.0}}])
    'python -m benchmarks dense --sizes small --batches 1 --dtype float64 --threads 1 --repeats 3 --limit-seconds 20'
    """
    options = {"problem": "--sizes", "method": "--methods", "batch": "--batches", "dtype": "--dtype", "threads": "--threads"}
    lines: dict[str, list[Record]] = {}
    for record in records:
        settings = record["settings"]
        rest = [f"--repeats {settings['repeats']}", f"--limit-seconds {settings['limit_seconds']:g}"]
        rest += ["--no-compile"] if settings.get("compile") is False else []
        rest += [f"--device {settings['device']}"] if settings.get("device", "cpu") != "cpu" else []
        rest += [f"--memory-gib {gib:g}"] if (gib := settings.get("memory_gib", 8.0)) != 8.0 else []
        lines.setdefault(" ".join(rest), []).append(record)
    found = []
    for rest_text, group in lines.items():
        chosen = []
        for key, option in options.items():
            values = dict.fromkeys(str(record["cell"][key]) for record in group if key in record["cell"])
            chosen += [f"{option} {' '.join(values)}"] if values else []
        found.append(" ".join(["python -m benchmarks", name, *chosen, rest_text]))
    return "\n".join(found)


def section(benchmark: Benchmark, records: Sequence[Record], plot: str | None, details: str) -> str:
    """Return one benchmark's part of the page: where it was measured, its short table, and a link to the details."""
    short, _, long = benchmark.table(list(records)).partition(DETAILS)
    places = dict.fromkeys(place(record["environment"]) for record in records)
    parts = [f"## {benchmark.title}", benchmark.summary, *places, short.strip()]
    parts += [f"![{benchmark.name}]({plot})"] if plot is not None else []
    return "\n\n".join([*parts, f"[How to read this, {'all methods, ' if long else ''}the commands]({details})."])


def detail_page(benchmark: Benchmark, records: Sequence[Record]) -> str:
    """Return the page beside: how the numbers are read, the commands, every method."""
    _, heading, long = benchmark.table(list(records)).partition(DETAILS)
    parts = [f"# {benchmark.title}: details", benchmark.summary, benchmark.notes]
    parts.append("\n".join(["```bash", wrapped(command(benchmark.name, records)), "```"]))
    return "\n\n".join([*parts, *([heading + long.rstrip()] if long else [])]) + "\n"


def wrapped(commands: str) -> str:
    """Return commands with lines of at most 88 characters, continued by a backslash."""
    how: dict[str, Any] = {"width": 86, "subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(" \\\n".join(textwrap.wrap(line, **how)) for line in commands.splitlines())


def write(path: Path, results: Path, benchmarks: Mapping[str, Benchmark], say: Callable[[str], None]) -> int:
    """Write all that was measured into a page, with the plots beside it; return the number of benchmarks.

    Args:
        path: The page, which is made if there is none.
        results: The folder with ``NAME.jsonl`` of each benchmark.
        benchmarks: What there is, by name.
        say: Called with a line for each benchmark.
    """
    sections: dict[str, str] = {}
    page = path.read_text(encoding="utf-8") if path.exists() else HEAD
    brief = f"<!-- {SUMMARY} -->" in page
    for name, benchmark in benchmarks.items():
        mark = f"benchmark {name}"
        records = newest(finished(results / f"{name}.jsonl"))
        if records and brief and name == "dense":
            sections[SUMMARY] = f"\n{summary(records)}\n"
        if not records or (brief and f"<!-- {mark} -->" not in page):
            continue
        sources = {record["settings"].get("source") for record in records}
        say(f"{name}: {len(records)} cells" + (f", of {len(sources)} versions of the code" if len(sources) > 1 else ""))
        figure = benchmark.plot(records) if len(records) >= PICTURED else None
        plot = path.with_name(f"benchmarks_{name}.png")
        if figure is not None:
            write_picture("benchmarks", figure, plot)
        details = path.with_name(f"{path.stem}_{name}.md")
        write_text("benchmarks", details, detail_page(benchmark, records))
        sections[mark] = section(benchmark, records, None if figure is None else plot.name, details.name)
    if sections:
        write_text("benchmarks", path, fill(page, sections))
    return len(sections)
