"""What became of each identity, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hessiankit.tables import as_html, as_text, table


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
class IdentityReport:
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

    headers = ("identity", "parameters", "statement", "error")

    def table_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield one line an identity: family, parameters, statement, error."""
        for row in self.rows:
            yield row.family, row.name, row.statement, f"{row.max_rel_error:.1e}" + ("" if row.passed else " FAIL")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python data, ready for JSON."""
        return {"passed": self.passed, "verdict": self.verdict, **asdict(self)}

    def __repr__(self) -> str:
        return as_text(table(self.headers, self.table_rows(), left=3), *(f"skipped: {s}" for s in self.skipped), self.verdict)

    def _repr_html_(self) -> str:
        return as_html(self.headers, self.table_rows(), caption=self.verdict)
