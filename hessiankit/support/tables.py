"""Paragraphs and tables of results: fitted to a terminal, complete in a pipe, a file and a notebook.

In a terminal narrower than a table nothing is cut: names become short, headers break, prose flows, the columns that matter least
are left out and named below; if the others are still too wide, a row takes several lines.
"""

from __future__ import annotations

import html
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

LINES = 25  # of ``print(result)`` at most
PROSE = 24  # smallest width of a column of prose
WORD = 36  # longest word of prose that is not broken over lines, as a formula in LaTeX may be
GAP = "  "
FULL_HINT = "all of it: .table(); on the command line --table, or a pipe"


@dataclass(frozen=True)
class Table:
    """Cells under headers; made by :func:`table`."""

    headers: tuple[str, ...]  # one a column, each only once
    rows: tuple[tuple[str, ...], ...]  # the cells
    title: str = ""  # line above the table
    left: int = 1  # how many columns are aligned on the left
    ranked: str = ""  # the rank in words
    spread: bool = False  # where rows are omitted, evenly spaced ones remain, with the first and the last
    # Dotted names in cells, as in "a.W_Q x a.W_K"; a narrow terminal shows their shortest unique endings
    names: tuple[str, ...] = ()
    prose: tuple[str, ...] = ()  # headers of the columns that may flow over several lines
    drop: tuple[str, ...] = ()  # headers of the columns that are left out in a narrow terminal, in this order
    rank: tuple[float, ...] = ()  # A number for each row; where rows are omitted, the largest remain

    def top(self, count: int) -> Table:
        """Return ``count`` rows, named in the title: the first, the largest by rank, or evenly spaced ones.

        >>> rows = [[str(k)] for k in range(5)]
        >>> table(["k"], rows, rank=[0, 2, 1, 4, 3]).top(3).rows, table(["k"], rows, spread=True).top(3).rows
        ((('3',), ('4',), ('1',)), (('0',), ('2',), ('4',)))
        """
        total = len(self.rows)
        if count >= total:
            return self
        order, selection = list(range(count)), f"{count} of {total} rows"
        if self.rank:
            order, selection = sorted(range(total), key=lambda k: -self.rank[k])[:count], f"{selection}, {self.ranked} first"
        elif self.spread:
            order, selection = [k * (total - 1) // max(count - 1, 1) for k in range(count)], f"{selection}, evenly spaced"
        title = f"{self.title}; {selection}" if self.title else selection
        return replace(self, rows=tuple(self.rows[k] for k in order), title=title, rank=())


@dataclass(frozen=True)
class Detail:
    """A part that ``print(result)`` omits where everything would be too long; ``.table()`` has it."""

    part: Table | str


Piece: TypeAlias = Table | Detail | str


def table(
    headers: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    title: str | None = None,
    left: int = 1,
    ranked: str = "",
    spread: bool = False,
    **lists: Iterable[Any],
) -> Table:
    """Return a :class:`Table` of any iterables: its first ``left`` columns are text and the others numbers."""
    cells, column_sets = tuple(map(tuple, rows)), {name: tuple(values) for name, values in lists.items()}
    return Table(tuple(headers), cells, title or "", left, ranked, spread, **column_sets)


class Printed:
    """A result of paragraphs and tables: one line as ``repr``, a screen where it is printed, and all of it as ``.table()``."""

    def _headline(self) -> str:
        """Return a one-line summary."""
        raise NotImplementedError

    def _parts(self) -> Iterator[Piece]:
        """Yield paragraphs and tables, from top to bottom."""
        raise NotImplementedError

    def table(self) -> str:
        """Return every row and column as text, at any terminal width."""
        return as_text(*self._parts(), whole=True)

    def __str__(self) -> str:
        return brief(*self._parts())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' '.join(self._headline().split())}>"

    def _repr_html_(self) -> str:
        parts = [part.part if isinstance(part, Detail) else part for part in self._parts()]
        tables = [part for part in parts if isinstance(part, Table)]
        texts = [part for part in parts if isinstance(part, str) and part not in ("", self._headline())]
        pieces = [as_html(t.headers, t.rows, caption=t.title if k else self._headline()) for k, t in enumerate(tables)]
        return "".join([*pieces, *(f"<p>{html.escape(text)}</p>" for text in texts)])


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output is; None for a pipe, a file or a notebook."""
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def as_text(*parts: Piece, whole: bool = False) -> str:
    """Return tables and paragraphs as plain text, as wide as the terminal; with ``whole`` no column is left out."""
    width = terminal_width()
    return "\n".join(line.rstrip() for part in parts for line in _lines(part, width, whole))


def say(*parts: Piece, whole: bool = False) -> None:
    """Print tables and paragraphs, and flush."""
    print(as_text(*parts, whole=whole), flush=True)


def show(result: Printed, full: bool) -> None:
    """Print a command's result: a screen of it in a terminal, all of it where ``--table`` is given or output is piped."""
    print(result.table() if full or terminal_width() is None else result)


