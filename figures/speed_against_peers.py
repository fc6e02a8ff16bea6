"""Speed and memory against the peers, from the tables of docs/benchmarks.md.

Ours. Nothing is measured here: the tables of the page, which ``python -m benchmarks`` made and which say on which machine, are
drawn. Each mark is one row: the time (or the peak memory) of a method over that of the toolkit on the same problem, medians over
the rounds, bars from the lower to the upper quartile of the rounds' ratios. Right of 1 the toolkit is faster or smaller, left of
1 the other method is. A hollow mark was extrapolated from some of the columns. Rows that the page calls wrong, skipped or failed
have no mark; the CSV has them with their reason.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_rows
from hessiankit.support.errors import InputError

NAME = Path(__file__).stem
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
OURS = {"dense": "closed form", "hvp": "hessian_operator", "memory": "hessian"}
"""Section of the page -> the method of ours that its ratios are of."""
TITLES = {"dense": "Dense Hessian: time", "hvp": "Products: time", "memory": "Dense Hessian: peak memory"}
MARKS = (*METHOD_MARKS, "h", "<", ">", "p", "d")
"""More marks than colours, so that a colour that comes again comes with another mark."""
Row: TypeAlias = dict[str, Any]
NUMBER = re.compile(r"(~?)([\d.eE+-]+)(?: \(([\d.eE+-]+) to ([\d.eE+-]+)\))?")


def section(page_text: str, name: str) -> list[dict[str, str]]:
    """Return the rows of the last table with a column "method" of a section of the page.

    >>> section("<!-- benchmark a -->\\n| method | ratio |\\n|---|--:|\\n| x | 2 |\\n<!-- /benchmark a -->", "a")
    [{'method': 'x', 'ratio': '2'}]
    """
    inside = page_text.partition(f"<!-- benchmark {name} -->")[2].partition(f"<!-- /benchmark {name} -->")[0]
    found: list[dict[str, str]] = []
    header: list[str] | None = None
    for line in inside.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            header = None
        elif header is None:
            header = cells
            found = [] if "method" in header else found
        elif "method" in header and not set("".join(cells)) <= set("-: "):
            found.append(dict(zip(header, cells, strict=True)))
    return found


def ratio(text: str) -> tuple[float, float, float, bool] | None:
    """Return (median, lower, upper, extrapolated) of a cell; None where it holds no number.

    >>> ratio("~4.78 (4.77 to 6.51)"), ratio("0.986"), ratio("skipped: too large"), ratio("")
    ((4.78, 4.77, 6.51, True), (0.986, 0.986, 0.986, False), None, None)
    """
    match = NUMBER.match(text)
    if match is None:
        return None
    middle = float(match[2])
    return middle, float(match[3] or middle), float(match[4] or middle), bool(match[1])


def rows_of(page_text: str) -> list[Row]:
    """Return a row for each method of each problem: benchmark, problem, quantity, method, ratio, quartiles, and the cell's text.

    Raises:
        InputError: The page has no such tables.
    """
    rows: list[Row] = []
    for name in OURS:
        for cells in section(page_text, name):
            column = "of hessian's" if name == "memory" else "ratio"
            shown = cells[column]
            numbers = ratio(shown)
            setting = [f"{cells['problem']}, B = {cells['B']}", cells.get("quantity", "")]
            for key, plain in (("dtype", "float64"), ("threads", "1"), ("device", "cpu")):
                setting.append(cells[key] if key in cells and cells[key] != plain else "")
            middle, low, high, far = numbers or (None, None, None, False)
            note = (
                ""
                if numbers or cells["method"] == OURS[name]
                else shown or cells.get("peak (MiB)", "") or cells.get("time (s)", "")
            )
            problem = ", ".join(part for part in setting if part)
            rows.append(
                {"benchmark": name, "problem": problem, "method": cells["method"], "ratio": middle,
                 "lower": low, "upper": high, "extrapolated": far, "note": note}
            )  # fmt: skip
    if not rows:
        raise InputError(f"{NAME}: {PAGE.name} has no tables of {', '.join(OURS)}; make them with python -m benchmarks --report")
    return rows


def machine(page_text: str) -> str:
    """Return the line that says where and when it was measured; "" if there is none.

    >>> machine("# Speed\\n\\n2026-01-02; processor X, cores 2.\\n")
    '2026-01-02; processor X, cores 2.'
    """
    match = re.search(r"^\d{4}-\d\d-\d\d;.*$", page_text, re.MULTILINE)
    return match[0] if match else ""


def panel(axes: Axes, rows: list[Row], name: str) -> None:
    """Draw the ratios of one benchmark: methods down, problems by colour and mark."""
    drawn = [row for row in rows if row["ratio"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in drawn))
    problems = list(dict.fromkeys(row["problem"] for row in drawn))
    for k, problem in enumerate(problems):
        own = [row for row in drawn if row["problem"] == problem]
        colour, mark = METHOD_COLOURS[k % 8], MARKS[k % len(MARKS)]
        shift = 0.6 * ((k + 0.5) / len(problems) - 0.5)
        for row in own:
            y = methods.index(row["method"]) + shift
            axes.plot([row["lower"], row["upper"]], [y, y], color=colour, linewidth=0.9)
            axes.plot(
                row["ratio"], y, mark, color=colour, markersize=4, markerfacecolor="white" if row["extrapolated"] else colour
            )
        axes.plot([], [], mark, color=colour, markersize=4, label=problem)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_locator(LogLocator(10, subs=(2, 5) if high < 30 * low else ()))
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=7.5)
    axes.axvline(1.0, color=METHOD_COLOURS[0], linewidth=0.8)
    axes.set_yticks(range(len(methods)), [f"{one} (ours)" if one.startswith(tuple(OURS.values())) else one for one in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    heading(axes, TITLES[name], f"over that of {OURS[name]}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=7.5)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw the page's tables; ``quick`` is the same."""
    text = PAGE.read_text(encoding="utf-8")
    rows = rows_of(text)
    names = [name for name in OURS if any(row["benchmark"] == name and row["ratio"] is not None for row in rows)]
    with style():
        figure = page(8.2, 2.9 * len(names) + 0.45)
        for k, name in enumerate(names):
            panel(figure.add_subplot(len(names), 1, k + 1), [row for row in rows if row["benchmark"] == name], name)
        where = textwrap.fill(machine(text), 125) + "\nFilled: measured; hollow: extrapolated from some columns."
        figure.text(0.012, 0.012, where, fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.215, right=0.665, top=0.965, bottom=0.115, hspace=0.36)
        picture = save(figure, out / f"{NAME}{suffix}")
    for name in names:
        peers = [row for row in rows if row["benchmark"] == name and row["method"] not in OURS.values()]
        found = [row["ratio"] for row in peers if row["ratio"] is not None]
        print(f"  {TITLES[name]}: {len(found)} ratios from {min(found):g} to {max(found):g}, {sum(x < 1 for x in found)} below 1")
    return [picture, write_rows(out / f"{NAME}.csv", rows)]
