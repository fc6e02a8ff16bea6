"""Speed and memory against the peers, from the tables of docs/benchmarks.md.

Ours. Nothing is measured here: the tables of the page, which ``python -m benchmarks`` made and which say on which machine, are
drawn. A row is a problem; every mark is one other method's time (or peak memory) over the toolkit's on that problem, medians over
the rounds. The smallest, the best other method that gives the right matrix, is large and named, with the quartiles of its rounds'
ratios; the rest are small. Right of 1 the toolkit is faster or smaller, left of 1 the other method is. A hollow mark was
extrapolated from some of the columns. Other methods of the toolkit are crosses. Rows that the page calls wrong, skipped or
failed have no mark; the CSV has them with their reason.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from figures._kit import FAINT, METHOD_COLOURS, heading, page, save, style, write_rows
from hessiankit.support.errors import InputError

NAME = Path(__file__).stem
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
OURS = {"dense": "closed form", "hvp": "hessian_operator", "memory": "hessian"}
"""Section of the page -> the method of ours that its ratios are of."""
TITLES = {"dense": "Dense Hessian: time", "hvp": "Products: time", "memory": "Dense Hessian: peak memory"}
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


def ours(name: str) -> bool:
    """Return whether a method is the toolkit's.

    >>> ours("closed form, plain torch"), ours("curvlinops")
    (True, False)
    """
    return name.startswith((*OURS.values(), "hessian_operator", "hessiankit.", "*"))


def panel(axes: Axes, rows: list[Row], name: str) -> None:
    """Draw a row a problem: the best other method with its name and quartiles, the rest as small marks."""
    drawn = [row for row in rows if row["ratio"] is not None]
    problems = list(dict.fromkeys(row["problem"] for row in drawn))
    for y, problem in enumerate(problems):
        own = [row for row in drawn if row["problem"] == problem]
        rivals = sorted((row for row in own if not ours(row["method"])), key=lambda row: row["ratio"])
        for row in (row for row in own if ours(row["method"]) and not row["method"].startswith("*")):
            axes.plot(row["ratio"], y, "x", color=METHOD_COLOURS[0], markersize=4)
        for k, row in enumerate(reversed(rivals)):
            best = k == len(rivals) - 1
            colour = METHOD_COLOURS[2] if best else METHOD_COLOURS[6]
            face = "white" if row["extrapolated"] else colour
            axes.plot(row["ratio"], y, "D" if best else "o", color=colour, markersize=6 if best else 3.5, markerfacecolor=face)
        if rivals:
            axes.plot([rivals[0]["lower"], rivals[0]["upper"]], [y, y], color=METHOD_COLOURS[2], linewidth=1.0)
            text = f"{rivals[0]['ratio']:.3g} x, {rivals[0]['method']}"
            axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_locator(LogLocator(10, subs=(2, 5) if high < 30 * low else ()))
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=7.5)
    axes.axvline(1.0, color=METHOD_COLOURS[0], linewidth=0.8)
    axes.set_yticks(range(len(problems)), problems)
    axes.set_ylim(len(problems) - 0.5, -0.5)
    heading(axes, TITLES[name], f"other method over {OURS[name]}")


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw the page's tables; ``quick`` is the same."""
    text = PAGE.read_text(encoding="utf-8")
    rows = rows_of(text)
    names = [name for name in OURS if any(row["benchmark"] == name and row["ratio"] is not None for row in rows)]
    with style():
        count = [len({row["problem"] for row in rows if row["benchmark"] == name and row["ratio"] is not None}) for name in names]
        height = 0.75 * len(names) + 0.19 * sum(count) + 0.85
        figure, top = page(8.2, height), 0.3
        for name, lines in zip(names, count, strict=True):
            place = (0.27, 1 - (top + 0.19 * lines) / height, 0.47, 0.19 * lines / height)
            panel(figure.add_axes(place), [row for row in rows if row["benchmark"] == name], name)
            top += 0.19 * lines + 0.75
        looks = {"best other method": ("D", 2, 6), "other methods": ("o", 6, 3.5), "ours, other ways": ("x", 0, 4)}
        handles = [
            Line2D([], [], linestyle="", marker=mark, color=METHOD_COLOURS[k], markersize=size, label=label)
            for label, (mark, k, size) in looks.items()
        ]
        figure.legend(handles=handles, loc="lower right", bbox_to_anchor=(0.99, 0.45 / height), ncols=3)
        where = textwrap.fill(machine(text), 125) + "\nFilled: measured; hollow: extrapolated from some columns."
        figure.text(0.012, 0.08 / height, where, fontsize=7.5, color=FAINT)
        picture = save(figure, out / f"{NAME}{suffix}")
    for name in names:
        peers = [row for row in rows if row["benchmark"] == name and row["method"] not in OURS.values()]
        found = [row["ratio"] for row in peers if row["ratio"] is not None]
        print(f"  {TITLES[name]}: {len(found)} ratios from {min(found):g} to {max(found):g}, {sum(x < 1 for x in found)} below 1")
    return [picture, write_rows(out / f"{NAME}.csv", rows)]
