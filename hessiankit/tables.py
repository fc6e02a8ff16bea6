"""Tables that print the same way in a terminal, a log file and a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1) -> Table:
    """Return a rich table whose first ``left`` columns are text and the others numbers."""
    result = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for k, header in enumerate(headers):
        result.add_column(header, justify="left" if k < left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def as_text(*parts: object, width: int = 200) -> str:
    """Return rich objects and strings as plain text, ``width`` wide, or as wide as the widest table needs to be."""
    out = io.StringIO()
    console = Console(
        file=out, width=10**6, color_system=None, highlight=False, emoji=False, markup=False, force_jupyter=False
    )  # in a notebook rich would show the parts itself, beside the result's own table
    widest = max((console.measure(part).maximum for part in parts if isinstance(part, Table)), default=0)
    console.width = max(width, widest)  # a name that is cut short is no name
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def as_html(headers: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """Return the same table as HTML."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headers)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"
