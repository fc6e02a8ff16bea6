"""What became of each identity, as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hessiankit.tables import Piece, Printed, Table, table


@dataclass(frozen=True)
class IdentityRow:
    """One identity.

    Attributes:
        family: "linear maps", "logits", "norm scale", "row mean" or "key bias".
        name: The parameters A that move, and after ``|`` those, C, that move against them.
        statement: The identity; g is the gradient of the parameters in question.
        max_rel_error: Largest violation, relative to the size of the terms that must cancel in its block.
        passed: Whether it lies within the tolerance.
    """

    family: str
    name: str
    statement: str
    max_rel_error: float
    passed: bool


@dataclass(frozen=True, repr=False)
class IdentityReport(Printed):
    """What :func:`identities` found. True when every identity holds; also where none applies, see ``rows``.

    Attributes:
        rows: One for each structure of the module that implies an identity.
        skipped: What would hold exactly with eps = 0 and is not checked.
        rtol: The tolerance.
        seconds: Time taken, the Hessian's own not included.
    """

    rows: tuple[IdentityRow, ...] = ()
    skipped: tuple[str, ...] = ()
    rtol: float = 1e-10
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every identity holds."""
        return all(row.passed for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def max_rel_error(self) -> float:
        """The largest error of all rows; 0 where there is none."""
        return max((row.max_rel_error for row in self.rows), default=0.0)

    @property
    def verdict(self) -> str:
        """One line that says what was found."""
        if not self.rows:
            return "no identity applies to this module"
        failed = [row for row in self.rows if not row.passed]
        if failed:
            worst = max(failed, key=lambda row: row.max_rel_error)
            where = f"{worst.family} of {worst.name}: {worst.max_rel_error:.1e}"
            return f"FAILED: {len(failed)} of {len(self.rows)} identities; the worst is {where} (tolerance {self.rtol:.0e})"
        return f"PASSED: {len(self.rows)} identities hold to {self.max_rel_error:.1e} (tolerance {self.rtol:.0e})"

    def table_of_rows(self) -> Table:
        """Return one row an identity: family, parameters, statement, error."""
        return table(
            ("identity", "parameters", "statement", "error"),
            ((r.family, r.name, r.statement, f"{r.max_rel_error:.1e}{'' if r.passed else ' FAIL'}") for r in self.rows),
            left=3,
            names=[name for row in self.rows for name in re.split(r", | \| ", row.name)],
            prose=("parameters", "statement"),
            drop=("statement",),
            rank=[row.max_rel_error if row.passed else math.inf for row in self.rows],
            ranked="largest error",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python data, ready for JSON."""
        return {"passed": self.passed, "verdict": self.verdict, **asdict(self)}

    def _headline(self) -> str:
        return self.verdict

    def _parts(self) -> Iterator[Piece]:
        yield self.table_of_rows()
        yield from (f"skipped: {s}" for s in self.skipped)
        yield self.verdict
