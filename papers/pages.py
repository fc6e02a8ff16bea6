"""The ledger as pages: Markdown for docs/claims.md, HTML for a browser. LaTeX stays text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from papers.claim import PAPERS, SEVERITIES, VERDICTS, Claim
from papers.ledger_report import LedgerReport, LedgerRow

HEADERS = ("row", "place", "statement", "verdict", "correct", "evidence")
INTRODUCTION = (
    "Statements of four papers, each with a verdict and the computation that reproduces it. `python -m papers run` runs "
    "all of them, `python -m papers show ID` prints one row with what was compared. The "
    "[errata](errata/curvature-gap.md) have the corrections that matter most, [the papers](papers/index.md) every "
    "statement with formula and code. A violation ratio is the left side of an inequality over its right side; where something "
    "does not conform, the shapes of its factors do not match."
)
MEANING = {
    "HOLDS": "the formula agrees with a route that shares nothing with it, to 1e-10 of the largest entry; an inequality is "
    "never violated on a sample.",
    "HOLDS UNDER ASSUMPTION": "it needs an assumption that the paper does not state there, and fails without it.",
    "WRONG AS PRINTED": "the printed formula is off by more than a threshold or has a counterexample; the corrected formula is "
    "not and has none. How severe that is stands beside it.",
    "DOES NOT FOLLOW": "a conclusion that the paper's argument does not give; it may be right.",
    "INCONSISTENT": "two prints, or print and released code, disagree.",
    "OMITTED": "the paper needs it and does not state it.",
    "LOOSE": "never violated, and never close to being attained.",
    "VAGUE": "it can be read in several ways, which give different results.",
    "SEEN AT THIS SIZE": "a small experiment, or a figure of the [gallery](gallery.md), shows what the paper says, at its own "
    "size and by the criterion stated.",
    "SAME DIRECTION, SMALLER": "it shows an effect in the paper's direction, below the size that the paper has.",
    "SEEN IN PART": "it shows one part of the statement and not another.",
    "NOT SEEN AT THIS SIZE": "it does not show it. This says nothing about the paper's size.",
    "OPEN": "it does not decide, or what the statement needs (steps, budget, vocabulary, parameters) is not reached.",
    "NOT RUN": "it takes training or data at a size that is not run here; in place of evidence the row gives the reason.",
}
SEVERE = {
    "slip of print": "the context, or another place of the paper, has what is meant.",
    "constant": "the form is right, a factor or an exponent is not.",
    "scope": "it holds of less than it says.",
    "false": "no reading of it holds.",
}


def plain(text: str) -> str:
    """Return a text without the dollars around its LaTeX.

    >>> plain(r"$A \\in R$ is square")
    'A \\\\in R is square'
    """
    return text.replace("$", "")


def markdown_page(rows: Sequence[Claim], counts: Mapping[str, Mapping[Any, int]], report: LedgerReport | None = None) -> str:
    """Return the rows as a Markdown page, one table a paper, with what a run of them found."""
    ran = _ran(report)
    used = [v for v in VERDICTS if any(v in found for found in counts.values())]
    lines = ["# The papers' statements, with verdicts", "", INTRODUCTION, ""]
    lines += [_line(("verdict", *(f"[{paper}](#{paper})" for paper in counts), "meaning"))]
    lines += [_line(("---", *["--:"] * len(counts), "---"))]
    for v in used:
        lines.append(_line((v, *(str(found.get(v, "")) for found in counts.values()), MEANING[v])))
    lines.append(_line(("all", *(str(sum(found.values())) for found in counts.values()), "")))
    lines += ["", "Wrong prints by root cause: one error counts once, whatever is derived from it.", ""]
    lines += [_line(("severity", *counts, "meaning")), _line(("---", *["--:"] * len(counts), "---"))]
    roots = {paper: causes([row for row in rows if row.paper == paper]) for paper in counts}
    lines += [_line((s, *(str(found[s] or "") for found in roots.values()), SEVERE[s])) for s in SEVERITIES]
    lines.append(_line(("root causes", *(str(sum(found.values()) or "") for found in roots.values()), "")))
    lines.append(_line(("places", *(str(found.get("WRONG AS PRINTED", "")) for found in counts.values()), "")))
    for paper in counts:
        lines += ["", f'<a id="{paper}"></a>', "", f"## {PAPERS[paper].title}", ""]
        source = ", ".join(text for text in (PAPERS[paper].authors, _arxiv(paper)) if text)
        lines += (
            [f"{source.rstrip('.')}."] if source else ["Statements that follow from the same closed forms but are in no paper."]
        )
        lines += ["", _line(HEADERS), _line(["---"] * len(HEADERS))]
        for row in rows:
            if row.paper == paper:
                name = f'<a id="{row.anchor}"></a>`{row.id.split("/", 1)[1]}`'
                place, statement, correct = map(markdown_text, (row.place, row.statement, _truth(row)))
                lines.append(_line((name, place, statement, verdict_of(row), correct, markdown_text(_evidence(row, ran)))))
    return "\n".join(lines) + "\n"


def causes(rows: Iterable[Claim]) -> dict[Any, int]:
    """Return how many root causes the wrong prints among some rows have, by severity."""
    found = [row.severity for row in rows if not row.follows_from]
    return {severity: found.count(severity) for severity in SEVERITIES}


def in_words(rows: Sequence[Claim]) -> str:
    """Return the root causes of the wrong prints among some rows in words."""
    found, places = causes(rows), sum(row.severity is not None for row in rows)
    kinds = ", ".join(f"{number} {severity}" for severity, number in found.items() if number)
    roots = sum(found.values())
    return f"{roots} root cause{'s' * (roots != 1)} at {places} places ({kinds})"


def verdict_of(row: Claim) -> str:
    """Return a row's verdict, with its severity and the rows that it follows from."""
    roots = ", ".join(name.split("/")[1] for name in row.follows_from)
    more = "; ".join(filter(None, (row.severity, f"root: {roots}" if roots else "")))
    return f"{row.verdict} ({more})" if more else row.verdict


