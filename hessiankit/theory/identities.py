r"""``identical``: two formulas are equal, by their form or by exact arithmetic at a random point, or a point shows a difference.

Both become one list of assignments in which equal expressions have one name. Where names do not settle it, the list is evaluated
modulo a prime P at random numbers. Squares modulo P take the part of positive numbers: roots, absolute values and conditions then
obey the rules that they obey for real numbers. Where a radicand is no square, another point is drawn. Values of exp and other
functions are drawn too, one for each argument. With k roots, the product of the difference over their signs is a rational
function of the drawn numbers. Its degree is at most 2^k h, where h is the sum of the degrees of all that is added and multiplied.
So two formulas that differ agree at a point with a probability of at most 4^k h / P. An entry that depends on n conditions is one
of 2^n functions; more points are drawn then, and the probability that they all miss one of these functions is added.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple

import sympy
from sympy.core.relational import Relational
from sympy.matrices.expressions.matexpr import MatrixElement

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, did_you_mean
from hessiankit.support.tables import Piece, Printed
from hessiankit.theory.formulas.assignments import Assignments, Recorder
from hessiankit.theory.formulas.code import identifier
from hessiankit.theory.formulas.result import Derivation

P = 892371480 * (2**500 + 39) - 1
"""A prime that is -1 modulo 8 and modulo 3, 5, ..., 23: these are squares modulo P, as positive numbers are, and -1 is none.

