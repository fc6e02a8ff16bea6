"""Formulas in vec_r as SymPy matrix expressions with symbolic sizes: the formulas that the papers print."""

from __future__ import annotations

import re
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import sympy
from sympy.matrices.expressions import DiagMatrix, KroneckerProduct, MatrixExpr

from derivations import matrix as vecr
from derivations.arrays import Array
from derivations.row_blocks import Centring, RowBlocks, RowCovariance
from derivations.selection import Selection
from hessiankit.theory.formulas.symbols import SizeName


class CommutationMatrix(MatrixExpr):  # type: ignore[misc]  # SymPy's classes have no types
    """K_{m,n}, the mn x mn permutation with K_{m,n} (x (x) y) = y (x) x for n entries of x and m of y.

    >>> CommutationMatrix(2, 2).as_explicit()
    Matrix([
    [1, 0, 0, 0],
    [0, 0, 1, 0],
    [0, 1, 0, 0],
    [0, 0, 0, 1]])
    """

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns, mn and mn."""
        return self.args[0] * self.args[1], self.args[0] * self.args[1]

    def _entry(self, i: Any, j: Any, **options: Any) -> Any:
        m, n = self.args
        return sympy.KroneckerDelta(j, sympy.Mod(i, n) * m + sympy.floor(i / n))

    def _eval_transpose(self) -> CommutationMatrix:
        return CommutationMatrix(*reversed(self.args))

    def _latex(self, printer: Any) -> str:
        return "K_{{{},{}}}".format(*map(printer._print, self.args))

    def _numpycode(self, printer: Any) -> str:
        m, n = map(printer._print, self.args)
        return f"numpy.eye({m}*{n}).reshape({n}, {m}, -1).swapaxes(0, 1).reshape({m}*{n}, -1)"


class DiagonalLiftMatrix(MatrixExpr):  # type: ignore[misc]
    """E_n, the n^2 x n matrix with E_n v = vec_r(diag(v)).

    >>> DiagonalLiftMatrix(2).as_explicit().T
    Matrix([
    [1, 0, 0, 0],
    [0, 0, 0, 1]])
    """

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns, n^2 and n."""
        return self.args[0] ** 2, self.args[0]

    def _entry(self, i: Any, j: Any, **options: Any) -> Any:
        return sympy.KroneckerDelta(i, j * (self.args[0] + 1))

    def _latex(self, printer: Any) -> str:
        return f"E_{{{printer._print(self.args[0])}}}"

    def _numpycode(self, printer: Any) -> str:
        n = printer._print(self.args[0])
        return f"numpy.eye({n}*{n})[:, ::{n} + 1]"


