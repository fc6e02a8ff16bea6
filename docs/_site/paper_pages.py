"""The pages of the papers, docs/papers/: every numbered statement with the call that gives it, its formula, and its verdicts.

``python docs/_site/paper_pages.py`` makes them anew from ``papers.toml``, ``hessiankit.derive`` and the rows of the ledger.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402
from formula_page import as_math  # noqa: E402

from derivations.matrix import Matrix, dimensions  # noqa: E402
from hessiankit.theory.formulas.result import Derivation  # noqa: E402
from hessiankit.theory.formulas.symbols import SizeName  # noqa: E402
from hessiankit.theory.formulas.theorems import find  # noqa: E402
from papers import PAPERS, Claim, claims  # noqa: E402
from papers.pages import in_words, markdown_text, verdict_of  # noqa: E402

FOLDER = ROOT / "docs" / "papers"
SIZES = {"p": 5, "q": 7, "r": 11, "m": 13, "n": 17}
"""Sizes of the matrices of a setup where a formula is printed; each prints by its letter."""


@dataclass(frozen=True)
class Statement:
    """A numbered statement; see the head of papers.toml."""

    number: str
    title: str
    call: str = ""
    left: str = ""
    formula: str = ""
    rows: str = ""
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A paper's page: what it is about, what the calls need, the statements, and where more is said."""

    about: str
    setup: str
    statements: tuple[Statement, ...]
    more: str = ""


def read() -> dict[str, Page]:
    """Return the pages of papers.toml, by paper."""
    found = tomllib.loads((Path(__file__).parent / "papers.toml").read_text(encoding="utf-8"))
    return {
        paper: Page(
            **{**page, "setup": page["setup"].strip(), "statements": tuple(Statement(**row) for row in page["statements"])}
        )
        for paper, page in found.items()
    }


PAGES = read()
NO_ROW = "No row of the ledger; the tests compare the call with automatic differentiation."
SHORT = {
    "curvature-gap": "Closing the Curvature Gap",
    "sharpness-disparity": "Sharpness Disparity",
    "curse-of-depth": "The Curse of Depth",
    "hybridnorm": "HybridNorm",
}
"""How the places of our own rows name a paper."""


def rows_of(paper: str, statement: Statement) -> list[Claim]:
    """Return the rows of the ledger on a statement: by name, by their place, or as the table of theorems lists them."""
    word, _, number = statement.number.partition(" ")
    at = re.compile(rf"\b{word.rstrip('s')}s? (?:[\d.]+(?: and |-))?{re.escape(number)}(?![\d.]*\d)")
    named = set(statement.rows.split())
    theorem = find(f"{paper}/{statement.number}")
    listed = theorem[1].claims if theorem is not None and theorem[1].place == statement.number else ()
    found = [row for row in claims(paper=paper) if at.search(row.place) or row.id.split("/")[1] in {*named, *listed}]
    found += [row for row in claims(paper="ours") if row.place.startswith(SHORT[paper]) and at.search(row.place)]
    order = {name: k for k, name in enumerate(listed)}
    return sorted(found, key=lambda row: order.get(row.id.split("/")[1], len(order)))


def setup_names(page: Page) -> dict[str, Any]:
    """Return what the page's setup defines, at sizes that print by their letters where it has matrices."""
    code = re.sub(
        r"^([a-z](?:, [a-z])+) = [\d, ]+$",
        lambda m: f"{m[1]} = {', '.join(str(SIZES[x]) for x in m[1].split(', '))}",
        page.setup,
        flags=re.M,
    )
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, "setup", "exec"), names)
    return names


def formula(statement: Statement, names: dict[str, Any]) -> str:
    """Return the formula of a statement: typed where the call gives numbers, else what the call prints."""
    if statement.formula:
        return f"```math\n{statement.formula}\n```"
    if not statement.call or statement.call.startswith(("print(", "hk.sharpness", "hk.blockwise_lr")):
        return ""
    found = eval(statement.call, names)
    if isinstance(found, Derivation):
        return as_math([*found.story.values, *found.story.rows])
    if not isinstance(found, Matrix):
        raise TypeError(f"{statement.number}: the call returns {type(found).__name__}, which prints no formula; give formula=")
    with dimensions(SizeName(SIZES)):
        return as_math([(statement.left, found.latex())])


def verdicts(rows: list[Claim]) -> list[str]:
    """Return the rows as a list: verdict, link, statement, correction."""
    lines = []
    for row in rows:
        name = row.id if row.paper == "ours" else row.id.split("/")[1]
        place, statement = markdown_text(row.place), markdown_text(row.statement)
        text = f"- **{verdict_of(row)}** [`{name}`](../claims.md#{row.anchor}) {place}: {statement}."
        parts = [(name, words) for name, words in (("Needs", row.assumption), ("Correct", row.corrected)) if words]
        lines.append(" ".join([text, *(f"{name}: {markdown_text(words)}." for name, words in parts)]))
    return lines


def page(paper: str) -> str:
    """Return a paper's page."""
    known, found = PAPERS[paper], PAGES[paper]
    names = setup_names(found)
    count = len(claims(paper=paper))
    source = ", ".join(
        text
        for text in (known.authors, f"[arXiv:{known.arxiv}](https://arxiv.org/abs/{known.arxiv})" if known.arxiv else "")
        if text
    )
    lines = [f"# {known.title}", "", f"{source.rstrip('.')}. {found.about}", ""]
    lines += [
        "For each numbered statement this page has the call that computes it, the correct formula, and verdicts on the print. "
        "`python -m papers show ID` runs the counterexample of the verdict with that ID. "
        f"[The ledger](../claims.md#{paper}) has all {count} verdicts, [the errata](../errata/{paper}.md) the most important. "
        f"{found.more}".rstrip(),
        "",
        "```python",
        found.setup,
        "```",
    ]
    shown: dict[str, str] = {}
    for statement in found.statements:
        rows = rows_of(paper, statement)
        lines += ["", f"## {statement.number}: {statement.title}", ""]
        lines += ["```python", statement.call, "```", ""] if statement.call else []
        made = formula(statement, names)
        first = shown.setdefault(made, statement.number)
        if made:
            lines += [made if first == statement.number else f"The formula of {first}.", ""]
        lines += [statement.note, ""] if statement.note else []
        lines += verdicts(rows) or ([NO_ROW] if statement.call else [])
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def index() -> str:
    """Return the overview of the papers."""
    lines = [
        "# The papers",
        "",
        "Four papers, statement by statement, with the call, the formula that holds, and the verdict.",
        "",
    ]
    lines += ["| paper | numbered statements | rows of the ledger | wrong prints | |", "|---|---|---|---|---|"]
    for paper in PAGES:
        rows = claims(paper=paper)
        links = f"[all rows](../claims.md#{paper}), [corrections](../errata/{paper}.md)"
        lines.append(
            f"| [{PAPERS[paper].title}]({paper}.md) | {len(PAGES[paper].statements)} | {len(rows)} | {in_words(rows)} | {links} |"
        )
    lines += [
        "",
        '`hessiankit.derive("curvature-gap/thm3")` returns the formula of a derivative as an expression that can be evaluated.',
        "On the command line, `hessiankit derive curvature-gap/thm3` also prints the verdicts.",
        "`python -m papers show curvature-gap/thm3-full` runs the counterexample.",
        "The figures of the papers are redrawn in the [gallery](../gallery.md).",
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    return {"index.md": index(), **{f"{paper}.md": page(paper) for paper in PAGES}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