It is far above the degrees of long lists."""
MISSED = 1e-9
"""Probability of missing a case for which points are drawn, up to ``POINTS`` of them."""
POINTS = 256
TRIES = 4096
"""Points that are drawn until all roots exist: with eight roots 1 point in 256 will do, and 1 run in 10^6 has none."""
SMALL_MULTIPLES = (1, -1, 2, -2, 3, -3, 4, -4)
"""Quotients of arguments of exp that products and powers of weights make."""
DIGITS = 40
"""Digits of the numbers at a real point; a difference in the last quarter of them is rounding."""


@dataclass(frozen=True)
class Counterexample:
    """A real point at which two formulas differ.

    Attributes:
        entry: Row and column, from 0.
        values: Entry of the first and of the second formula.
        point: Values of the symbols of inputs and parameters.
    """

    entry: tuple[int, int]
    values: tuple[float, float]
    point: Mapping[str, float]

    def __str__(self) -> str:
        at = ", ".join(f"{name} = {value:.4g}" for name, value in self.point.items())
        return f"entry {self.entry} is {self.values[0]:.10g} in the first and {self.values[1]:.10g} in the second at {at}"


@dataclass(frozen=True, repr=False)
class Equality(Printed):
    """Whether two formulas are equal, and how that is known; true where they are.

    Attributes:
        holds: Whether they are equal.
        method: "form", "prime field" or "digits".
        chance: Bound on the probability that formulas that differ are called equal: 0 by form, NaN by digits.
        counterexample: A point at which they differ, or None.
    """

    holds: bool
    method: str
    chance: float = 0.0
    counterexample: Counterexample | None = None

    def __bool__(self) -> bool:
        return self.holds

    def _headline(self) -> str:
        if self.counterexample is not None:
            return f"different: {self.counterexample}"
        if self.method == "form":
            return "identical: the same expression in every entry"
        if self.method == "digits":
            return f"identical in {DIGITS * 3 // 4} digits at a random point; arithmetic modulo a prime does not show it"
        bound = f"formulas that differ pass with a probability of at most {self.chance:.0e}"
        return f"identical at a random point modulo a prime; {bound}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()


@checked("identical", leave=("a", "b"))
def identical(a: Any, b: Any, *, seed: int = 0) -> Equality:
    """Tell whether two formulas are equal at every point.

    Args:
        a: A result of :func:`hessiankit.derive` or of its ``sympy()``, or a SymPy matrix or matrix expression whose
            ``MatrixSymbol``s have the letters of the other formula's inputs (``X``, ``W_Q``, ``gamma``; a vector has one column).
            Symbols are those of parameters (``varepsilon`` or ``eps``, ``c``) and of sizes (``L``, ``d``).
        b: Another of these.
        seed: Seed of the random points.

    Raises:
        InputError: If neither is a derivation, shapes differ, or a letter is not one of the derivation's.

    >>> import hessiankit as hk
    >>> from sympy import Identity, KroneckerProduct, MatrixSymbol
    >>> derived = hk.derive("linear", wrt="X", length=2)
    >>> W = MatrixSymbol("W", 4, 6)
    >>> print(hk.identical(derived, KroneckerProduct(Identity(2), W.T)))
    identical: the same expression in every entry
    >>> bool(hk.identical(derived, 2 * KroneckerProduct(Identity(2), W.T)))
    False
    """
    derivations = [one for one in (a, b) if isinstance(one, (Derivation, Assignments))]
    if not derivations:
        raise InputError(f"identical: got {type(a).__name__} and {type(b).__name__}; one of the two is a result of derive")
    lists = [one.sympy() if isinstance(one, Derivation) else one for one in derivations]
    sizes = derivations[0].sizes if isinstance(derivations[0], Derivation) else {}
    letters = Assignments((), lists[0].matrix, {}, {})
    for listed in lists:
        letters = replace(
            letters, inputs={**letters.inputs, **listed.inputs}, parameters={**letters.parameters, **listed.parameters}
        )
    recorder = Recorder(reserved={s for symbols in letters.inputs.values() for s in symbols} | {*letters.parameters})
    left, right = (_merge(recorder, one.sympy() if isinstance(one, Derivation) else one, letters, sizes) for one in (a, b))
    if left.shape != right.shape:
        raise InputError(f"identical: the shapes are {tuple(left.shape)} and {tuple(right.shape)}; pass formulas of one shape")
    if left == right:
        return Equality(True, "form")
    pair = recorder.assignments(sympy.ImmutableDenseMatrix([left.flat(), right.flat()]), letters.inputs, letters.parameters)
    chance = _chance(pair, seed)
    if chance is not None:
        return Equality(True, "prime field", chance)
    counterexample = _counterexample(pair, left.shape[1], seed)
    return Equality(counterexample is None, "digits", float("nan"), counterexample)


def _merge(recorder: Recorder, formula: Any, letters: Assignments, sizes: Mapping[str, int]) -> sympy.ImmutableDenseMatrix:
    """Assign a formula, in a derivation's letters; return its matrix in names."""
    if isinstance(formula, Assignments):
        return recorder.merge(formula)
    if not isinstance(formula, (sympy.MatrixBase, sympy.MatrixExpr)):
        raise InputError(f"identical: got {type(formula).__name__}; pass a result of derive or a matrix of SymPy")
    if not isinstance(formula, sympy.MatrixBase):
        numbers = {symbol: sizes[symbol.name] for symbol in formula.free_symbols if symbol.name in sizes}
        formula = formula.subs(numbers).as_explicit()
    letter, symbols = _letters(letters), dict[sympy.Basic, sympy.Basic]()

    def translate(expression: sympy.Basic) -> sympy.Basic:
        if expression not in symbols:
            if isinstance(expression, (sympy.Symbol, MatrixElement)):
                symbols[expression] = letter(expression)
            else:
                symbols[expression] = expression.func(*map(translate, expression.args)) if expression.args else expression
        return symbols[expression]

    matrix = sympy.ImmutableDenseMatrix(*formula.shape, [translate(entry) for entry in formula])
    return recorder.merge(Assignments((), matrix, letters.inputs, letters.parameters))


