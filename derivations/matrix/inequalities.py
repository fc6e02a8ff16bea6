r"""The tree of inequalities behind ``norm_bound``: the bound on an expression from the norms of its parts.

    ||A B|| <= ||A|| ||B||,   ||A + B|| <= ||A|| + ||B||,   ||A (x) B|| = ||A|| ||B||,   ||blockdiag(B_i)|| = max ||B_i||

(Properties 8, 9 and 11 of "Closing the Curvature Gap"). Permutations and identities have norm 1 and are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

from derivations.matrix.algebra import Kronecker, Product, Scaled, Sum
from derivations.matrix.diagonal import BlockDiagonal
from derivations.matrix.expression import Matrix, scalar_latex
from derivations.matrix.named import Named, definitions


@dataclass(frozen=True)
class Inequality:
    """One line of the tree: ||symbol|| <= rule = bound.

    Attributes:
        symbol: LaTeX of the bounded expression.
        rule: LaTeX of the bound in the norms of the parts.
        bound: its value.
    """

    symbol: str
    rule: str
    bound: float


def inequalities(matrix: Matrix, symbol: str) -> list[Inequality]:
    r"""Return how the norm bound of an expression comes about, the result first, then each named part.

    >>> from derivations.matrix.leaves import Dense, Ones
    >>> J = Named("J", Dense([[3, 0], [0, 4]], "A") @ Ones(2, 2))
    >>> [(line.symbol, line.rule, line.bound) for line in inequalities(2 * J @ J, "H")]
    [('H', '2\\cdot \\|J\\|\\,\\|J\\|', 128.0), ('J', '\\|A\\|\\,\\|\\mathbf{1}_{2\\times 2}\\|', 8.0)]
    """
    top = matrix.meaning if isinstance(matrix, Named) else matrix
    lines = [Inequality(symbol, _rule(top) or "1", top.norm_bound())]
    return lines + [Inequality(d.symbol, _rule(d.matrix) or "1", d.norm_bound()) for d in definitions(top)]


def _rule(matrix: Matrix) -> str:
    """The bound of an expression in the norms of its parts; nothing for a norm of exactly 1."""
    if isinstance(matrix, Product | Kronecker):
        return r"\,".join(part for child in matrix.children() if (part := _factor(child)))
    if isinstance(matrix, Sum):
        return " + ".join(_rule(term) or "1" for term in matrix.terms)
    if isinstance(matrix, Scaled):
        inner = _factor(matrix.matrix)
        size = scalar_latex(abs(matrix.c))
        return rf"{size}\cdot {inner}" if inner else size
    if isinstance(matrix, BlockDiagonal) and matrix.symbol is None:
        return rf"\max_h {_factor(matrix.blocks[0]) or '1'}"
    if matrix.like() is None and matrix.norm_bound() == 1.0:
        return ""  # an identity or a permutation, whatever its entries
    symbol = matrix.symbol if isinstance(matrix, Named) else matrix.latex().removesuffix(r"^\top")
    return rf"\|{symbol}\|"


def _factor(matrix: Matrix) -> str:
    text = _rule(matrix)
    return rf"\left({text}\right)" if isinstance(matrix, Sum) else text
