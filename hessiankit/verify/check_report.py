"""The report of :func:`hessiankit.check`: rows, health of the references, identities, exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessiankit.curvature.dense import Hessian
from hessiankit.curvature.operator import HessianOperator
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Detail, Piece, Printed, Table, table
from hessiankit.theory.exact.check import ExactRow
from hessiankit.verify.comparison import FORMULAS, SAME_CALL, CheckRow
from hessiankit.verify.health import Health
from hessiankit.verify.identities import IdentityReport

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture

BARS = 30  # rows of a picture
NOTES = 3  # wrong blocks of a user's closed form of which print() says more; .table() has all


@dataclass(frozen=True, repr=False)
class CheckReport(Printed, WithDict):
    """Result of :func:`check`. True when every row passed and at least two independent references are healthy.

    Attributes:
        rows: One for each block pair and healthy reference, and for each vec_r formula.
        health: The examination of each reference, healthy or not.
        closed_form: The closed form under test: the Hessian, or its operator where products were compared.
        rtol: The tolerance.
        comparison: "every entry", or how many directions a parameter.
        seconds: Total time.
        remarks: Causes that break references, and comparisons that were left out.
        lowered: Why the tolerance is wider than the dtype needs: the operation that computes in a lower precision; else "".
        identities: Exact identities of the gradient and the Hessian that the module's structure implies.
        exact: The vec_r formulas of the module's blocks in exact arithmetic, with ``exact=True``.
        asked: The call in words: module, loss, inputs, dtype, and the seed of random numbers.
    """

    rows: tuple[CheckRow, ...]
    health: tuple[Health, ...]
    closed_form: Hessian | HessianOperator
    rtol: float
    comparison: str
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    lowered: str = ""
    identities: IdentityReport = field(default_factory=IdentityReport)
    exact: tuple[ExactRow, ...] = ()
    asked: str = ""

    _derived, _hidden = ("passed", "verdict"), ("closed_form",)

    @property
    def hessian(self) -> Hessian:
        """The Hessian under test.

        Raises:
            InputError: Products were compared, and there is no matrix.
        """
        if not isinstance(self.closed_form, Hessian):
            raise InputError(
                f"CheckReport.hessian: {self.closed_form.shape[0]:,} parameters were compared by products, without a matrix; "
                "use .closed_form, the operator"
            )
        return self.closed_form

    @property
    def healthy_groups(self) -> tuple[str, ...]:
        """The independent differentiation paths that agree among each other."""
        return tuple(dict.fromkeys(h.group for h in self.health if h.healthy))

    @property
    def passed(self) -> bool:
        """Whether the closed form agrees with two healthy, independent references everywhere, and all exact checks hold."""
        agrees = len(self.healthy_groups) >= 2 and all(row.passed for row in self.rows)
        return agrees and self.identities.passed and all(row.passed for row in self.exact)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def references(self) -> tuple[str, ...]:
        """The references that block pairs are compared with."""
        return tuple(dict.fromkeys(row.reference for row in self.rows if not row.of_same_call))

    @property
    def max_rel_error(self) -> float:
        """The largest error of all rows."""
        return max((row.max_rel_error for row in self.rows), default=float("nan"))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        tolerance = f"{self.rtol:.0e}{f', as {self.lowered}' if self.lowered else ''}"
        if len(self.healthy_groups) < 2:
            unconfirmed = ", ".join(h.reference for h in self.health if h.alone)
            evidence = (
                f"{unconfirmed} alone" if unconfirmed else f"only {len(self.healthy_groups)} independent healthy reference(s)"
            )
            return (
                f"NOT VERIFIED: {evidence}, two independent ones are needed. "
                "Name more references in against=..., or see their health for what broke them."
                + "".join(f" Note: {r}." for r in self.remarks)
            )
        failures = [row for row in self.rows if not row.passed]
        if failures:
            worst = max(failures, key=lambda row: row.max_rel_error)
            place = f"{worst.name} against {worst.reference}: {worst.max_rel_error:.1e}"
            sentence = f"FAILED: {len(failures)} of {len(self.rows)} rows disagree; the worst is {place} (tolerance {tolerance})"
            return sentence + "".join(f". Note: {r}" for r in (worst.note, *self.remarks) if r)
        if not self.identities:
            return f"FAILED: the references agree, but an exact identity does not hold. {self.identities.verdict}"
        error = next((row for row in self.exact if not row.passed), None)
        if error is not None:
            return f"FAILED: the references agree, but a formula is wrong in exact arithmetic. {error.name}: {error.note}"
        return (
            f"PASSED: {len(self.rows)} rows; largest error {self._agreement()} (tolerance {tolerance}, {self.comparison})"
            + (f"; {len(self.identities.rows)} identities to {self.identities.max_rel_error:.1e}" if self.identities.rows else "")
            + (f"; {sum(row.entries for row in self.exact)} entries equal in exact arithmetic" if self.exact else "")
        )

    def _agreement(self) -> str:
        """Return how far each reference agrees, and which of them cannot resolve the tolerance, by their own error estimate."""
        parts = []
        for reference in self.references:
            rows = [row for row in self.rows if row.reference == reference and not row.of_same_call]
            worst = max(row.max_rel_error for row in rows)
            qualifier = " within its own error" if worst > self.rtol else ""
            parts.append(f"{reference} {worst:.1e}{qualifier}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python data, ready for JSON."""
        return {**super().to_dict(), "hessian": self.closed_form.to_dict() if isinstance(self.closed_form, Hessian) else None}

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw the error of each block pair against each reference, the largest first; a line marks the tolerance.

        A reference passes beyond the line where it states an error of its own, as central differences do.

        Args:
            path: Path of the picture; its suffix chooses the format: ``.png``, ``.svg`` or ``.pdf``, or ``.csv`` for
                the numbers.

        Raises:
            InputError: The file cannot be written.
        """
        from hessiankit.curvature.plots import pair_labels, row_chart  # only here: Matplotlib

        errors, references = self._by_pair()
        pairs = sorted(errors, key=lambda name: _worst(errors[name]), reverse=True)
        largest = pairs[:BARS]
        bars = {r: [errors[name][r].max_rel_error if r in errors[name] else math.nan for name in largest] for r in references}
        title = self.verdict.partition(":")[0] + (
            "" if largest == pairs else f"; the {len(largest)} largest of {len(pairs)} pairs"
        )
        labels = pair_labels(largest, _parameters(errors))
        axis = "largest difference, relative to the block's largest entry"
        return row_chart("CheckReport.plot", labels, bars, axis=axis, title=title, path=path, line=(self.rtol, "tolerance"))

    def _by_pair(self) -> tuple[dict[str, dict[str, CheckRow]], list[str]]:
        """Return the rows of the block pairs, by pair and reference, and the references."""
        errors: dict[str, dict[str, CheckRow]] = {}
        for row in self.rows:
            if not row.of_same_call and row.reference != FORMULAS:
                errors.setdefault(row.name, {})[row.reference] = row
        return errors, [r for r in self.references if r != FORMULAS]

    def pair_table(self) -> Table:
        """Return the table of the block pairs: size, arithmetic, norms, and the error against each reference."""
        errors, references = self._by_pair()
        rows = []
        for name, by_reference in errors.items():
            cells = [by_reference[r].shown if r in by_reference else "" for r in references]
            if not isinstance(self.closed_form, Hessian):
                rows.append((name, *cells))
                continue
            i, j = name.split(" x ")
            size = "{} x {}".format(*self.closed_form.block(i, j).shape)
            methods = "/".join(dict.fromkeys(row.method for row in by_reference.values()))
            norms = (f"{self.closed_form.spectral_norm(i, j):.4g}", f"{self.closed_form.frobenius_norm(i, j):.4g}")
            rows.append((name, size, methods, *norms, *cells))
        columns = ("size", "method", "||.||_2", "||.||_F") if isinstance(self.closed_form, Hessian) else ()
        agree = [r for r in references if all(by_reference[r].passed for by_reference in errors.values() if r in by_reference)]
        return table(
            ("block pair", *columns, *references),
            rows,
            left=3 if columns else 1,
            names=_parameters(errors),
            drop=("method", "||.||_F", "size", *reversed(agree[1:]), "||.||_2"),
            rank=[_worst(by_reference) for by_reference in errors.values()],
            ranked="largest error",
        )

    def health_lines(self) -> list[str]:
        """Return one line a reference: healthy or not, why, and its time."""
        states = [h.state if h.healthy or h.alone else "UNHEALTHY" for h in self.health]
        lines = [f"{h.reference}: {state}: {h.reason} ({h.seconds:.1f} s)" for h, state in zip(self.health, states, strict=True)]
        lines += [f"note: {remark}" for remark in self.remarks]
        for kind, words in SAME_CALL.items():
            rows = [row for row in self.rows if row.of_same_call and row.name.partition(":")[0] == kind]
            if rows:
                worst = max(rows, key=lambda row: (not row.passed, row.max_rel_error))
                suffix = "" if all(row.passed for row in rows) else " FAIL"
                agrees = f"agrees with {worst.reference} to {worst.max_rel_error:.1e}"
                lines.append(f"{words}: {'refused' if math.isinf(worst.max_rel_error) else agrees}{suffix}")
        formulas = [row.max_rel_error for row in self.rows if row.reference == FORMULAS]
        if formulas:
            pairs = f"{len(formulas)} block pairs at tiny unequal sizes"
            lines.append(f"vec_r formulas of the chapters against the fast path: {pairs} agree to {max(formulas):.1e}")
        return lines

    def _headline(self) -> str:
        return self.verdict

    def _parts(self) -> Iterator[Piece]:
        hessian = self.closed_form
        title = f"{self.asked}; " if self.asked else ""
        title += f"{hessian.shape[0] if isinstance(hessian, HessianOperator) else hessian.matrix.shape[0]:,} parameters"
        title += f", closed form in {hessian.seconds:.2f} s" if isinstance(hessian, Hessian) else ", by products"
        if hessian.fallbacks:
            title += f"; differentiated automatically one by one: {', '.join(hessian.fallbacks)}"
        if isinstance(hessian, Hessian) and hessian.unused:
            title += f"; no effect on the loss: {', '.join(map(repr, hessian.unused))}"
        yield title
        pairs = self.pair_table()
        if pairs.rows:
            yield pairs
        notes = {
            row.name: f"{row.name} is off by {row.max_rel_error:.1e} of its largest entry; {row.note}"
            for row in reversed(self.rows)
            if row.note  # hessiankit's is the first of a block's rows
        }
        yield from (line if k < NOTES else Detail(line) for k, line in enumerate(reversed(notes.values())))
        if self.identities.rows:
            yield Detail(self.identities.table_of_rows())
        if self.exact:
            headers = ("formulas in exact arithmetic", "method", "entries", "chance to pass if wrong", "verdict")
            rows = [
                (f"{row.name} ({row.size})", f"exact {row.method}", str(row.entries), f"<= {row.chance:.0e}", row.verdict)
                for row in self.exact
            ]
            yield Detail(table(headers, rows, left=2, prose=headers[:1]))
        yield Detail("references:")
        for line in self.health_lines():  # the cause of a failure is on the first screen
            yield f"  {line}" if line.startswith("note: ") and not self.passed else Detail(f"  {line}")
        names = [h.reference for h in self.health if not h.healthy and not h.alone]
        if names:
            yield f"UNHEALTHY, and not counted: {', '.join(names)}"
        yield self.verdict


def _worst(rows: Mapping[str, CheckRow]) -> float:
    return max(row.max_rel_error if row.passed else math.inf for row in rows.values())


def _parameters(pairs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(part for name in pairs for part in name.split(" x ")))
