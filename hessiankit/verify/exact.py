"""The exact check: every vec_r closed form in exact arithmetic, with no tolerance.

Two methods, neither of which shares anything with the closed forms:

- *rational*: the closed form on ``Fraction`` entries must equal (``==``) second-order Taylor arithmetic, entry by entry;
- *symbolic*: the closed form on symbols must equal ``sympy.diff`` identically, at the smallest sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hessiankit.verify.exact_case import Case, Comparison, Draw
from hessiankit.verify.exact_rational import RATIONAL
from hessiankit.verify.exact_symbolic import SYMBOLIC, is_identically_zero
from hessiankit.verify.jets import KinkError

_DRAWS = 100  # a drawn point may lie on a kink of relu; that many in a row do not


@dataclass(frozen=True)
class ExactRow:
    """The outcome of one exact check.

    Attributes:
        name: chapter and case.
        size: the dimensions of the check.
        method: "rational" (jets over the fractions) or "symbolic" (sympy.diff).
        passed: whether every entry of every block is equal.
        seconds: wall-clock time.
        note: what was compared, or the first block that differs.
    """

    name: str
    size: str
    method: str
    passed: bool
    seconds: float
    note: str

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{verdict:<6} {self.method:<8} {self.seconds:6.2f} s  {self.name} ({self.size}): {self.note}"


def chapters() -> tuple[str, ...]:
    """Return the chapters that ``check_exact`` knows.

    >>> "normalization" in chapters()
    True
    """
    return tuple(dict.fromkeys(case.chapter for case in (*RATIONAL, *SYMBOLIC)))


def check_exact(chapter: str | None = None, *, seed: int = 0) -> tuple[ExactRow, ...]:
    """Check the vec_r closed forms in exact arithmetic, with ``==``.

    Args:
        chapter: the module of ``derivations`` to check (see ``chapters``); None checks them all.
        seed: of the rational points and formal weights.

    Raises:
        ValueError: if there is no such chapter.

    >>> [(row.method, row.size, row.passed) for row in check_exact("loss")]
    [('rational', '2x3', True), ('rational', 'L=2 C=3', True), ('symbolic', 'L=1 C=3', True)]
    """
    if chapter is not None and chapter not in chapters():
        raise ValueError(f"check_exact: no exact check for the chapter {chapter!r}. There are {', '.join(chapters())}.")
    rows = [run_case(case, "rational", seed) for case in RATIONAL if chapter in (None, case.chapter)]
    return (*rows, *(run_case(case, "symbolic", seed) for case in SYMBOLIC if chapter in (None, case.chapter)))


def run_case(case: Case, method: str, seed: int = 0) -> ExactRow:
    """Run one case and report it; a closed form that raises fails its row and does not hide the others."""
    is_zero: Callable[[Any], bool] = is_identically_zero if method == "symbolic" else lambda difference: False
    start, failures, blocks, entries = time.perf_counter(), list[str](), 0, 0
    try:
        for comparison in _comparisons(case, seed):
            found = comparison.mismatch(is_zero)
            blocks, entries = blocks + 1, entries + comparison.expected.size
            if found is not None:
                failures.append(found)
    except Exception as error:  # reported in the row: the closed form under test may raise anything
        failures.append(f"{type(error).__name__}: {error}")
    if not blocks and not failures:
        failures.append("nothing was compared")
    note = f"{len(failures)} of {blocks or 1} blocks: {failures[0]}" if failures else f"{blocks} blocks, {entries} entries equal"
    return ExactRow(f"{case.chapter}: {case.name}", case.size, method, not failures, time.perf_counter() - start, note)


def _comparisons(case: Case, seed: int) -> Iterator[Comparison]:
    """Return the comparisons at the first drawn point that does not lie on a kink."""
    for attempt in range(_DRAWS):
        comparisons = case.build(Draw(f"{seed}/{case.chapter}/{case.name}/{attempt}"))
        try:
            return chain([next(comparisons)], comparisons)
        except KinkError:
            continue
        except StopIteration:
            return iter(())
    raise ValueError(f"{_DRAWS} points in a row lie on a kink")
