"""``hessiankit.claims``: the ledger, or some rows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, overload

from hessiankit.support.arguments import checked
from hessiankit.support.errors import unknown
from hessiankit.support.progress import Tell
from hessiankit.support.tables import Piece, Printed, table
from papers.claim import PAPERS, VERDICTS, Claim, Verdict
from papers.errata import ERRATA, errata_page
from papers.ledger_report import LedgerReport, run_rows
from papers.pages import html_page, in_words, markdown_page, plain
from papers.registry import rows

HEADERS = ("id", "place", "verdict", "statement")


@dataclass(frozen=True, repr=False)
class Ledger(Printed, Sequence[Claim]):
    """Rows of the ledger, in the papers' order: a sequence of :class:`Claim` that prints as a table.

    Attributes:
        rows: The rows.
    """

    rows: tuple[Claim, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Claim: ...
    @overload
    def __getitem__(self, index: slice) -> Ledger: ...
    def __getitem__(self, index: int | slice) -> Claim | Ledger:
        return Ledger(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.rows)

    def counts(self) -> dict[str, dict[Verdict, int]]:
        """Return how many rows each paper has of each verdict."""
        found = Counter((row.paper, row.verdict) for row in self.rows)
        papers = [paper for paper in PAPERS if any(row.paper == paper for row in self.rows)]
        return {paper: {v: found[paper, v] for v in VERDICTS if found[paper, v]} for paper in papers}

    def run(self, *, seed: int = 0, progress: Tell | None = None) -> LedgerReport:
        """Find every verdict again.

        Args:
            seed: Of all random numbers.
            progress: Told (id, rows done, rows in all) before each row; see ``hessiankit.support.progress``.

        Returns:
            A report that is true if every verdict was found again.
        """
        return run_rows(self.rows, seed=seed, progress=progress)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python values."""
        return {"counts": self.counts(), "rows": [row.to_dict() for row in self.rows]}

    def markdown(self, report: LedgerReport | None = None) -> str:
        """Return the rows as a Markdown page, one table a paper, with what a run of them found."""
        return markdown_page(self.rows, self.counts(), report)

    def errata(self) -> dict[str, str]:
        """Run the most consequential rows of each paper and return its page of corrections, by paper."""
        rows = {row.id: row for row in self.rows}
        papers = [paper for paper in ERRATA if all(f"{paper}/{name}" in rows for name, _ in ERRATA[paper].wrong)]
        wanted = [rows[f"{paper}/{name}"] for paper in papers for name, _ in ERRATA[paper].wrong]
        ran = {row.claim.id: row for row in run_rows(wanted).rows}
        return {paper: errata_page(paper, rows, ran) for paper in papers}

    def html(self, report: LedgerReport | None = None) -> str:
        """Return the rows as an HTML page, with what a run of them found."""
        return html_page(self.rows, self.counts(), report)

    def table_rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the table's rows."""
        for row in self.rows:
            yield row.id, row.place, row.verdict, plain(row.statement)

    def _headline(self) -> str:
        return f"{len(self)} rows; {'; '.join(self._summary())}"

    def _parts(self) -> Iterator[Piece]:
        yield table(HEADERS, self.table_rows(), left=4, prose=("place", "statement"), drop=("place", "statement"))
        yield from self._summary()

    def _summary(self) -> Iterator[str]:
        for paper, found in self.counts().items():
            verdicts = ", ".join(f"{number} {verdict}" for verdict, number in found.items())
            wrong = in_words([row for row in self.rows if row.paper == paper])
            yield f"{paper}: {sum(found.values())} rows: {verdicts}{f'; wrong: {wrong}' if 'WRONG AS PRINTED' in found else ''}"


@checked("claims")
def claims(*, paper: str | None = None, verdict: str | None = None, id: str | None = None) -> Ledger:
    """Return the statements of the papers with their verdicts, each one runnable.

    Args:
        paper: Only this paper's: curvature-gap, sharpness-disparity, curse-of-depth, hybridnorm, or ours.
        verdict: Only rows with this verdict, e.g. "WRONG AS PRINTED" (in any case).
        id: Only rows whose id matches, e.g. "hybridnorm/eq3*".

    Raises:
        InputError: If the paper or the verdict is not known, or no row has such an id.

    >>> found = claims(id="hybridnorm/eq19")
    >>> bool(found.run(seed=3))
    True
    """
    if paper is not None and paper not in PAPERS:
        raise unknown("claims", "paper", paper, PAPERS)
    if verdict is not None and verdict.upper() not in VERDICTS:
        raise unknown("claims", "verdict", verdict, VERDICTS)
    chosen = rows(paper)
    found = [row for row in chosen if id is None or fnmatchcase(row.id, id)]
    if id is not None and not found:
        raise unknown("claims", "id", id, [row.id for row in chosen], "`python -m papers list`")
    return Ledger(tuple(row for row in found if verdict is None or row.verdict == verdict.upper()))
