"""Finished cells as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Record = dict[str, Any]

DETAILS = "## All methods"
"""What parts the short table of a benchmark from the long one."""
SETTINGS = ("B", "dtype", "threads")
CELL_HEADERS = ("problem", "P", *SETTINGS)
NOTES = (
    "- time: median of the rounds, quartiles in brackets. `~` marks a time that is extrapolated linearly from the number of\n"
    "  columns that it names.\n"
    "- ratio: time of the method over that of the closed form in the same round, median and quartiles; above 1 the closed\n"
    "  form is faster. A method that does not return the Hessian has no ratio: *wrong by* is its largest difference from\n"
    "  `torch.autograd.grad` twice, one column at a time, relative to the largest entry compared.\n"
    "- best right: the fastest of the methods that return the Hessian.\n"
    "- writing as many numbers: the time to fill a matrix of the result's size. It comes before the closed form in every round\n"
    "  and pays for memory that other methods gave back to the system. Times extrapolated from some columns do not include it.\n"
    "- closed form, plain torch: without the compiled kernels, where the environment has them."
)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Return a Markdown table whose first ``text`` columns are aligned left, the others right.

    If all of several rows have the same setting (``SETTINGS``), it stands in a line above the table and has no column.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    >>> print(markdown(["a", "B", "dtype"], [["x", "1", "float64"], ["y", "8", "float64"]]))
    All rows: dtype float64.
    <BLANKLINE>
    | a | B |
    |---|--:|
    | x | 1 |
    | y | 8 |
    """
    same = [k for k, name in enumerate(headers) if name in SETTINGS and len(rows) > 1 and len({row[k] for row in rows}) == 1]
    shown = [k for k in range(len(headers)) if k not in same]
    above = [f"All rows: {', '.join(f'{headers[k]} {rows[0][k]}' for k in same)}.", ""] if same else []
    rule = "".join("---|" if k < text else "--:|" for k in shown)
    lines = [*above, f"| {' | '.join(headers[k] for k in shown)} |", "|" + rule]
    lines += [f"| {' | '.join(row[k].replace('|', '/') for k in shown)} |" for row in rows]
    return "\n".join(lines)


def in_brief(headers: Sequence[str], rows: Sequence[Sequence[str]], keep: Callable[[Sequence[str]], bool], text: int = 1) -> str:
    """Return a table of the rows to keep, then one of all rows, which :mod:`benchmarks.report` puts on the page beside.

    >>> print(in_brief(["a"], [["x"], ["y"]], lambda row: row[0] == "x"))
    | a |
    |---|
    | x |
    <BLANKLINE>
    ## All methods
    <BLANKLINE>
    | a |
    |---|
    | x |
    | y |
    """
    return f"{markdown(headers, [row for row in rows if keep(row)], text)}\n\n{DETAILS}\n\n{markdown(headers, rows, text)}"


def short(value: float | None) -> str:
    """Return a number with three digits.

    >>> short(0.0123456), short(1234.5), short(None)
    ('0.0123', '1234', '')
    """
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def with_range(value: dict[str, float] | None, mark: str = "") -> str:
    """Return a median with its quartiles.

    >>> with_range({"median": 2.0, "low": 1.5, "high": 2.5})
    '2 (1.5 to 2.5)'
    """
    return "" if value is None else f"{mark}{short(value['median'])} ({short(value['low'])} to {short(value['high'])})"


def mebibytes(value: float | None) -> str:
    """Return bytes in MiB.

    >>> mebibytes(3 * 2**20)
    '3'
    """
    return "" if value is None else short(value / 2**20)


def cell_text(record: Record) -> list[str]:
    """Return the settings of a cell as text, under ``CELL_HEADERS``."""
    cell, size = record["cell"], record["result"].get("parameters")
    return [str(cell["problem"]), "" if size is None else str(size), *(str(cell[k]) for k in ("batch", "dtype", "threads"))]


def cell_rows(
    records: Sequence[Record],
    rows: Callable[[Record, dict[str, Any]], Iterable[Sequence[str]]],
    blanks: int,
    names: Callable[[Record], Sequence[str]] = cell_text,
) -> list[list[str]]:
    """Return the names of each cell before each of its rows; a skipped cell has one row, with the reason and blanks.

    >>> cell_rows([{"result": {"skipped": "too large"}}, {"result": {}}], lambda record, result: [("1", "2")], 1, lambda _: ["a"])
    [['a', 'skipped: too large', ''], ['a', '1', '2']]
    """
    found = []
    for record in records:
        result = record["result"]
        own = [(f"skipped: {result['skipped']}", *[""] * blanks)] if "skipped" in result else rows(record, result)
        found += [[*names(record), *row] for row in own]
    return found


