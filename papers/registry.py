"""Where the rows come from: each is a function under ``@claim``, in the packages of the papers, in reading order."""

from __future__ import annotations

import copyreg
import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from papers.claim import PAPERS, SEVERITIES, VERDICTS, Claim, Evidence, Verdict
from papers.evidence import at_small_scale, not_run

_ROWS: dict[str, Claim] = {}
NAMES = ("Needs", "Correct", "Severity", "Follows")
"""Names of the paragraphs of a row's docstring behind its statement."""


def claim(
    id: str, place: str, verdict: Verdict, *, uses: Sequence[Any] = (), statement: str | None = None, corrected: str | None = None
) -> Callable[[Callable[[int], Evidence]], Callable[[int], Evidence]]:
    """Enter the decorated function, seed -> Evidence, as a row of the ledger. Its docstring is the statement, with LaTeX between
    dollars, then paragraphs that begin a line: "Needs:" (what it assumes and does not say), "Correct:" (what is true instead),
    "Severity:" (one of ``SEVERITIES``) and "Follows:" (ids of the paper's rows whose error it inherits, with commas).

    Args:
        id: The row's name, in a module of a paper's package; "ours/..." for statements that no paper makes.
        place: Where it is printed, e.g. "Theorem A.3, Eq. 28".
        verdict: One of ``VERDICTS``.
        uses: Functions or classes of this code base that hold its closed form.
        statement: The statement where one function makes several rows.
        corrected: What is true instead, for the same case.

    Raises:
        ValueError: If the id is taken, or a part is missing or unknown.
    """
    if verdict not in VERDICTS:
        raise ValueError(f"claim: {id}: unknown verdict {verdict!r}; expected one of {', '.join(VERDICTS)}")

    def enter(compute: Callable[[int], Evidence]) -> Callable[[int], Evidence]:
        package = compute.__module__.removeprefix("papers.").split(".")[0]
        name = id if "/" in id else f"{next((paper for paper in PAPERS if PAPERS[paper].package == package), '')}/{id}"
        if name in _ROWS:
            raise ValueError(f"claim: the id {name!r} is taken; ids are unique")
        if name.split("/")[0] not in PAPERS or not all(name.split("/")):
            raise ValueError(
                f"claim: the id {name!r} does not begin with a paper; expected one of {', '.join(PAPERS)}, then /name"
            )
        parts = _paragraphs(compute.__doc__ or "")
        parts |= {name: text for name, text in (("statement", statement), ("Correct", corrected)) if text}
        needed = {"WRONG AS PRINTED": ("Correct", "Severity"), "HOLDS UNDER ASSUMPTION": ("Needs",)}.get(verdict, ())
        if not place:
            raise ValueError(f"claim: {id}: {verdict} needs place=...")
        for part in ("statement", *needed):
            if not parts.get(part):
                what = "a statement" if part == "statement" else f"a paragraph that begins with '{part}:'"
                raise ValueError(f"claim: {id}: {verdict} needs {what} in its docstring")
        severity: Any = parts.get("Severity")
        if (severity is None) != (verdict != "WRONG AS PRINTED") or severity not in (None, *SEVERITIES):
            raise ValueError(f"claim: {id}: severity {severity!r} of {verdict}; a wrong print has one of {', '.join(SEVERITIES)}")
        chapter = compute.__module__.removeprefix("papers.")
        follows = tuple(f"{name.split('/')[0]}/{root}" for root in parts.get("Follows", "").split(", ") if root)
        sources = tuple(f"{f.__module__}.{f.__qualname__}" for f in uses)
        correct, needs = parts.get("Correct"), parts.get("Needs")
        found = Claim(name, place, parts["statement"], verdict, compute, correct, needs, sources, chapter, severity, follows)
        _ROWS[name] = found
        return compute

    return enter


def claims_of(
    module: str, compute: Callable[..., Evidence], verdict: Verdict, uses: Sequence[Any], *rows: tuple[Any, ...]
) -> None:
    """Enter several rows of one computation: each an id, a place, what the computation takes after the seed, and the text of a
    docstring; ``module`` is the one that they are written in, ``__name__``."""
    for id, place, *arguments, text in rows:

        def row(seed: int, arguments: tuple[Any, ...] = tuple(arguments)) -> Evidence:
            return compute(seed, *arguments)

        row.__doc__, row.__module__ = text, module
        claim(id, place, verdict, uses=uses)(row)


def _paragraphs(text: str) -> dict[str, str]:
    """Return the paragraphs of a row's docstring by name: statement, and those of ``NAMES``."""
    found = {}
    for paragraph in re.split(rf"\n+ *(?=(?:{'|'.join(NAMES)}): )", text.strip()):
        words = " ".join(paragraph.split())
        name, colon, rest = words.partition(": ")
        known = colon and name in NAMES
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
    """Return the rows of not_run.txt, and what figures show of them.

    Blocks of three lines: "id | place", with "| INCONSISTENT" where reading decides; the statement; the reason.
    """
    shown = json.loads((Path(__file__).parent / "small_scale.json").read_text(encoding="utf-8"))
    blocks = Path(__file__).with_name("not_run.txt").read_text(encoding="utf-8").strip().split("\n\n")[1:]
    found = []
    for block in blocks:
        head, statement, reason = block.split("\n")
        id, place, *decided = head.split(" | ")
        one = shown.get(id)
        verdict = one["verdict"] if one else decided[0] if decided else "NOT RUN"
        evidence = at_small_scale(one["figure"], one["seen"], reason) if one else not_run(reason)
        found.append(Claim(id, place, statement, verdict, lambda seed, found=evidence: found, chapter="not_run"))  # type: ignore[arg-type, misc]
    return tuple(found)


@cache
def _load(paper: str) -> tuple[str, ...]:
    """Import the chapters of a paper's package and return their names; rows of "ours" stand in any of them."""
    package = importlib.import_module(f"papers.{PAPERS[paper].package}")
    chapters = tuple(f"{PAPERS[paper].package}.{chapter}" for chapter in package.CHAPTERS)
    for chapter in chapters:
        importlib.import_module(f"papers.{chapter}")
    return chapters


def _with_its_computation(parts: dict[str, Any]) -> Claim:
    return replace(next(row for row in rows() if row.id == parts["id"]), **parts)


def _by_id(row: Claim) -> tuple[Any, ...]:
    return _with_its_computation, ({f.name: getattr(row, f.name) for f in fields(row) if f.name != "compute"},)


copyreg.pickle(Claim, _by_id)  # what computes a row is code, which is found by the row's id
