r"""``identical``: two formulas are equal, by their form or by exact arithmetic at random points, or a point shows that they are not.

Both become one list of assignments in which equal expressions have one name. Where names do not settle it, the list is evaluated
modulo the prime p = 2^61 - 1 at random numbers. Values of exp and other functions are drawn, one for each argument. Where r is no
square modulo p, a root of r needs another point, which one of two is. With k roots the product of the difference over their signs
is a rational function of the inputs alone, of 2^k times the degree D, so that two formulas that differ agree with a probability of
at most 4^k D / ((p - 1) / 2), times 2 for each condition of a case distinction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import add, mul
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.matrices.expressions.matexpr import MatrixElement

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, did_you_mean
from hessiankit.support.tables import Piece, Printed
from hessiankit.theory.exact.case import Draw
from hessiankit.theory.exact.residues import VALUES, Residue
from hessiankit.theory.formulas.assignments import Assignments, Recorder
from hessiankit.theory.formulas.code import identifier
from hessiankit.theory.formulas.result import Derivation

TRIES = 4096
"""Points that are drawn until all roots exist: with eight independent roots one in 256 is enough, and fewer than 1 in 10^6 runs fail."""
SMALL_MULTIPLES = (1, -1, 2, -2, 3, -3, 4, -4)
"""Quotients of arguments of exp that products and squares of weights make."""
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

    def _parts(self) -> Iterator[Piece]:
        if self.counterexample is not None:
            yield f"different: {self.counterexample}"
        elif self.method == "form":
            yield "identical: the same expression in every entry"
        elif self.method == "digits":
            yield f"identical in {DIGITS * 3 // 4} digits at a random point; the rules of powers and roots modulo a prime do not show it"
        else:
            yield f"identical at random points modulo 2^61 - 1; formulas that differ pass with a probability of at most {self.chance:.0e}"


@checked("identical", leave=("a", "b"))
def identical(a: Any, b: Any, *, points: int = 2, seed: int = 0) -> Equality:
    """Tell whether two formulas are equal at every point.

    Args:
        a: A result of :func:`hessiankit.derive` or of its ``sympy()``, or a SymPy matrix or matrix expression whose
            ``MatrixSymbol``s have the letters of the other formula's inputs (``X``, ``W_Q``, ``gamma``; a vector has one column).
            Symbols are those of parameters (``varepsilon`` or ``eps``, ``c``) and of sizes (``L``, ``d``).
        b: Another of these.
        points: Random points of exact arithmetic.
        seed: Of the points.

    Raises:
        InputError: If neither is a derivation, shapes differ, or a letter is not one of the derivation's.

    >>> import hessiankit as hk
    >>> from sympy import Identity, KroneckerProduct, MatrixSymbol
    >>> derived = hk.derive("linear", wrt="X", length=2)
    >>> W = MatrixSymbol("W", 4, 6)
    >>> hk.identical(derived, KroneckerProduct(Identity(2), W.T))
    identical: the same expression in every entry
    >>> bool(hk.identical(derived, 2 * KroneckerProduct(Identity(2), W.T)))
    False
    """
    derived = next((one for one in (a, b) if isinstance(one, (Derivation, Assignments))), None)
    if derived is None:
        raise InputError(f"identical: got {type(a).__name__} and {type(b).__name__}; one of the two is a result of derive")
    sizes = derived.sizes if isinstance(derived, Derivation) else {}
    letters = derived.sympy() if isinstance(derived, Derivation) else derived
    recorder, matrices = Recorder(), []
    for one in (a, b):
        listed = one.sympy() if isinstance(one, Derivation) else one if isinstance(one, Assignments) else _listed(one, letters, sizes)
        matrices.append(recorder.included(listed))
    left, right = matrices
    if left.shape != right.shape:
        raise InputError(f"identical: the shapes are {tuple(left.shape)} and {tuple(right.shape)}; pass formulas of one shape")
    if left == right:
        return Equality(True, "form")
    both = recorder.assignments(sympy.ImmutableDenseMatrix([left.flat(), right.flat()]), letters.inputs, letters.parameters)
    chances = [_chance_at(both, f"{seed}/{k}") for k in range(points)]
    if None not in chances:
        return Equality(True, "prime field", float(reduce(mul, chances)))
    counterexample = _counterexample(both, left.shape[1], seed)
    return Equality(counterexample is None, "digits", float("nan"), counterexample)


def _listed(formula: Any, letters: Assignments, sizes: Mapping[str, int]) -> Assignments:
    """Return a user's matrix as a list of no assignments in the symbols of a derivation."""
    if not isinstance(formula, (sympy.MatrixBase, sympy.MatrixExpr)):
        raise InputError(f"identical: got {type(formula).__name__}; pass a result of derive or a matrix of SymPy")
    numbers = {symbol: sizes[symbol.name] for symbol in formula.free_symbols if symbol.name in sizes}
    sized = formula.subs(numbers)
    matrix = sympy.ImmutableDenseMatrix(sized.doit().as_explicit() if isinstance(sized, sympy.MatrixExpr) else sized)
    arrays = {name: symbols for letter, symbols in letters.inputs.items() for name in (letter, identifier(letter))}
    known = {symbol.name: symbol for symbols in letters.inputs.values() for symbol in symbols}
    for symbol in letters.parameters:
        known |= dict.fromkeys((symbol.name, identifier(symbol.name).replace("varepsilon", "eps"), identifier(symbol.name)), symbol)
    names: dict[Any, Any] = {}
    for atom in matrix.atoms(MatrixElement, sympy.Symbol):
        if isinstance(atom, MatrixElement):
            if str(atom.parent) not in arrays or atom.parent.shape != arrays[str(atom.parent)].shape:
                shapes = ", ".join(f"{identifier(letter)} {symbols.shape}" for letter, symbols in letters.inputs.items())
                raise InputError(f"identical: {atom.parent} {atom.parent.shape} is no input; the inputs are {shapes}")
            names[atom] = arrays[str(atom.parent)][atom.i, atom.j]
    free = {s for s in matrix.xreplace(names).free_symbols if isinstance(s, sympy.Symbol)}
    for symbol in free - set(names.values()):
        if symbol.name not in known:
            raise InputError(f"identical: {symbol} is no letter of the derivation{did_you_mean(symbol.name, known)}")
        names[symbol] = known[symbol.name]
    return Assignments((), matrix.xreplace(names), letters.inputs, letters.parameters)


