"""The part of a page of prose that the command writes: what lies between its marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hessiankit.errors import InputError
from hessiankit.files import write_text
from hessiankit.tuning.report import HEADERS, PLACE, TuneReport

MARK = "tune-lr"


def section(report: TuneReport, command: str, picture: str | None) -> str:
    """Return the section: command, setting, searches, arms, verdicts, picture.

    Args:
        report: What was found.
        command: What makes the section anew.
        picture: The picture's name beside the page, or None.
    """
    headers, rows = report.sweep_cells()
    place = ", ".join(f"{key} {report.place[key]}" for key in PLACE[1:])
    parts = [
        f"```bash\n{command}\n```",
        f"**{report.summary}**",
        _table(HEADERS, report.cells()),
        report.notes,
        *([f"![Loss against learning rate, loss curves, paired differences]({picture})"] if picture else []),
        "The searches that chose the learning rates: mean final loss (number of seeds), \\* the choice.",
        _table(headers, [[cell.replace("*", "\\*") for cell in row] for row in rows]),
        "\n".join(f"- {one}" for one in report.comparison.sweeps),
        report.measured,
        report.described,
        f"{report.place['date']}; {place}.",
    ]
    return "\n\n".join(parts)


def fill(page: str, text: str) -> str:
    """Return a page with ``text`` between the marks, or with marks and text at its end where it has none.

    >>> print(fill("a\\n<!-- tune-lr -->old<!-- /tune-lr -->\\nb", "new"))
    a
    <!-- tune-lr -->
    new
    <!-- /tune-lr -->
    b
    """
    marked = f"<!-- {MARK} -->\n{text}\n<!-- /{MARK} -->"
    pattern = re.compile(rf"<!-- {MARK} -->.*?<!-- /{MARK} -->", re.DOTALL)
    return pattern.sub(lambda _: marked, page) if pattern.search(page) else f"{page.rstrip()}\n\n{marked}\n".lstrip()


def write_page(path: Path, report: TuneReport, command: str, picture: str | None) -> None:
    """Write the section into a page, which is made if there is none.

    Raises:
        InputError: If the page cannot be read or written.
    """
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else "# Learning rates compared\n"
    except OSError as error:
        raise InputError(f"tune-lr: cannot read {path}: {error.strerror}; name another page") from error
    write_text("tune-lr", path, fill(page, section(report, command, picture)))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (headers, *rows)]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(headers) - 1), *lines[1:]])
