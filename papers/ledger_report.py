"""What running the ledger gave: row by row whether its verdict was found again, and by which number."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hessiankit.support.files import WithDict
from hessiankit.support.progress import Tell
from hessiankit.support.tables import Piece, Printed, table
from papers.claim import Claim, Evidence

HEADERS = ("id", "place", "verdict", "reproduced", "evidence", "seconds")


@dataclass(frozen=True)
class LedgerRow(WithDict):
    """A row that was run.

    Attributes:
        claim: The row.
        evidence: What was found, or None if the computation failed.
        seconds: What it took.
        error: Type and first line of the failure, or "".
    """

    claim: Claim
    evidence: Evidence | None
    seconds: float
    error: str = ""

    _derived, _hidden = ("reproduced",), ("claim",)

    @property
    def reproduced(self) -> bool:
        """Whether the verdict was found again."""
        return self.evidence is not None and self.evidence.reproduced

    def __str__(self) -> str:
        found = self.error or str(self.evidence)
        state = "reproduced" if self.reproduced else "NOT reproduced"
        return f"{self.claim.id} ({self.claim.place}): {self.claim.verdict} {state}: {found}"

    def to_dict(self) -> dict[str, Any]:
        return {**self.claim.to_dict(), **super().to_dict()}


@dataclass(frozen=True, repr=False)
class LedgerReport(Printed, WithDict):
    """What :meth:`Ledger.run` found; true if every verdict was found again. Prints as a table."""

    rows: tuple[LedgerRow, ...]
    seed: int
    seconds: float

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[LedgerRow, ...]:
        """The rows whose verdict was not found again."""
        return tuple(row for row in self.rows if not row.reproduced)

    def to_dict(self) -> dict[str, Any]:
        return {"reproduced": bool(self), "torch": torch.__version__, **super().to_dict()}

    def table_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table's rows."""
        for row in self.rows:
            reproduced, found = "yes" if row.reproduced else "NO", row.error or str(row.evidence)
            yield row.claim.id, row.claim.place, row.claim.verdict, reproduced, found, f"{row.seconds:.2f}"

    @property
    def summary(self) -> str:
        """One line: how many verdicts were found again, how long it took."""
        shows = [row.evidence.shows if row.evidence is not None else "" for row in self.rows]
        apart = sum(x in ("nothing", "figure") for x in shows)
        ran, good = len(self.rows) - apart, sum(row.reproduced for row in self.rows) - apart
        rest = f", {apart} not run" if apart else ""
        return f"{good} of {ran} verdicts reproduced{rest}; seed {self.seed}, {self.seconds:.1f} s, torch {torch.__version__}"

    def _headline(self) -> str:
        return self.summary

    def _parts(self) -> Iterator[Piece]:
        rank = [not row.reproduced for row in self.rows]
        prose, drop = ("place", "evidence"), ("seconds", "place", "evidence")
        yield table(HEADERS, self.table_rows(), left=5, prose=prose, drop=drop, rank=rank, ranked="not reproduced")
        yield from map(str, self.failures)
        yield self.summary


def run_rows(claims: Iterable[Claim], *, seed: int = 0, progress: Tell | None = None) -> LedgerReport:
    """Compute the evidence of each row; a computation that fails is a row that is not reproduced."""
    start = time.perf_counter()
    todo = tuple(claims)
    rows = []
    for done, claim in enumerate(todo):
        if progress is not None:
            progress(claim.id, done, len(todo))
        rows.append(run_row(claim, seed))
    if progress is not None:
        progress("claims", len(todo), len(todo))
    return LedgerReport(tuple(rows), seed, time.perf_counter() - start)


def run_row(claim: Claim, seed: int = 0) -> LedgerRow:
    """Compute the evidence of one row."""
    start = time.perf_counter()
    try:
        with torch.enable_grad():
            evidence, error = claim.evidence(seed), ""
    except Exception as reason:  # the other rows are still to be run
        evidence, error = None, f"{type(reason).__name__}: {str(reason).strip().splitlines()[0] if str(reason).strip() else ''}"
    return LedgerRow(claim, evidence, time.perf_counter() - start, error)
