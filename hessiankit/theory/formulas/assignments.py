r"""A derivative as a list of short assignments in SymPy, each in terms of earlier names, and the result in terms of these.

Forward accumulation goes through the list: where a value z = f(a, b, ...) has derivatives D a, D b, ... with respect to a symbol,

```math
D z = \sum_a f_a\,D a ,
```

and each f_a and each sum is a new assignment unless there is one like it. A second derivative is the same on the longer list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy

from derivations.arrays import Array
from hessiankit.support.errors import unknown
from hessiankit.theory.formulas.code import LANGUAGES, program

Replacements = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
"""(name, expression in earlier names), in the order of the computation."""
Slopes = dict[int, sympy.Expr]
"""Derivatives that are not zero, by the position of the symbol."""


@dataclass(frozen=True)
class Assignments:
    """A matrix of SymPy expressions in named intermediates: ``replacements, (matrix,) = assignments``, as in ``sympy.cse``.

    Args:
        replacements: Pairs (name, expression in earlier names), in the order of the computation.
        matrix: Result in the names.
        inputs: Matrices of the symbols of the inputs by their letters.
        parameters: Symbols of numbers such as eps, with their values.
    """

    replacements: Replacements
    matrix: sympy.ImmutableDenseMatrix
    inputs: Mapping[str, sympy.ImmutableDenseMatrix]
    parameters: Mapping[sympy.Symbol, float]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter((list(self.replacements), [self.matrix]))

    def __str__(self) -> str:
        return "\n".join(f"{name} = {expression}" for name, expression in (*self.replacements, ("result", self.matrix)))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        rows, columns = self.matrix.shape
        return int(rows), int(columns)

    def expanded(self, row: int, column: int = 0) -> sympy.Expr:
        """Return one entry in the symbols of the inputs alone."""
        expression = self.matrix[row, column]
        for name, meaning in reversed(_dependencies(self.replacements, [expression])):
            expression = expression.xreplace({name: meaning})
        return expression

    def subs(self, values: Mapping[Any, Any]) -> Assignments:
        """Return the list with numbers or expressions in place of symbols."""
        images, rows = dict(values), []
        for name, meaning in self.replacements:
            expression = meaning.subs(images)
            if expression.is_Atom:
                images[name] = expression
            else:
                rows.append((name, expression))
        parameters = {symbol: number for symbol, number in self.parameters.items() if symbol not in images}
        return replace(self, replacements=tuple(rows), matrix=self.matrix.subs(images), parameters=parameters)

    def diff(self, symbol: sympy.Symbol) -> Assignments:
        """Return the derivative of each entry with respect to a symbol: an entry of an input, or a parameter such as eps."""
        recorder = Recorder(self.replacements, {s for symbols in self.inputs.values() for s in symbols} | {*self.parameters})
        matrix = recorder.jacobian(self.matrix.flat(), [symbol]).reshape(*self.shape)
        return recorder.assignments(matrix, self.inputs, self.parameters)

    def evalf(self, n: int = 15, subs: Mapping[Any, Any] | None = None) -> sympy.ImmutableDenseMatrix:
        """Return the result in numbers of ``n`` digits; parameters that ``subs`` does not name have their own values."""
        values: dict[Any, Any] = {**self.parameters, **(subs or {})}
        for name, meaning in self.replacements:
            values[name] = meaning.xreplace(_numbers(values, meaning)).evalf(n)
        return self.matrix.applyfunc(lambda entry: entry.xreplace(_numbers(values, entry)).evalf(n))

    def count_ops(self) -> int:
        """Return the number of arithmetic operations of the list."""
        return sum(int(sympy.count_ops(expression)) for expression in (*(e for _, e in self.replacements), *self.matrix))

    def function(self, lang: str = "numpy", name: str = "derivative") -> Any:
        """Return the result as a function of the inputs: a Python function for "numpy" and "torch", source for "c" and "julia".

        Args:
            lang: Language or library: "numpy", "torch", "c" or "julia".
            name: Name of the function.

        Raises:
            InputError: If there is no such language.
        """
        if lang not in LANGUAGES:
            raise unknown("function", "lang", lang, LANGUAGES)
        return LANGUAGES[lang](program(self.replacements, self.matrix, self.inputs, self.parameters), name)


def _numbers(values: Mapping[Any, Any], expression: sympy.Expr) -> dict[Any, sympy.Expr]:
    return {symbol: sympy.sympify(values[symbol]) for symbol in expression.free_symbols if symbol in values}


def _dependencies(replacements: Sequence[tuple[sympy.Symbol, sympy.Expr]], results: Sequence[sympy.Expr]) -> Replacements:
    """Return the assignments that the results depend on."""
    symbols = {symbol for result in results for symbol in result.free_symbols}
    rows = []
    for name, meaning in reversed(replacements):
        if name in symbols:
            rows.append((name, meaning))
            symbols |= meaning.free_symbols
    return tuple(reversed(rows))


class Recorder:
    """A list of assignments that grows, in which equal expressions have one name."""

    def __init__(self, replacements: Replacements = (), reserved: Iterable[sympy.Symbol] = ()) -> None:
        """Begin with a list; ``reserved`` symbols, such as those of inputs, are not used as names."""
        self._rows = list(replacements)
        self._names = {meaning: name for name, meaning in replacements}
        self._short_forms: dict[sympy.Basic, sympy.Expr] = {}  # shared parts of a large expression once
        self._used = {*reserved, *(name for name, _ in replacements)}
        self._letters = sympy.numbered_symbols("x", start=1, exclude=self._used)

    def values(self, letter: str, array: Array) -> Array:
        """Assign the entries of an array of expressions to a letter with their indices; return the array of names."""
        shared, entries = sympy.cse([sympy.sympify(entry) for entry in array.reshape(-1)], symbols=self._letters)
        names: dict[sympy.Basic, sympy.Expr] = {}
        for symbol, meaning in shared:
            names[symbol] = self._name(meaning.xreplace(names))
        result = np.empty(array.shape, dtype=object)
        for index, entry in zip(np.ndindex(array.shape), entries, strict=True):
            result[index] = self._name(entry.xreplace(names), indexed(letter, index))
        return result

    def merge(self, listed: Assignments) -> sympy.ImmutableDenseMatrix:
        """Merge the assignments of another list; return its matrix in the names of this one."""
        names: dict[sympy.Basic, sympy.Expr] = {}
        for name, meaning in listed.replacements:
            names[name] = self._name(meaning.xreplace(names))
        return listed.matrix.applyfunc(lambda entry: self._name(entry.xreplace(names)))

    def derivatives(self, results: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]) -> list[Slopes]:
        """Return the derivatives of expressions with respect to symbols."""
        slopes: dict[sympy.Symbol, Slopes] = {symbol: {k: sympy.Integer(1)} for k, symbol in enumerate(symbols)}
        for name, meaning in _dependencies(self._rows, results):
            slopes[name] = self._slopes(meaning, slopes, [f"D_{{{symbol}}} {name}" for symbol in symbols])
        return [self._slopes(result, slopes, [None] * len(symbols)) for result in results]

    def jacobian(self, results: Sequence[sympy.Expr], columns: Sequence[sympy.Symbol]) -> sympy.ImmutableDenseMatrix:
        """Return first derivatives of expressions: one row for each, one column for each symbol."""
        slopes = self.derivatives(results, columns)
        entries = {(row, column): slope for row, of_row in enumerate(slopes) for column, slope in of_row.items()}
        return sympy.SparseMatrix(len(results), len(columns), entries).as_immutable()

    def hessian(
        self, results: Sequence[sympy.Expr], rows: Sequence[sympy.Symbol], columns: Sequence[sympy.Symbol]
    ) -> sympy.ImmutableDenseMatrix:
        """Return second derivatives of expressions: one row for each result and row symbol, one column for each column symbol."""
        matrix, n = self.jacobian(self.jacobian(results, rows).flat(), columns), len(rows)
        if rows is not columns:
            return matrix
        return sympy.ImmutableSparseMatrix(*matrix.shape, lambda k, j: matrix[k - k % n + max(k % n, j), min(k % n, j)])

    def assignments(
        self, matrix: sympy.ImmutableDenseMatrix, inputs: Mapping[str, Any], parameters: Mapping[sympy.Symbol, float]
    ) -> Assignments:
        """Return a result with the assignments that it depends on."""
        rows = _dependencies(self._rows, matrix.flat())
        return Assignments(tuple((name, meaning.doit()) for name, meaning in rows), matrix, inputs, parameters)

    def _slopes(self, meaning: sympy.Expr, slopes: Mapping[sympy.Symbol, Slopes], labels: Sequence[str | None]) -> Slopes:
        """Return the sums over a of f_a D a, labelled where they get a name."""
        terms = defaultdict(list)
        for symbol in sorted(meaning.free_symbols & slopes.keys(), key=str):
            partial = self._name(meaning.diff(symbol))
            for k, slope in slopes[symbol].items():
                terms[k].append(partial * slope)
        sums = {k: self._name(sympy.Add(*summands), labels[k]) for k, summands in terms.items()}
        return {k: total for k, total in sums.items() if total != 0}

    def _name(self, expression: sympy.Expr, label: str | None = None) -> sympy.Expr:
        """Return the name of an expression, up to its sign; a symbol or number, or a number times a symbol, is its own."""
        short = self._short(expression)
        if short.is_Atom or (short.is_Mul and len(short.args) == 2 and short.args[0].is_Number and short.args[1].is_Symbol):
            return short
        if short.could_extract_minus_sign():
            return -self._assign(-short, None) if not (-short).is_Atom else short
        return self._assign(short, label)

    def _short(self, expression: sympy.Expr) -> sympy.Expr:
        """Return an expression with named parts replaced by their names; powers, functions and their arguments get one."""
        if expression.is_Atom or expression in self._names:
            return self._names.get(expression, expression)
        if expression not in self._short_forms:
            if isinstance(expression, (sympy.Function, sympy.Pow)):
                parts = [self._name(part) if isinstance(part, sympy.Expr) else self._short(part) for part in expression.args]
                short = expression.func(*parts)
                short = short if short.is_Atom else self._assign(short, None)
            else:
                short = expression.func(*map(self._short, expression.args))
            self._short_forms[expression] = short
        return self._short_forms[expression]

    def _assign(self, expression: sympy.Expr, label: str | None) -> sympy.Symbol:
        if expression not in self._names:
            name = None if label is None else sympy.Symbol(label, real=True)
            name = next(self._letters) if name is None or name in self._used else name
            self._used.add(name)
            self._names[expression] = name
            self._rows.append((name, expression))
        return self._names[expression]


def indexed(letter: str, index: Sequence[int]) -> str:
    r"""Return the name of an entry, with indices from 1.

    >>> indexed("X", (0, 1)), indexed("W_Q", (0, 1))
    ('X_{1,2}', 'W_Q^{1,2}')
    """
    numbers = ",".join(str(k + 1) for k in index)
    return f"{letter}^{{{numbers}}}" if "_" in letter else f"{letter}_{{{numbers}}}"
