"""The dense Hessian beside its peers as one small table, for a page that has room for no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tables import markdown, short

Record = dict[str, Any]
Row = dict[str, Any]


SHOWN = (("small", 1), ("paper-mnist-affine", 1), ("paper-mnist-x2", 1), ("medium", 8), ("gpt2-untied", 1))
"""The problem and batch of each line: the smallest, one on which some methods are wrong, two blocks, the largest that repeats in
a minute, and a GPT-2."""

COLUMNS: dict[str, Callable[[str], bool]] = {
    "`torch.func.hessian`": lambda name: name == "torch.func.hessian",
    "curvlinops": lambda name: name == "curvlinops",
    "best right": lambda name: True,
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
    first = fastest(found)
    if first is not None:
        ratio = first["ratio"]["median"]
        return f"{ratio:.1f} x" if ratio < 10 else f"{ratio:.0f} x"
    if any(row["status"] == "wrong" for row in found):
        return "wrong"
    return "too large" if any(row["status"] == "skipped" for row in found) else ""


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row of the least median time among the right methods, or None."""
    right = [row for row in rows if row["status"] == "right" and row.get("time")]
    return min(right, key=lambda row: row["time"]["median"], default=None)


def _time(row: Row) -> str:
    seconds = row["time"]["median"]
    return f"{short(1e3 * seconds)} ms" if seconds < 1 else f"{short(seconds)} s"


def summary(records: Sequence[Record]) -> str:
    """Return a line for each of ``SHOWN``, float64, one thread: our time, how many times longer others take, the fastest of them.

    Args:
        records: Finished cells of the benchmark ``dense``, the newest of each.
    """
    lines, cells = [], {tuple(record["cell"][k] for k in ("problem", "batch", "dtype", "threads")): record for record in records}
    for problem, batch in SHOWN:
        record = cells.get((problem, batch, "float64", 1))
        if record is None or "skipped" in record["result"]:
            continue
        cell, result = record["cell"], record["result"]
        mine, *rest = result["rows"]
        others = [row for row in rest if not row.get("ours")]
        head = [str(cell["problem"]), str(result["parameters"]), str(cell["batch"]), _time(mine)]
        lines.append([*head, *(entry(others, chosen) for chosen in COLUMNS.values()), (fastest(others) or {"name": ""})["name"]])
    return markdown(["problem", "P", "batch", "hessiankit", *COLUMNS, "which"], lines)