def _chance_at(both: Assignments, seed: str) -> float | None:
    """Return a bound on the probability that two rows that differ agree as these do at a point; None if they do not agree."""
    for attempt in range(TRIES):
        field = _Field(f"{seed}/{attempt}", dict(both.replacements))
        try:
            for name, meaning in both.replacements:
                field.values[name] = field(meaning)
            pairs = [(field(u), field(v)) for u, v in zip(both.matrix.row(0), both.matrix.row(1), strict=True)]
        except ValueError:  # a root that does not exist at this point
            continue
        if any(u != v for u, v in pairs):
            return None
        degree = max((difference.degree for difference in (u - v for u, v in pairs) if isinstance(difference, Residue)), default=0)
        return min(1.0, float(degree * 4**field.roots * 2 ** len(field.conditions)) / VALUES)
    return None


class _Field:
    """Expressions modulo a prime at a random point."""

    def __init__(self, seed: str, meanings: Mapping[sympy.Basic, sympy.Expr]) -> None:
        self.values: dict[sympy.Basic, Any] = {}
        self._meanings = meanings
        self.roots, self.conditions = 0, set[sympy.Basic]()
        self._draw, self._functions = Draw(seed), dict[tuple[Any, ...], Residue]()

    def __call__(self, expression: sympy.Expr) -> Any:
        """Return the value of an expression: an int, a fraction or a residue.

        Raises:
            ValueError: If a root does not exist, or something is divided by zero.
        """
        match expression:
            case sympy.Rational():
                return Fraction(expression.p, expression.q)
            case sympy.Add():
                return reduce(add, map(self, expression.args))
            case sympy.Mul():
                return reduce(mul, map(self, expression.args))
            case sympy.Pow(exp=sympy.Rational(q=1 | 2)):
                return self._power(self(expression.base), int(expression.exp.p), int(expression.exp.q))
            case sympy.Piecewise():
                return next(self(value) for value, condition in expression.args if self._true(condition))
            case sympy.exp():
                argument = expression.exp.xreplace(self._meanings)  # the difference of two logits, where these have a name
                terms = [self._power_of_seen(self(term)) for term in sympy.Add.make_args(argument)]
                return reduce(mul, terms) if None not in terms else self._exponential(self(expression.exp))
            case sympy.Function():
                return self._odd_or_even(expression.func, *map(self, expression.args))
        if expression not in self.values:  # a symbol, or a number such as pi
            self.values[expression] = self._draw.number()
        return self.values[expression]

    def _power(self, base: Any, n: int, root: int) -> Any:
        base = base if isinstance(base, Residue) else Residue(0) + base
        if root == 2:
            self.roots += base.degree > 0
            base = Residue(base.sqrt().value, base.degree + base.reciprocal().degree)
        return base**n if n > 0 else (base**-n).reciprocal()

    def _power_of_seen(self, argument: Any) -> Residue | None:
        """Return exp of a small multiple of an argument that has a value of exp, which is a power of this value."""
        for n in SMALL_MULTIPLES:
            value = self._functions.get((sympy.exp, argument * Fraction(1, n)))
            if value is not None:
                return self._power(value, n, 1)  # type: ignore[no-any-return]
        return None

    def _exponential(self, argument: Any) -> Residue:
        value = self._power_of_seen(argument)
        if value is None:
            value = self._functions[sympy.exp, argument] = self._draw.number()
        return value

    def _odd_or_even(self, function: Any, argument: Any) -> Any:
        """Return a drawn value; those of x and -x are equal for cosh and cos, and opposite for erf, tanh and other functions."""
        sign = argument > 0
        value = self._functions.setdefault((function, argument if sign else -argument), self._draw.number())
        return value if sign or function in (sympy.cos, sympy.cosh, sympy.Abs) else -value

    def _true(self, condition: Any) -> bool:
        if condition in (sympy.true, sympy.false):
            return bool(condition)
        if not isinstance(condition, Relational):
            raise InputError(f"identical: the condition {condition} is no comparison of two numbers")
        self.conditions.add(condition)
        difference = self(condition.gts - condition.lts) if condition.rel_op in (">", ">=", "<", "<=") else self(condition.lhs - condition.rhs)
        return bool(difference > 0)


def _counterexample(both: Assignments, columns: int, seed: int) -> Counterexample | None:
    """Return a real point at which two rows differ, with the entry that differs most, or None if they agree in all digits."""
    drawn = random.Random(seed)
    symbols = [*dict.fromkeys(s for letters in both.inputs.values() for s in letters), *both.parameters]
    occurring = {s for e in (*(m for _, m in both.replacements), *both.matrix) for s in e.free_symbols}
    point = {s: sympy.Rational(drawn.randint(-96, 96), 64) for s in symbols if s in occurring}
    point |= {s: sympy.Rational(drawn.randint(16, 96), 64) for s in both.parameters if s in occurring}
    values = both.evalf(DIGITS, subs=point)
    gaps = [abs(u - v) for u, v in zip(values.row(0), values.row(1), strict=True)]
    largest = max(range(len(gaps)), key=lambda k: gaps[k])
    if gaps[largest] <= sympy.Float(10, DIGITS) ** (-DIGITS * 3 // 4) * max(1, *map(abs, values)):
        return None
    pair = float(values[0, largest]), float(values[1, largest])
    return Counterexample(divmod(largest, columns), pair, {str(s): float(value) for s, value in point.items()})
