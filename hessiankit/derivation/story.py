"""A derivation as lines to read: the values of the block, the result with its terms, and each object that it refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from derivations.matrix import Matrix, Named, definitions, dimensions
from derivations.stage import Stage, Term
from hessiankit.derivation.dimensions import SizeNames
from hessiankit.derivation.legend import legend


@dataclass(frozen=True)
class Line:
    """``symbol = formula`` in LaTeX, and the rule that made it, in words with LaTeX between dollars."""

    symbol: str
    formula: str
    rule: str


@dataclass(frozen=True)
class Story:
    """All that is printed of a derivation.

    Args:
        values: (symbol, what it is) of the block's values, in the order of the computation.
        lines: the result first, then what it refers to.
        terms: (formula, meaning) of the summands of the result.
        legend: (symbol, meaning) of what is not explained by a line.
    """

    values: list[tuple[str, str]]
    lines: list[Line]
    terms: list[tuple[str, str]]
    legend: list[tuple[str, str]] = field(default_factory=list)


def tell(
    left: str, matrix: Matrix, terms: Sequence[Term], rule: str, Z: Stage, known: Sequence[tuple[str, str]], names: SizeNames
) -> Story:
    """Return the story of a derivation.

    Args:
        left: LaTeX of the derivative.
        matrix: the expression.
        terms: its summands.
        rule: which rule gave the result.
        Z: the output of the block as a stage.
        known: letters of numbers, each with its value.
        names: of the sizes.
    """
    top = matrix.matrix if isinstance(matrix, Named) else matrix
    with dimensions(names):
        lines = [Line(left, top.latex(), rule), *(Line(d.symbol, d.matrix.latex(), d.reason) for d in definitions(top))]
        said = [(term.matrix.latex(), term.meaning) for term in terms]
    values = [*known, *((stage.symbol, stage.rule) for stage in Z.story if stage.rule)]
    text = " ".join(piece for line in lines for piece in (line.symbol, line.formula))
    shown = text + " " + " ".join(rule for _, rule in values)
    return Story(values, lines, said, legend(shown, names.used))