def without_evidence(page: str) -> str:
    """Return a Markdown page of the ledger without its last column, whose digits vary from machine to machine."""
    return "\n".join(line.rsplit(" | ", 1)[0] if line.startswith("| <a id") else line for line in page.splitlines())


def _arxiv(paper: str) -> str:
    number = PAPERS[paper].arxiv
    return f"[arXiv:{number}](https://arxiv.org/abs/{number})" if number else ""


def _ran(report: LedgerReport | None) -> dict[str, LedgerRow]:
    return {row.claim.id: row for row in report.rows} if report is not None else {}


def _truth(row: Claim) -> str:
    return "; ".join([f"needs: {row.assumption}"] * bool(row.assumption) + [f"{row.corrected}"] * bool(row.corrected))


def _evidence(row: Claim, ran: Mapping[str, LedgerRow]) -> str:
    return evidence_text(ran[row.id]) if row.id in ran else ""


def without_rounding(text: str) -> str:
    """Write errors of rounding as such.

    >>> without_rounding("agree to 2.2e-16")
    'agree to < 1e-7'
    """
    return re.sub(r"\b\d+(\.\d+)?e-(0[89]|[1-9]\d)\b", "< 1e-7", text)


def evidence_text(found: LedgerRow) -> str:
    """Return what was found, with errors of rounding written as such."""
    text = found.error or without_rounding(str(found.evidence))
    return text if found.reproduced else f"not reproduced: {text}"


def markdown_text(text: str) -> str:
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
    ran = _ran(report)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>The papers' statements</title>",
        f"<style>{STYLE}</style>",
    ]
    parts.append("<h1>The papers' statements, with verdicts</h1>")
    if report is not None:
        parts.append(f"<p>{html.escape(report.summary)}</p>")
    head = "".join(f"<th>{h}</th>" for h in HEADERS)
    for paper in counts:
        parts.append(f"<h2 id='{paper}'>{html.escape(PAPERS[paper].title)}</h2><table><tr>{head}</tr>")
        for row in rows:
            if row.paper == paper:
                found, good = html.escape(_evidence(row, ran)), row.id not in ran or ran[row.id].reproduced
                cells = [
                    f"<code>{html.escape(row.id)}</code>",
                    html.escape(row.place),
                    _html_text(row.statement),
                    verdict_of(row),
                ]
                cells += [_html_text(_truth(row)), found if good else f"<span class='no'>{found}</span>"]
                parts.append(f"<tr id='{row.anchor}'>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def _html_text(text: str) -> str:
    parts = [html.escape(part) for part in text.split("$")]
    return "".join(f"<code>{part}</code>" if k % 2 else part for k, part in enumerate(parts))