class RowVectorization(MatrixExpr):  # type: ignore[misc]
    """vec_r(M), the rows of an m x n matrix one after the other, as a column.

    >>> RowVectorization(sympy.Matrix([[1, 2], [3, 4]])).as_explicit().T
    Matrix([[1, 2, 3, 4]])
    """

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns, mn and 1."""
        rows, columns = self.args[0].shape
        return rows * columns, sympy.Integer(1)

    def _entry(self, i: Any, j: Any, **options: Any) -> Any:
        columns = self.args[0].shape[1]
        return self.args[0][sympy.floor(i / columns), sympy.Mod(i, columns)]

    def _latex(self, printer: Any) -> str:
        return rf"\operatorname{{vec}}_r({printer._print(self.args[0])})"

    def _numpycode(self, printer: Any) -> str:
        return f"({printer._print(self.args[0])}).reshape(-1, 1)"


def matrix_expression(matrix: vecr.Matrix, names: SizeName) -> MatrixExpr:
    """Return a formula in vec_r as a SymPy expression whose sizes are letters; a named part is a ``MatrixSymbol``."""
    convert = partial(matrix_expression, names=names)
    m, n = map(names.size, matrix.shape)
    result: Any
    match matrix:
        case vecr.Named():
            symbol = sympy.MatrixSymbol(matrix.symbol, *map(names.size, matrix.matrix.shape))
            result = symbol.T if matrix.transposed else symbol
        case vecr.Product():
            result = sympy.MatMul(*map(convert, matrix.factors))
        case vecr.Sum():
            result = sympy.MatAdd(*map(convert, matrix.terms))
        case vecr.Scaled():
            result = sympy.MatMul(names.number(matrix.c), convert(matrix.matrix))
        case vecr.Kronecker():
            left, right = convert(matrix.left), convert(matrix.right)
            result = KroneckerProduct(*(left.args if isinstance(left, KroneckerProduct) else (left,)), right)
        case vecr.Identity():
            result = sympy.Identity(m)
        case vecr.Zero():
            result = sympy.ZeroMatrix(m, n)
        case vecr.Ones():
            result = sympy.OneMatrix(m, n)
        case vecr.Commutation():
            result = CommutationMatrix(names.size(matrix.m), names.size(matrix.n))
        case vecr.DiagonalLift():
            result = DiagonalLiftMatrix(n)
        case vecr.DiagonalTake():
            result = DiagonalLiftMatrix(m).T
        case Centring():
            result = sympy.Identity(m) - sympy.OneMatrix(m, m) / m
        case vecr.Vec() | vecr.VecIdentity():
            content = convert(matrix.matrix) if isinstance(matrix, vecr.Vec) else sympy.Identity(names.size(matrix.n))
            result = RowVectorization(content)
            result = result.T if matrix.transposed else result
        case vecr.Diagonal():
            result = DiagMatrix(sympy.MatrixSymbol(matrix.symbol, m, 1))
        case RowBlocks() | RowCovariance():
            letter, _ = leaf(matrix)
            L, S = map(names.size, matrix.rows.shape)
            blocks = DiagMatrix(sympy.MatrixSymbol(letter, L * S, 1)) * KroneckerProduct(sympy.Identity(L), sympy.OneMatrix(S, 1))
            if isinstance(matrix, RowCovariance):
                result = DiagMatrix(sympy.MatrixSymbol(letter, L * S, 1)) - blocks * blocks.T
            else:
                result = blocks.T if matrix.transposed else blocks
        case _:
            letter, transposed = leaf(matrix)
            result = sympy.MatrixSymbol(letter, n, m).T if transposed else sympy.MatrixSymbol(letter, m, n)
    return result


def matrix_assignments(matrix: vecr.Matrix, names: SizeName) -> tuple[list[tuple[sympy.MatrixSymbol, MatrixExpr]], MatrixExpr]:
    """Return the named parts of a formula as pairs (symbol, expression in earlier symbols), and the formula in their symbols."""
    parts = {vecr.Named(d.symbol, d.matrix): d.matrix for d in vecr.definitions(matrix)}
    meanings = {matrix_expression(symbol, names): matrix_expression(part, names) for symbol, part in parts.items()}
    order = TopologicalSorter({symbol: meaning.atoms(sympy.MatrixSymbol) for symbol, meaning in meanings.items()}).static_order()
    return [(symbol, meanings[symbol]) for symbol in order if symbol in meanings], matrix_expression(matrix, names)


def leaf(matrix: vecr.Matrix) -> tuple[str, bool]:
    """Return the letter of a leaf, and whether the leaf is the transposed matrix of this letter."""
    if isinstance(matrix, (RowBlocks, RowCovariance)):
        letter = re.sub(r"(?<![A-Za-z])([a-z])(\}?)_i$", lambda found: found[1].upper() + found[2], matrix.symbol)
        return rf"\operatorname{{vec}}_r({letter})", False
    if isinstance(matrix, vecr.Dense) and matrix.symbol.endswith(r"^\top"):
        return matrix.T.latex(), True
    if isinstance(matrix, Selection):
        return matrix.symbol, matrix.transposed
    return re.sub(r"I_\{[^{}]*\}", "I", matrix.latex()), False  # sizes of identities in the blocks of heads apart


def leaves(matrix: vecr.Matrix) -> dict[str, Array]:
    """Return the arrays of a formula's leaves, vectors as columns, by their letters."""
    arrays: dict[str, Array] = {}
    if isinstance(matrix, vecr.BlockDiagonal):
        return {leaf(matrix)[0]: matrix.dense()}
    for child in matrix.children():
        arrays |= leaves(child)
    if isinstance(matrix, vecr.Diagonal):
        arrays[matrix.symbol] = matrix.values.reshape(-1, 1)
    elif isinstance(matrix, (RowBlocks, RowCovariance)):
        arrays[leaf(matrix)[0]] = matrix.rows.reshape(-1, 1)
    elif not matrix.children() and not isinstance(
        matrix, (vecr.Identity, vecr.Zero, vecr.Ones, vecr.Commutation, vecr.DiagonalLift, vecr.DiagonalTake, Centring)
    ):
        letter, transposed = leaf(matrix)
        arrays[letter] = (matrix.T if transposed else matrix).dense()
    return arrays