def time_text(row: dict[str, Any]) -> str:
    """Return a row's time, marked where it is extrapolated."""
    if not row.get("time"):
        return ""
    if row.get("extrapolated"):
        return f"{with_range(row['time'], '~')} from {row['timed_columns']} of {row['columns']} {row.get('of', 'columns')}"
    return with_range(row["time"])


def ratio_text(row: dict[str, Any], key: str = "ratio") -> str:
    """Return a row's ratio, or the fault of the row in its place.

    >>> ratio_text({"status": "wrong", "error": 0.5812})
    '**wrong by 0.58**'
    """
    if row["status"] == "wrong":
        return f"**wrong by {row['error']:.2g}**" if row.get("error") is not None else "**wrong: not finite**"
    if row["status"] != "right":
        return f"{row['status']}: {row.get('why', '')}"
    return with_range(row.get(key), "~" if row.get("extrapolated") else "")


def quantities(result: dict[str, Any]) -> list[str | None]:
    """Return the quantities that the rows of a cell are about, in order; [None] where there is one without a name."""
    return list(dict.fromkeys(row.get("quantity") for row in result.get("rows", [])))


def best_table(records: Sequence[Record], ours: str, best: str) -> str:
    """Return one line a cell (and quantity): our time, the best right other method, its time, the ratio of the two."""
    rows = []
    named = any(q is not None for r in records for q in quantities(r["result"]))
    for record in records:
        result = record["result"]
        if "skipped" in result:
            rows.append([*cell_text(record), *([""] if named else []), f"skipped: {result['skipped']}", "", "", ""])
            continue
        for quantity in quantities(result):
            mine, *others = [row for row in result["rows"] if row.get("quantity") == quantity]
            right = [row for row in others if row["status"] == "right" and row["time"] and not row.get("ours")]
            first = min(right, key=lambda row: row["time"]["median"], default=None)
            name, time, ratio = ("none", "", "") if first is None else (first["name"], time_text(first), ratio_text(first))
            own = time_text(mine) if mine["status"] == "right" else ratio_text(mine)
            rows.append([*cell_text(record), *([str(quantity)] if named else []), own, name, time, ratio])
    headers = [*CELL_HEADERS, *(["quantity"] if named else []), f"{ours} (s)", best, "its time (s)", "ratio"]
    return markdown(headers, rows)


def detail_table(records: Sequence[Record]) -> str:
    """Return one line a method of each cell."""
    rows = []
    named = any(q is not None for r in records for q in quantities(r["result"]))
    extra = next((r["result"]["extra"] for r in records if "extra" in r["result"]), None)
    for record in records:
        result = record["result"]
        if "skipped" in result:
            continue
        if "writing" in result:
            rows.append([*cell_text(record), "*writing as many numbers*", "", with_range(result["writing"]), "", ""])
        for row in result["rows"]:
            if row["status"] == "missing":  # a package that was not installed
                continue
            error = row.get("error")
            rows.append(
                [
                    *cell_text(record),
                    *([str(row["quantity"])] if named else []),
                    row["name"],
                    "" if row.get("chunk") is None else str(row["chunk"]),
                    time_text(row),
                    ratio_text(row),
                    "" if error is None else f"{error:.1e}",
                    *([short(row.get(extra[0]))] if extra else []),
                ]
            )
    quantity = ["quantity"] if named else []
    headers = [*CELL_HEADERS, *quantity, "method", "chunk", "time (s)", "ratio", "error", *([extra[1]] if extra else [])]
    return markdown(headers, rows)


def contest_tables(records: Sequence[Record], ours: str = "closed form", best: str = "best right") -> str:
    """Return the table of best methods, then the one of all methods."""
    if not records:
        return "Nothing was measured."
    return f"{best_table(records, ours, best)}\n\n{DETAILS}\n\n{detail_table(records)}"


def document(title: str, summary: str, body: str, notes: str, records: Sequence[Record], plot: str | None) -> str:
    """Return a benchmark's page: where it was measured, tables, plot, how to read them."""
    places = dict.fromkeys(place(record["environment"]) for record in records)
    parts = [f"# {title}", "", summary, "", *(places or ["Nothing was measured."]), "", body, ""]
    if plot:
        parts += [f"![{title}]({plot})", ""]
    return "\n".join([*parts, notes, ""])


def place(environment: dict[str, Any]) -> str:
    """Return when and where a record was measured, in one line."""
    names = ("processor", "cores", "system", "python", "torch", "kernels", "numpy", "curvlinops", "jax", "device")
    known = [f"{name} {environment[name]}" for name in names if environment.get(name) is not None]
    return f"{environment['date'][:10]}; {', '.join(known)}."
