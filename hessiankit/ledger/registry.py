"""Where the rows come from: each is a function under ``@claim``, in the packages of the papers, in reading order."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hessiankit.ledger.claim import PAPERS, VERDICTS, Claim, Evidence, Verdict

_ROWS: dict[str, Claim] = {}


def claim(
    id: str,
    *,
    place: str,
    statement: str,
    verdict: Verdict,
    corrected: str | None = None,
    assumption: str | None = None,
    uses: Sequence[Any] = (),
) -> Callable[[Callable[[int], Evidence]], Callable[[int], Evidence]]:
    """Enter the decorated function, seed -> Evidence, as a row of the ledger.

    Args:
        id: "paper/name", the paper a key of ``PAPERS``; "ours/..." for statements that no paper makes.
        place: Where it stands, e.g. "Theorem A.3, Eq. 28".
        statement: What it says; LaTeX between dollars.
        verdict: One of ``VERDICTS``.
        corrected: What is true instead. Needed where the verdict is WRONG AS PRINTED.
        assumption: What it needs. Needed where the verdict is HOLDS UNDER ASSUMPTION.
        uses: Functions or classes of this code base that hold its closed form.

    Raises:
        ValueError: If the id is taken, or a part is missing or unknown.
    """
    if id in _ROWS:
        raise ValueError(f"claim: the id {id!r} is taken; ids are unique")
    if id.split("/")[0] not in PAPERS or "/" not in id or not all(id.split("/")):
        raise ValueError(f"claim: the id {id!r} does not begin with a paper; expected one of {', '.join(PAPERS)}, then /name")
    if verdict not in VERDICTS:
        raise ValueError(f"claim: {id}: unknown verdict {verdict!r}; expected one of {', '.join(VERDICTS)}")
    needed = {"WRONG AS PRINTED": ("corrected", corrected), "HOLDS UNDER ASSUMPTION": ("assumption", assumption)}
    for name, value in (("place", place), ("statement", statement), *([needed[verdict]] if verdict in needed else [])):
        if not value:
            raise ValueError(f"claim: {id}: {verdict} needs {name}=...")

    def enter(compute: Callable[[int], Evidence]) -> Callable[[int], Evidence]:
        chapter = compute.__module__.removeprefix("hessiankit.ledger.")
        sources = tuple(f"{f.__module__}.{f.__qualname__}" for f in uses)
        _ROWS[id] = Claim(id, place, statement, verdict, compute, corrected, assumption, sources, chapter)
        return compute

    return enter


def rows(paper: str | None = None) -> tuple[Claim, ...]:
    """Return every row, or those of one paper, in reading order: papers, then chapters as their packages list them."""
    chapters = [chapter for name in PAPERS if paper in (None, "ours", name) for chapter in _load(name)]
    order = {chapter: k for k, chapter in enumerate(chapters)}
    papers = list(PAPERS)
    wanted = [row for row in _ROWS.values() if row.chapter in order and paper in (None, row.paper)]
    return tuple(sorted(wanted, key=lambda row: (papers.index(row.paper), order[row.chapter])))


@cache
def _load(paper: str) -> tuple[str, ...]:
    """Import the chapters of a paper's package and return their names; rows of "ours" stand in any of them."""
    package = importlib.import_module(f"hessiankit.ledger.{PAPERS[paper].package}")
    chapters = tuple(f"{PAPERS[paper].package}.{chapter}" for chapter in package.CHAPTERS)
    for chapter in chapters:
        importlib.import_module(f"hessiankit.ledger.{chapter}")
    return chapters


def chapter_title(chapter: str) -> str:
    """Return the first line of a chapter's docstring, without its full stop."""
    text = importlib.import_module(f"hessiankit.ledger.{chapter}").__doc__ or chapter
    return text.strip().splitlines()[0].rstrip(".")
