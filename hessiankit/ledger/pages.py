"""The ledger as pages: Markdown for docs/claims.md, HTML for a browser. LaTeX stays text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hessiankit.ledger.claim import PAPERS, VERDICTS, Claim
from hessiankit.ledger.ledger_report import LedgerReport
from hessiankit.ledger.registry import chapter_title

HEADERS = ("row", "place", "statement", "verdict", "what is true", "code")
INTRODUCTION = (
    "What the papers say, statement by statement, and what was found of it. Every row is a computation: `hessiankit claims "
    "--run` finds each verdict again, `hessiankit claims --show ID` prints one row with its evidence. This page is made by "
    "`hessiankit claims --markdown docs/claims.md`, and a test holds it to the rows."
)
MEANING = {
    "HOLDS": "the formula agrees with a route that shares nothing with it, to 1e-10 of the largest entry; an inequality is "
    "never violated on a sample.",
    "HOLDS UNDER ASSUMPTION": "it needs something that is not said there; without it, it fails.",
    "WRONG AS PRINTED": "the printed formula is off by more than a threshold or has a counterexample; the corrected one is not.",
    "OMITTED": "the paper needs it and does not state it.",
    "LOOSE": "never violated, and never close to being attained.",
    "VAGUE": "it can be read in several ways, which give different results.",
    "REPRODUCED": "a small experiment gives what is told.",
    "NOT REPRODUCED": "a small experiment gives something else.",
    "NOT RUN": "it takes training at a size that is not run here; the evidence is arithmetic on what is printed, if anything.",
}


def plain(text: str) -> str:
    """Return a text without the dollars around its LaTeX.

    >>> plain(r"$A \\in R$ is square")
    'A \\\\in R is square'
    """
    return text.replace("$", "")


def markdown_page(rows: Sequence[Claim], counts: Mapping[str, Mapping[Any, int]]) -> str:
    """Return the rows as a Markdown page."""
    used = [v for v in VERDICTS if any(v in found for found in counts.values())]
    lines = ["# The papers' statements, with verdicts", "", INTRODUCTION, ""]
    lines += [_line(("paper", "rows", *used)), _line(["---"] * (2 + len(used)))]
    for paper, found in counts.items():
        cells = (str(found.get(v, "")) for v in used)
        lines.append(_line((f"[{PAPERS[paper].title}](#{paper})", str(sum(found.values())), *cells)))
    lines += ["", *(f"- **{v}**: {MEANING[v]}" for v in used)]
    for paper in counts:
        lines += ["", f'<a id="{paper}"></a>', "", f"## {PAPERS[paper].title}", ""]
        source = ", ".join(text for text in (PAPERS[paper].authors, _arxiv(paper)) if text)
        lines += [f"{source.rstrip('.')}."] if source else ["What follows from the same closed forms and no paper states."]
        for chapter, members in _chapters(rows, paper):
            lines += ["", f"### {chapter_title(chapter)}", "", _line(HEADERS), _line(["---"] * len(HEADERS))]
            lines += [_line(_markdown_cells(row)) for row in members]
    return "\n".join(lines) + "\n"


def _arxiv(paper: str) -> str:
    number = PAPERS[paper].arxiv
    return f"[arXiv:{number}](https://arxiv.org/abs/{number})" if number else ""


def _chapters(rows: Iterable[Claim], paper: str) -> Iterator[tuple[str, list[Claim]]]:
    grouped: dict[str, list[Claim]] = {}
    for row in rows:
        if row.paper == paper:
            grouped.setdefault(row.chapter, []).append(row)
    yield from grouped.items()


def _truth(row: Claim) -> list[str]:
    needs = [f"needs: {row.assumption}"] if row.assumption else []
    return needs + ([row.corrected] if row.corrected else [])


def _markdown_cells(row: Claim) -> list[str]:
    name = row.id.split("/", 1)[1]
    code = ", ".join(f"`{source}`" for source in row.sources)
    truth = "; ".join(map(_markdown_text, _truth(row)))
    return [
        f'<a id="{row.anchor}"></a>`{name}`',
        _markdown_text(row.place),
        _markdown_text(row.statement),
        row.verdict,
        truth,
        code,
    ]


def _markdown_text(text: str) -> str:
    """Set the LaTeX as GitHub reads it inside a table, where a bar would end the cell."""
    parts = text.split("$")
    for k, part in enumerate(parts):
        if k % 2:
            parts[k] = "$`" + re.sub(r"\\\|", r"\\Vert ", part).replace("|", r"\vert ") + "`$"
        else:
            parts[k] = re.sub(r"([|*_<>])", r"\\\1", part)
    return "".join(parts)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem; color: #1c2430; }
table { border-collapse: collapse; margin: 0 0 1.5rem; }
td, th { border-bottom: 1px solid #d8dde5; padding: .3rem .6rem; text-align: left; vertical-align: top; }
code { font-size: 13px; background: #f2f4f7; padding: 0 .2rem; }
.no { color: #b3261e; font-weight: 600; }
"""


def html_page(rows: Sequence[Claim], counts: Mapping[str, Mapping[Any, int]], report: LedgerReport | None) -> str:
    """Return the rows, and what a run of them found, as one HTML page without scripts."""
    ran = {row.claim.id: row for row in report.rows} if report is not None else {}
    parts = ["<!doctype html><html lang='en'><meta charset='utf-8'><title>hessiankit claims</title>", f"<style>{STYLE}</style>"]
    parts.append("<h1>The papers' statements, with verdicts</h1>")
    if report is not None:
        parts.append(f"<p>{html.escape(report.summary)}</p>")
    headers = (*HEADERS, *(("evidence",) if report is not None else ()))
    for paper in counts:
        parts.append(f"<h2 id='{paper}'>{html.escape(PAPERS[paper].title)}</h2>")
        for chapter, members in _chapters(rows, paper):
            head = "".join(f"<th>{h}</th>" for h in headers)
            parts.append(f"<h3>{html.escape(chapter_title(chapter))}</h3><table><tr>{head}</tr>")
            for row in members:
                cells = [f"<code>{html.escape(row.id)}</code>", html.escape(row.place), _html_text(row.statement), row.verdict]
                cells += [
                    "; ".join(map(_html_text, _truth(row))),
                    " ".join(f"<code>{html.escape(s)}</code>" for s in row.sources),
                ]
                if row.id in ran:
                    found = html.escape(ran[row.id].error or str(ran[row.id].evidence))
                    cells.append(found if ran[row.id].reproduced else f"<span class='no'>not reproduced</span>: {found}")
                parts.append(f"<tr id='{row.anchor}'>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
            parts.append("</table>")
    return "\n".join(parts) + "\n"


def _html_text(text: str) -> str:
    parts = [html.escape(part) for part in text.split("$")]
    return "".join(f"<code>{part}</code>" if k % 2 else part for k, part in enumerate(parts))