def _letters(listed: Assignments) -> Callable[[Any], sympy.Symbol]:
    """Return the map from a user's symbols and entries of matrices to the symbols of a derivation."""
    arrays = {name: symbols for letter, symbols in listed.inputs.items() for name in (letter, identifier(letter))}
    by_name = {symbol.name: symbol for symbols in listed.inputs.values() for symbol in symbols}
    for symbol in listed.parameters:
        word = identifier(symbol.name)
        by_name |= dict.fromkeys((symbol.name, word, word.replace("varepsilon", "eps")), symbol)

    def letter(atom: Any) -> sympy.Symbol:
        if isinstance(atom, MatrixElement):
            matrix = atom.parent
            if matrix.name not in arrays or matrix.shape != arrays[matrix.name].shape:
                shapes = ", ".join(f"{identifier(name)} {symbols.shape}" for name, symbols in listed.inputs.items())
                raise InputError(f"identical: {matrix} {matrix.shape} is no input; the inputs are {shapes}")
            return arrays[matrix.name][atom.i, atom.j]
        if atom.name not in by_name:
            raise InputError(f"identical: {atom} is no letter of the derivation{did_you_mean(atom.name, by_name)}")
        return by_name[atom.name]

    return letter


def _chance(pair: Assignments, seed: int) -> float | None:
    """Return a bound on the probability that two rows that differ agree as these do at random points; None if they do not."""
    agreements = 0
    for attempt in range(TRIES):
        field = _Field(f"{seed}/{attempt}", dict(pair.replacements))
        try:
            for name, meaning in pair.replacements:
                field.values[name] = field(meaning)
            pairs = [(field(u), field(v)) for u, v in zip(pair.matrix.row(0), pair.matrix.row(1), strict=True)]
        except ValueError:  # a root or a reciprocal that does not exist at this point
            continue
        if any(u.number != v.number for u, v in pairs):
            return None
        agreements += 1
        degree, cases = max(u.degree + v.degree for u, v in pairs), max(len(u.conditions | v.conditions) for u, v in pairs)
        missed = (1 - 0.5**cases) ** agreements
        if missed <= MISSED or agreements == POINTS:
            return float(sympy.Rational(degree * 4**field.roots, P)) + missed
    return None


class _FieldNumber(NamedTuple):
    """A number modulo P, with a bound on the degrees of numerator and denominator, and the conditions that it depends on."""

    number: int
    degree: int = 0
    conditions: frozenset[sympy.Basic] = frozenset()

    def __neg__(self) -> _FieldNumber:
        return self._replace(number=-self.number % P)

    def __pow__(self, n: int) -> _FieldNumber:
        return self._replace(number=pow(self.number, n, P), degree=abs(n) * self.degree)


def _combined(operation: Callable[[int, int], int], parts: Sequence[_FieldNumber]) -> _FieldNumber:
    """Return a sum or a product."""
    number = reduce(lambda u, v: operation(u, v) % P, (part.number for part in parts))
    return _FieldNumber(number, sum(part.degree for part in parts), frozenset().union(*(part.conditions for part in parts)))


