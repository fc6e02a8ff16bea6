"""The exact check: every vec_r closed form in exact arithmetic, with no tolerance.

Three methods, none of which shares anything with the closed forms:

- *rational*: the closed form on ``Fraction`` entries must equal (``==``) second-order Taylor arithmetic, entry by entry;
- *modular*: the same on residues modulo a large prime, where one random point leaves a chance of error that is known;
- *symbolic*: the closed form on symbols must equal ``sympy.diff`` identically, at the smallest sizes: a proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from hessiankit.blocks import TransformerBlock
from hessiankit.support.errors import InputError
from hessiankit.verify.block_structure import structure_of
from hessiankit.verify.exact_case import ExactCase, ExactComparison, RationalDraw, ResidueDraw
from hessiankit.verify.exact_cases import RATIONAL, SYMBOLIC
from hessiankit.verify.exact_placements import EQUATION_CASES, PLACEMENT_CASES, placement_case
from hessiankit.verify.exact_symbolic import SymbolicDraw, is_identically_zero
from hessiankit.verify.jets import KinkError
from hessiankit.verify.residues import VALUES

_ALL = (
    *((case, "rational") for case in RATIONAL),
    *((case, "symbolic") for case in SYMBOLIC),
    *((case, "modular") for case in PLACEMENT_CASES),
    *((case, "rational") for case in EQUATION_CASES),
)
DRAWS: dict[str, type[RationalDraw]] = {"rational": RationalDraw, "modular": ResidueDraw, "symbolic": SymbolicDraw}
TRIES = 100  # a drawn point may lie on a kink of relu; that many in a row do not


@dataclass(frozen=True)
class ExactRow:
    """The outcome of one exact check.

    Attributes:
        name: chapter and case.
        size: the dimensions of the check.
        method: "rational" (jets over the fractions), "modular" (jets over residues) or "symbolic" (sympy.diff).
        passed: whether every entry of every block is equal.
        seconds: wall-clock time.
        note: what was compared, or the first block that differs.
        entries: how many numbers were compared.
        degree: of the numerators of all differences, a bound; for residues only.
        chance: that a wrong formula passes, a bound (Schwartz and Zippel); None for fractions, where none is known.
    """

    name: str
    size: str
    method: str
    passed: bool
    seconds: float
    note: str
    entries: int = 0
    degree: int = 0
    chance: float | None = None

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{verdict:<6} {self.method:<8} {self.seconds:6.2f} s  {self.name} ({self.size}): {self.note}"


def chapters() -> tuple[str, ...]:
    """Return the chapters that ``check_exact`` knows.

    >>> "normalization" in chapters()
    True
    """
    return tuple(dict.fromkeys(case.chapter for case, _ in _ALL))


def check_exact(chapter: str | None = None, *, seed: int = 0) -> tuple[ExactRow, ...]:
    """Check the vec_r closed forms in exact arithmetic, with ``==``.

    Args:
        chapter: the module of ``derivations`` to check, or "placements" for whole blocks (see ``chapters``); None checks all.
        seed: of the points and formal weights.

    Raises:
        ValueError: if there is no such chapter.

    >>> [(row.method, row.size, row.passed) for row in check_exact("loss")]
    [('rational', '2x3', True), ('rational', 'L=2 C=3', True), ('symbolic', 'L=1 C=3', True)]
    """
    if chapter is not None and chapter not in chapters():
        raise ValueError(f"check_exact: no exact check for the chapter {chapter!r}. There are {', '.join(chapters())}.")
    return tuple(run_case(case, method, seed) for case, method in _ALL if chapter in (None, case.chapter))


def check_exact_blocks(module: nn.Module, *, seed: int = 0) -> tuple[ExactRow, ...]:
    """Check the closed forms of every ``TransformerBlock`` in a module in exact arithmetic.

    A formula depends on a block's structure (placement, kind of norms and activation, heads, mask, rotations, biases) and holds
    for all sizes, so each structure that occurs is checked once, at its smallest sizes: all first and second derivatives, by
    residues and by fractions.

    Args:
        module: a block, or a module that holds some.
        seed: of the points.

    Raises:
        InputError: if there is no block in the module.

    >>> from hessiankit.blocks import TransformerBlock
    >>> [row.passed for row in check_exact_blocks(TransformerBlock(8, 32, placement="pre", norm="rmsnorm", affine=False))]
    [True, True]
    """
    blocks = [part for part in module.modules() if isinstance(part, TransformerBlock)]
    if not blocks:
        raise InputError(f"check: exact=True is about hessiankit.TransformerBlock, and a {type(module).__name__} holds none")
    cases = [placement_case(structure) for structure in dict.fromkeys(map(structure_of, blocks))]
    return tuple(run_case(case, method, seed) for case in cases for method in ("modular", "rational"))


EXACT_HEADERS = ("formulas in exact arithmetic", "method", "entries", "chance to pass if wrong", "verdict")


def exact_cells(row: ExactRow) -> tuple[str, ...]:
    """Return a row of a table with these headers."""
    method = row.method if row.method == "symbolic" else f"exact {row.method}"
    chance = "not known" if row.chance is None else f"<= {row.chance:.0e}" if row.chance else "0: a proof"
    return f"{row.name} ({row.size})", method, str(row.entries), chance, "ok" if row.passed else "FAILED"


def run_case(case: ExactCase, method: str, seed: int = 0) -> ExactRow:
    """Run one case and report it; a closed form that raises fails its row and does not hide the others."""
    is_zero: Callable[[Any], bool] = is_identically_zero if method == "symbolic" else lambda difference: False
    start, failures, blocks, entries, degree = time.perf_counter(), list[str](), 0, 0, 0
    try:
        for comparison in _comparisons(case, method, seed):
            found = comparison.outcome(is_zero)
            blocks, entries, degree = blocks + 1, entries + found.entries, max(degree, found.degree)
            if found.mismatch is not None:
                failures.append(found.mismatch)
    except Exception as error:  # reported in the row: the closed form under test may raise anything
        failures.append(f"{type(error).__name__}: {error}")
    if not blocks and not failures:
        failures.append("nothing was compared")
    chance = {"symbolic": 0.0, "modular": case.branches * degree / VALUES}.get(method)
    if failures:
        note = f"{len(failures)} of {blocks or 1} blocks: {failures[0]}"
    else:
        note = f"{blocks} blocks, {entries} entries equal{_said(method, degree, chance)}"
    seconds = time.perf_counter() - start
    return ExactRow(f"{case.chapter}: {case.name}", case.size, method, not failures, seconds, note, entries, degree, chance)


def _said(method: str, degree: int, chance: float | None) -> str:
    """Return the meaning of equality at one point, in words."""
    if method == "modular":
        return f" at a random point mod 2^61-1; degree <= {degree}, so a wrong formula passes with probability <= {chance:.0e}"
    return " at a rational point" if method == "rational" else " identically"


def _comparisons(case: ExactCase, method: str, seed: int) -> Iterator[ExactComparison]:
    """Return the comparisons at the first drawn point that does not lie on a kink."""
    for attempt in range(TRIES):
        comparisons = case.build(DRAWS[method](f"{seed}/{case.chapter}/{case.name}/{attempt}"))
        try:
            return chain([next(comparisons)], comparisons)
        except KinkError:
            continue
        except StopIteration:
            return iter(())
    raise ValueError(f"{TRIES} points in a row lie on a kink")
