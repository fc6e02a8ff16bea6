"""The exact check: every vec_r closed form in exact arithmetic, with no tolerance.

A closed form is evaluated on residues modulo a large prime, at random numbers, and must equal (``==``) second-order Taylor
arithmetic on the same numbers, which shares nothing with it, entry by entry. One such point leaves a known chance of error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import nn

from hessiankit.blocks import TransformerBlock
from hessiankit.support.errors import InputError
from hessiankit.theory.exact.block_structure import structure_of
from hessiankit.theory.exact.blocks import placement_case
from hessiankit.theory.exact.case import Draw, ExactCase
from hessiankit.theory.exact.cases import CASES
from hessiankit.theory.exact.residues import VALUES


@dataclass(frozen=True)
class ExactRow:
    """The outcome of one exact check.

    Attributes:
        name: chapter and case.
        size: the dimensions of the check.
        passed: whether every entry of every block is equal.
        seconds: wall-clock time.
        note: blocks and entries compared, or the first block that differs.
        entries: how many numbers were compared.
        degree: bound on the degree of the numerators of all differences.
        chance: bound on the probability that a wrong formula passes (Schwartz and Zippel).
        method: "modular", the arithmetic: jets over residues.
    """

    name: str
    size: str
    passed: bool
    seconds: float
    note: str
    entries: int = 0
    degree: int = 0
    chance: float = 0.0
    method: str = "modular"

    @property
    def verdict(self) -> str:
        """The outcome in a word."""
        return "ok" if self.passed else "FAILED"

    def __str__(self) -> str:
        return f"{self.verdict:<6} {self.method:<8} {self.seconds:6.2f} s  {self.name} ({self.size}): {self.note}"


def chapters() -> tuple[str, ...]:
    """Return the chapters that ``check_exact`` knows.

    >>> "normalization" in chapters()
    True
    """
    return tuple(dict.fromkeys(case.chapter for case in CASES))


def check_exact(chapter: str | None = None, *, seed: int = 0) -> tuple[ExactRow, ...]:
    """Check the vec_r closed forms in exact arithmetic, with ``==``.

    Args:
        chapter: the module of ``derivations`` to check, or "placements" for whole blocks (see ``chapters``); None checks all.
        seed: seed of the points and formal weights.

    Raises:
        ValueError: if there is no such chapter.

    >>> [(row.method, row.size, row.passed) for row in check_exact("loss")]
    [('modular', '2x3', True), ('modular', 'L=2 C=3', True)]
    """
    if chapter is not None and chapter not in chapters():
        raise ValueError(f"check_exact: no exact check for the chapter {chapter!r}. There are {', '.join(chapters())}.")
    return tuple(run_case(case, seed) for case in CASES if chapter in (None, case.chapter))


def check_exact_blocks(module: nn.Module, *, seed: int = 0) -> tuple[ExactRow, ...]:
    """Check the closed forms of every ``TransformerBlock`` in a module in exact arithmetic.

    A formula depends on a block's structure (placement, kind of norms and activation, heads, mask, rotations, biases) and holds
    for all sizes, so each structure that occurs is checked once, at its smallest sizes: all first and second derivatives.

    Args:
        module: a block, or a module that holds some.
        seed: seed of the points.

    Raises:
        InputError: if there is no block in the module.

    >>> from hessiankit.blocks import TransformerBlock
    >>> [row.passed for row in check_exact_blocks(TransformerBlock(8, 32, placement="pre", norm="rmsnorm", affine=False))]
    [True]
    """
    blocks = [part for part in module.modules() if isinstance(part, TransformerBlock)]
    if not blocks:
        raise InputError(f"check: exact=True is about hessiankit.TransformerBlock, and a {type(module).__name__} holds none")
    return tuple(run_case(placement_case(structure), seed) for structure in dict.fromkeys(map(structure_of, blocks)))


def run_case(case: ExactCase, seed: int = 0) -> ExactRow:
    """Run one case and report it; a closed form that raises fails its row and does not hide the others."""
    start, failures, blocks, entries, degree = time.perf_counter(), list[str](), 0, 0, 0
    try:
        for comparison in case.build(Draw(f"{seed}/{case.chapter}/{case.name}")):
            mismatch, block_degree = comparison.mismatch()
            blocks, entries, degree = blocks + 1, entries + comparison.expected.size, max(degree, block_degree)
            failures += [] if mismatch is None else [mismatch]
    except Exception as error:  # reported in the row: the closed form under test may raise anything
        failures.append(f"{type(error).__name__}: {error}")
    if not blocks and not failures:
        failures.append("nothing was compared")
    chance = case.branches * degree / VALUES
    if failures:
        note = f"{len(failures)} of {blocks or 1} blocks: {failures[0]}"
    else:
        at = f"at a random point mod 2^61-1; degree <= {degree}"
        note = f"{blocks} blocks, {entries} entries equal {at}, so a wrong formula passes with probability <= {chance:.0e}"
    seconds = time.perf_counter() - start
    return ExactRow(f"{case.chapter}: {case.name}", case.size, not failures, seconds, note, entries, degree, chance)
