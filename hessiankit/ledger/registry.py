"""Where the rows come from: each is a function under ``@claim``, in the packages of the papers, in reading order."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hessiankit.ledger.claim import PAPERS, VERDICTS, Claim, Evidence, Verdict
from hessiankit.ledger.evidence import not_run
from hessiankit.ledger.not_run import NOT_RUN

_ROWS: dict[str, Claim] = {}


def claim(
    id: str,
    place: str,
    verdict: Verdict,
    *,
    uses: Sequence[Any] = (),
    statement: str | None = None,
    corrected: str | None = None,
) -> Callable[[Callable[[int], Evidence]], Callable[[int], Evidence]]:
    """Enter the decorated function, seed -> Evidence, as a row of the ledger. Its docstring is the statement, with LaTeX between
    dollars, then a paragraph that begins with "Needs:" (what it assumes and does not say) or "Correct:" (what is true instead).

    Args:
        id: "paper/name", the paper a key of ``PAPERS``; "ours/..." for statements that no paper makes.
        place: Where it is printed, e.g. "Theorem A.3, Eq. 28".
        verdict: One of ``VERDICTS``.
        uses: Functions or classes of this code base that hold its closed form.
        statement: The statement where one function makes several rows.
        corrected: What is true instead, for the same case.

    Raises:
        ValueError: If the id is taken, or a part is missing or unknown.
    """
    if id in _ROWS:
        raise ValueError(f"claim: the id {id!r} is taken; ids are unique")
    if id.split("/")[0] not in PAPERS or "/" not in id or not all(id.split("/")):
        raise ValueError(f"claim: the id {id!r} does not begin with a paper; expected one of {', '.join(PAPERS)}, then /name")
    if verdict not in VERDICTS:
        raise ValueError(f"claim: {id}: unknown verdict {verdict!r}; expected one of {', '.join(VERDICTS)}")

    def enter(compute: Callable[[int], Evidence]) -> Callable[[int], Evidence]:
        parts = _paragraphs(compute.__doc__ or "")
        parts |= {name: text for name, text in (("statement", statement), ("Correct", corrected)) if text}
        needed = {"WRONG AS PRINTED": "Correct", "HOLDS UNDER ASSUMPTION": "Needs"}.get(verdict)
        if not place:
            raise ValueError(f"claim: {id}: {verdict} needs place=...")
        for name in ("statement", *([needed] if needed else [])):
            if not parts.get(name):
                what = "a statement" if name == "statement" else f"a paragraph that begins with '{name}:'"
                raise ValueError(f"claim: {id}: {verdict} needs {what} in its docstring")
        chapter = compute.__module__.removeprefix("hessiankit.ledger.")
        sources = tuple(f"{f.__module__}.{f.__qualname__}" for f in uses)
        correct, needs = parts.get("Correct"), parts.get("Needs")
        _ROWS[id] = Claim(id, place, parts["statement"], verdict, compute, correct, needs, sources, chapter)
        return compute

    return enter


def _paragraphs(text: str) -> dict[str, str]:
    """Return the paragraphs of a row's docstring by name: statement, Needs, Correct."""
    found = {}
    for paragraph in text.strip().split("\n\n"):
        words = " ".join(paragraph.split())
        name, colon, rest = words.partition(": ")
        known = colon and name in ("Needs", "Correct")
        found[name if known else "statement"] = rest if known else words
    return found


def rows(paper: str | None = None) -> tuple[Claim, ...]:
    """Return every row, or those of one paper, in reading order: papers, then chapters as their packages list them, then what is
    not run."""
    chapters = [chapter for name in PAPERS if paper in (None, "ours", name) for chapter in _load(name)]
    order = {chapter: k for k, chapter in enumerate([*chapters, "not_run"])}
    papers = list(PAPERS)
    wanted = [row for row in (*_ROWS.values(), *_not_run()) if row.chapter in order and paper in (None, row.paper)]
    return tuple(sorted(wanted, key=lambda row: (papers.index(row.paper), order[row.chapter])))


@cache
def _not_run() -> tuple[Claim, ...]:
    return tuple(
        Claim(id, place, statement, "NOT RUN", lambda seed, reason=reason: not_run(reason), chapter="not_run")  # type: ignore[misc]
        for id, place, statement, reason in NOT_RUN
    )


@cache
def _load(paper: str) -> tuple[str, ...]:
    """Import the chapters of a paper's package and return their names; rows of "ours" stand in any of them."""
    package = importlib.import_module(f"hessiankit.ledger.{PAPERS[paper].package}")
    chapters = tuple(f"{PAPERS[paper].package}.{chapter}" for chapter in package.CHAPTERS)
    for chapter in chapters:
        importlib.import_module(f"hessiankit.ledger.{chapter}")
    return chapters
