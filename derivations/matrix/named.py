"""An expression with a name, so that a long formula can be read in steps, as a paper prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from derivations.arrays import Array
from derivations.matrix.expression import Matrix


class Named(Matrix):
    r"""An expression that prints as a symbol and computes as its definition.

    Args:
        symbol: LaTeX of the name.
        matrix: its definition.
        reason: in words, where it comes from.

    >>> from derivations.matrix.leaves import Identity, Ones
    >>> J = Named("J_Z", Ones(2, 3), "dZ/dS")
    >>> (J @ J.T).latex(), [d.symbol for d in definitions(J @ J.T)], J.T.dense().shape
    ('J_Z\\,J_Z^\\top', ['J_Z'], torch.Size([3, 2]))
    """

    def __init__(self, symbol: str, matrix: Matrix, reason: str = "", *, transposed: bool = False) -> None:
        self.symbol, self.matrix, self.reason, self.transposed = symbol, matrix, reason, transposed
        rows, columns = matrix.shape
        self.shape = (columns, rows) if transposed else (rows, columns)

    @cached_property
    def meaning(self) -> Matrix:
        """The definition, transposed if the symbol is."""
        return self.matrix.T if self.transposed else self.matrix

    def children(self) -> Sequence[Matrix]:
        return (self.meaning,)

    def apply(self, y: Array) -> Array:
        return self.meaning.apply(y)

    def dense(self, like: Array | None = None) -> Array:
        return self.meaning.dense(like)

    def transpose(self) -> Matrix:
        if self.matrix.T is self.matrix:  # a symmetric node
            return self
        return Named(self.symbol, self.matrix, self.reason, transposed=not self.transposed)

    @cached_property
    def _norm_bound(self) -> float:
        return self.matrix.norm_bound()

    def norm_bound(self) -> float:
        return self._norm_bound

    def latex(self) -> str:
        return self.symbol + (r"^\top" if self.transposed else "")


def definitions(matrix: Matrix) -> list[Named]:
    """Return every named expression inside, each once, in the order in which a reader meets them.

    Raises:
        ValueError: if one name has two definitions.
    """
    seen: dict[str, Named] = {}
    ahead = [matrix]
    while ahead:
        for named in _named(ahead.pop(0)):
            known = seen.get(named.symbol)
            if known is None:
                seen[named.symbol] = named
                ahead.append(named.matrix)
            elif known.matrix is not named.matrix and known.matrix.latex() != named.matrix.latex():
                raise ValueError(f"definitions: {named.symbol} stands for {known.matrix!r} and for {named.matrix!r}")
    return list(seen.values())


def _named(matrix: Matrix) -> Iterator[Named]:
    """The names that an expression is printed with, from left to right."""
    if isinstance(matrix, Named):
        yield Named(matrix.symbol, matrix.matrix, matrix.reason) if matrix.transposed else matrix
    else:
        for child in matrix.children():
            yield from _named(child)
