"""The dense Hessian beside its peers as one small table, for a page that has room for no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.contest import PLAIN
from benchmarks.tables import markdown, short

Record = dict[str, Any]
Row = dict[str, Any]


def _compiled(name: str) -> bool:
    return name.startswith("compiled ")


def _jax(name: str) -> bool:
    return name.startswith("jax")


COLUMNS: dict[str, Callable[[str], bool]] = {
    "`torch.func.hessian`": lambda name: name == "torch.func.hessian",
    "curvlinops": lambda name: name == "curvlinops",
    "best of torch": lambda name: not _jax(name) and not _compiled(name) and name != "curvlinops",
    "best compiled": _compiled,
    "best of jax": _jax,
}
"""Which methods a column takes the fastest of."""


def entry(rows: Sequence[Row], chosen: Callable[[str], bool]) -> str:
    """Return the ratio of the fastest right method among those chosen; without one, why there is none.

    >>> ratio = {"median": 12.34, "low": 12.0, "high": 13.0}
    >>> row = {"name": "a", "status": "right", "time": {"median": 2.0}, "ratio": ratio}
    >>> entry([row, {"name": "b", "status": "wrong"}], lambda name: name == "a")
    '12 x'
    >>> entry([{"name": "b", "status": "wrong"}], lambda name: True), entry([], lambda name: True)
    ('wrong', '')
    """
    found = [row for row in rows if chosen(row["name"])]
    right = [row for row in found if row["status"] == "right" and row.get("time")]
    if right:
        first = min(right, key=lambda row: row["time"]["median"])
        ratio = first["ratio"]["median"]
        return f"{ratio:.1f} x" if ratio < 10 else f"{ratio:.0f} x"
    if any(row["status"] == "wrong" for row in found):
        return "wrong"
    return "too large" if any(row["status"] == "skipped" for row in found) else ""


def _time(row: Row) -> str:
    seconds = row["time"]["median"]
    return f"{short(1e3 * seconds)} ms" if seconds < 1 else f"{short(seconds)} s"


def summary(records: Sequence[Record]) -> str:
    """Return one line a cell of the dense benchmark in float64 on one thread: our seconds, and how many times longer others take.

    Args:
        records: Finished cells of the benchmark ``dense``, the newest of each.
    """
    lines = []
    for record in records:
        cell, result = record["cell"], record["result"]
        if (cell["dtype"], cell["threads"]) != ("float64", 1) or "skipped" in result:
            continue
        mine, *rest = result["rows"]
        others = [row for row in rest if not row.get("ours")]
        without = next((_time(row) for row in rest if row["name"] == PLAIN), "")
        head = [str(cell["problem"]), str(result["parameters"]), str(cell["batch"]), _time(mine), without]
        lines.append([*head, *(entry(others, chosen) for chosen in COLUMNS.values())])
    return markdown(["problem", "P", "batch", "hessiankit", "without kernels", *COLUMNS], lines)