class _Field:
    """Expressions modulo P at a random point."""

    def __init__(self, seed: str, meanings: Mapping[sympy.Basic, sympy.Expr]) -> None:
        self.values: dict[sympy.Basic, _FieldNumber] = {}
        self.roots = 0
        self._random, self._meanings, self._functions = random.Random(seed), meanings, dict[tuple[Any, int], _FieldNumber]()

    def __call__(self, expression: sympy.Expr) -> _FieldNumber:
        """Return the value of an expression.

        Raises:
            ValueError: If a root does not exist, or something is divided by zero.
        """
        match expression:
            case sympy.Rational():
                return _FieldNumber(int(expression.p) * pow(int(expression.q), -1, P) % P)
            case sympy.Add():
                return _combined(add, [self(part) for part in expression.args])
            case sympy.Mul():
                return _combined(mul, [self(part) for part in expression.args])
            case sympy.Pow(exp=sympy.Rational(q=1 | 2)):
                base = self(expression.base)
                return (self._root(base) if expression.exp.q == 2 else base) ** int(expression.exp.p)
            case sympy.Piecewise():
                return self._case(expression.args)
            case sympy.Abs():
                value = self(expression.args[0])
                return (value if _is_square(value.number) else -value)._replace(conditions=value.conditions | {expression})
            case sympy.exp():
                argument = expression.exp.xreplace(self._meanings)  # the difference of two logits, where these have a name
                terms = [self._exp(self(term)) for term in sympy.Add.make_args(argument)]
                return _combined(mul, terms) if None not in terms else self._exp(self(expression.exp), new=True)
            case sympy.Function():
                return self._odd_or_even(expression.func, self(expression.args[0]))
        if expression not in self.values:  # a symbol, or a number such as pi
            self.values[expression] = self._random_number(positive=bool(expression.is_positive))
        return self.values[expression]

    def _random_number(self, *, positive: bool) -> _FieldNumber:
        number = _FieldNumber(self._random.randrange(1, P), 1)
        return number**2 if positive else number

    def _root(self, value: _FieldNumber) -> _FieldNumber:
        if not _is_square(value.number):
            raise ValueError("the radicand is no square")
        self.roots += value.degree > 0
        return value._replace(number=pow(value.number, (P + 1) // 4, P))

    def _exp(self, argument: _FieldNumber, *, new: bool = False) -> Any:
        """Return exp of a small multiple of an argument that has a value, as a power of this value; else None, or a new one."""
        for n in SMALL_MULTIPLES:
            value = self._functions.get((sympy.exp, argument.number * pow(n, -1, P) % P))
            if value is not None:
                return (value**n)._replace(conditions=argument.conditions)
        if new:
            self._functions[sympy.exp, argument.number] = self._random_number(positive=True)
        return self._exp(argument) if new else None

    def _odd_or_even(self, function: Any, argument: _FieldNumber) -> _FieldNumber:
        """Return a drawn value; those of x and -x are equal for cosh and cos, and opposite for erf, tanh and other functions."""
        sign = _is_square(argument.number)
        key = function, (argument if sign else -argument).number
        value = self._functions.setdefault(key, self._random_number(positive=False))._replace(conditions=argument.conditions)
        return value if sign or function in (sympy.cos, sympy.cosh) else -value

    def _case(self, pieces: Sequence[Any]) -> _FieldNumber:
        """Return the value of the first piece whose condition holds; it depends on the conditions up to this one."""
        conditions = set[sympy.Basic]()
        for value, condition in pieces:
            if condition != sympy.true:
                conditions.add(condition)
            if self._true(condition):
                result = self(value)
                return result._replace(conditions=result.conditions | conditions)
        raise InputError(f"identical: no condition of a case distinction holds: {pieces}")

    def _true(self, condition: Any) -> bool:
        if condition in (sympy.true, sympy.false):
            return bool(condition)
        if not isinstance(condition, Relational) or condition.rel_op not in (">", ">=", "<", "<="):
            raise InputError(f"identical: the condition {condition} does not say which of two numbers is larger")
        return _is_square(self(condition.gts - condition.lts).number)


def _is_square(number: int) -> bool:
    return pow(number, (P - 1) // 2, P) in (0, 1)


def _counterexample(formulas: Assignments, columns: int, seed: int) -> Counterexample | None:
    """Return a real point at which two rows differ, with the entry that differs most, or None if all digits agree.

    Where cases are distinguished, several points are tried.
    """
    generator = random.Random(seed)
    expressions = [*(meaning for _, meaning in formulas.replacements), *formulas.matrix]
    present = {symbol for expression in expressions for symbol in expression.free_symbols}
    symbols = [*dict.fromkeys(s for letters in formulas.inputs.values() for s in letters if s in present)]
    for _ in range(32 if any(e.has(sympy.Piecewise, sympy.Abs) for e in expressions) else 1):
        point = {s: sympy.Rational(generator.randint(-96, 96), 64) for s in symbols}
        point |= {s: sympy.Rational(generator.randint(16, 96), 64) for s in formulas.parameters if s in present}
        values = formulas.evalf(DIGITS, subs=point)
        gaps = [abs(u - v) for u, v in zip(values.row(0), values.row(1), strict=True)]
        largest = max(range(len(gaps)), key=lambda k: gaps[k])
        if gaps[largest] > sympy.Float(10, DIGITS) ** (-DIGITS * 3 // 4) * max(1, *map(abs, values)):
            pair = float(values[0, largest]), float(values[1, largest])
            return Counterexample(divmod(largest, columns), pair, {str(s): float(value) for s, value in point.items()})
    return None