def brief(*parts: Piece) -> str:
    """Return what fits in ``LINES`` lines: all of it, or some rows of each table without the details, and where the rest is."""
    full = as_text(*parts)
    if full.count("\n") < LINES:
        return full
    pieces: list[Table | str] = [part for part in parts if not isinstance(part, Detail) and part]
    hint = as_text(FULL_HINT)
    longest = max((len(part.rows) for part in pieces if isinstance(part, Table)), default=0)
    for count in range(min(longest, LINES), 0, -1):
        text = as_text(*(part.top(count) if isinstance(part, Table) else part for part in pieces), hint)
        if text.count("\n") < LINES:
            return text
    text = as_text(*(part.top(1) if isinstance(part, Table) else part for part in pieces[:-1]))
    last = as_text(*pieces[-1:]).splitlines()[: LINES // 2]
    room = LINES - len(last) - len(hint.splitlines())
    return "\n".join([*text.splitlines()[:room], *last, hint])


def sizes(shape: Iterable[int]) -> str:
    """Return a shape as readable text.

    >>> sizes((3, 4)), sizes(())
    ('3 x 4', '1')
    """
    return " x ".join(map(str, shape)) or "1"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the shortest dotted ending of each name that no other name shares.

    >>> short_names(["a.W_Q", "a.W_K", "a.norm_1.weight", "a.norm_2.weight"])
    {'a.W_Q': 'W_Q', 'a.W_K': 'W_K', 'a.norm_1.weight': 'norm_1.weight', 'a.norm_2.weight': 'norm_2.weight'}
    """
    endings = {name: [name, *(name[m.end() :] for m in re.finditer(r"\.", name))] for name in dict.fromkeys(names)}
    counts: dict[str, int] = {}
    for ending in (ending for of_name in endings.values() for ending in of_name):
        counts[ending] = counts.get(ending, 0) + 1
    return {name: next((e for e in reversed(of_name) if counts[e] == 1), name) for name, of_name in endings.items()}


def as_html(headers: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """Return a table as HTML."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headers)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def as_markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown, the first column aligned on the left.

    >>> print(as_markdown(["name", "n"], [["a", "1"]]))
    | name | n |
    |---|--:|
    | a | 1 |
    """
    head, *body = ["| " + " | ".join(row) + " |" for row in (headers, *rows)]
    return "\n".join([head, "|---|" + "--:|" * (len(headers) - 1), *body])


def _lines(part: Piece, width: int | None, whole: bool) -> list[str]:
    if isinstance(part, Detail):
        return _lines(part.part, width, whole)
    if isinstance(part, str):
        return [line for paragraph in part.split("\n") for line in _filled(paragraph, width)]
    title = _filled(part.title, width) if part.title else []
    return title + (_grid(part, _natural(part)) if width is None else _fitted(part, width, whole))


def _filled(text: str, width: int | None, indent: str = GAP) -> list[str]:
    """Return a paragraph in lines, those after the first indented."""
    if width is None or _width(text) <= width:
        return [text]
    further = " " * (len(text) - len(text.lstrip())) + indent
    return textwrap.wrap(text, width, subsequent_indent=further, break_on_hyphens=False)


def _fitted(full: Table, width: int, whole: bool) -> list[str]:
    """Return the table in the first of the forms of the module's text that fits."""
    if _total(_natural(full)) <= width:
        return _grid(full, _natural(full))
    names = short_names(full.names)
    renamed = replace(full, rows=tuple(tuple(_renamed(cell, names) for cell in row) for row in full.rows))
    headers: list[str] = []
    for header in ("", *(() if whole else full.drop)):
        if header in renamed.headers:
            renamed = _without(renamed, header)
            headers.append(header)
        widths = _squeezed(renamed, width)
        if widths is not None:
            note = f"columns left out at this width: {', '.join(headers)} (--table, a pipe or .table() has them)"
            return [*_grid(renamed, widths), *(_filled(note, width) if headers else [])]
    return [line for row in full.rows for line in _stacked(full.headers, row, width)]


def _renamed(cell: str, names: dict[str, str]) -> str:
    return "".join(names.get(part, part) for part in re.split(r"( x |, | \| )", cell)) if names else cell


def _without(one: Table, header: str) -> Table:
    at = one.headers.index(header)
    rows = tuple(row[:at] + row[at + 1 :] for row in one.rows)
    return replace(one, headers=one.headers[:at] + one.headers[at + 1 :], rows=rows, left=one.left - (at < one.left))


def _width(text: str) -> int:
    from rich.cells import cell_len  # only here, since rich is slow to import

    return cell_len(text)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _natural(one: Table) -> list[int]:
    return [max(map(_width, column)) for column in zip(one.headers, *one.rows, strict=True)]


def _squeezed(one: Table, width: int) -> list[int] | None:
    """Return the columns' widths with headers broken and prose flowing, or None if that is too wide."""
    widths = []
    for k, header in enumerate(one.headers):
        cells, prose = [row[k] for row in one.rows], header in one.prose
        full_width, word = (max(map(_width, texts), default=0) for texts in (cells, " ".join(cells).split()))
        minimum = min(full_width, max(min(word, WORD), PROSE)) if prose else full_width
        widths.append(max(minimum, *(_width(piece.strip()) for piece in _pieces(header))))
    spare = width - _total(widths)
    if spare < 0:
        return None
    natural = _natural(one)
    for k in sorted(range(len(widths)), key=lambda k: one.headers[k] not in one.prose):  # prose first, then headers
        extra = min(max(natural[k] - widths[k], 0), spare)
        widths[k], spare = widths[k] + extra, spare - extra
    return widths


def _pieces(header: str) -> list[str]:
    """Return a header in the pieces between which it may break.

    >>> _pieces("reverse-over-reverse"), _pieces("jvp(grad) of it"), _pieces("||.||_2")
    (['reverse-', 'over-', 'reverse'], ['jvp', '(grad)', ' of', ' it'], ['||.||_2'])
    """
    return re.split(r"(?<=[a-z]-)(?=[a-z])|(?=\s)|(?<=\w)(?=\()|(?<=\w)(?=\.\w)", header)


def _flowed(pieces: Iterable[str], width: int) -> list[str]:
    """Return pieces in lines of at most ``width``, where each by itself is no wider."""
    lines = [""]
    for piece in pieces:
        if _width(lines[-1] + piece) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return lines


def _grid(one: Table, widths: Sequence[int]) -> list[str]:
    """Return headers, a rule and the rows."""
    heads = [_flowed(_pieces(h), w) for h, w in zip(one.headers, widths, strict=True)]
    tall = max(map(len, heads), default=0)
    alignments = [k < one.left or h in one.prose for k, h in enumerate(one.headers)]
    lines = _joined([[""] * (tall - len(head)) + head for head in heads], widths, alignments)
    lines.append("─" * _total(widths))
    for row in one.rows:
        cells = [_filled(c, w, "") if h in one.prose else [c] for c, w, h in zip(row, widths, one.headers, strict=True)]
        lines += _joined(cells, widths, alignments)
    return lines


def _joined(cells: Sequence[Sequence[str]], widths: Sequence[int], alignments: Sequence[bool]) -> list[str]:
    """Return cells of several lines beside each other."""
    lines = []
    for texts in zip_longest(*cells, fillvalue=""):
        gaps = [" " * (w - _width(text)) for text, w in zip(texts, widths, strict=True)]
        cells_of_width = (
            text + gap if is_text else gap + text for text, gap, is_text in zip(texts, gaps, alignments, strict=True)
        )
        lines.append(GAP.join(cells_of_width).rstrip())
    return lines


def _stacked(headers: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Return a row over several lines: its first cell, then each other cell after its header."""
    items = [f"{GAP}{header}: {cell}" for header, cell in zip(headers[1:], row[1:], strict=True) if cell]
    flowed = [GAP + line for line in _flowed(items, width - len(GAP)) if line]
    return [line for part in (row[0], *flowed) for line in _filled(part, width)]


def two_numbers(a: float, b: float) -> str:
    """Return two different numbers with enough digits to distinguish them, at least six.

    >>> two_numbers(1.0, 2.0), two_numbers(1.116, 1.116 + 1e-9)
    ('1 and 2', '1.116 and 1.116000001')
    """
    digits = next((n for n in range(6, 17) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    return f"{a:.{digits}g} and {b:.{digits}g}"
