"""Symbolic arithmetic for the exact check: points of symbols, derivatives by ``sympy.diff``, and a test for zero."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import numpy as np
import sympy
from sympy.polys import fields

from derivations.arrays import Array
from derivations.operation import Shape
from hessiankit.verify import jets
from hessiankit.verify.exact_case import ExactPoint, ExactReference, RationalDraw


@dataclass(frozen=True)
class SymbolicReference(ExactReference):
    """Derivatives of an array of SymPy expressions by ``sympy.diff``, with ``substitutions`` made afterwards."""

    variables: Mapping[str, Array]
    output: Array
    substitutions: Mapping[sympy.Expr, sympy.Expr] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.variables)

    @property
    def value(self) -> Array:
        return substituted(self.output, self.substitutions)

    def jacobian(self, name: str) -> Array:
        return substituted(self._derivative(self.output, name), self.substitutions)

    def hessian(self, name_i: str, name_j: str) -> Array:
        return substituted(self._derivative(self._derivative(self.output, name_i), name_j), self.substitutions)

    def _derivative(self, array: Array, name: str) -> Array:
        symbols = self.variables[name].reshape(-1)
        entries = [[sympy.diff(y, x) for x in symbols] for y in array.reshape(-1)]
        return np.array(entries, dtype=object).reshape(array.size, symbols.size)


def substituted(array: Array, substitutions: Mapping[sympy.Expr, sympy.Expr]) -> Array:
    """Return an array of expressions with some of their parts replaced."""
    return np.frompyfunc(lambda e: sympy.sympify(e).xreplace(substitutions), 1, 1)(array)


def symbols(name: str, *shape: int) -> Array:
    """Return an object array of positive symbols called name_i or name_ij (0-based).

    >>> symbols("x", 1, 2)
    array([[x_00, x_01]], dtype=object)
    """
    out = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        out[index] = sympy.Symbol(f"{name}_{''.join(map(str, index))}", positive=True)
    return out


class SymbolicDraw(RationalDraw):
    """A source of points whose arguments are positive symbols; the arrays that it draws stay rational constants.

    Roots and exponentials become symbols after differentiation: eps_n turns into s_n^2 - mean square, so that the scale of a
    row is the symbol s_n; row i of the attention weights of two tokens into (a_i s_i, (1 - a_i) s_i), so that the attention
    matrix has the rows (a_i, 1 - a_i), the s_i cancel, and polynomials are left to compare.

    >>> SymbolicDraw("a seed").point(X=(1, 2)).at["X"]
    array([[X_00, X_01]], dtype=object)
    """

    scale = sympy.Symbol("c", positive=True)

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.substitutions: dict[sympy.Expr, sympy.Expr] = {}

    def lift(self, at: dict[str, Array]) -> ExactPoint:
        return self.point(**{name: array.shape for name, array in at.items()})

    def point(self, **shapes: Shape) -> ExactPoint:
        variables = {name: symbols(name, *shape) for name, shape in shapes.items()}
        return ExactPoint(variables, variables, lambda output: SymbolicReference(variables, output, self.substitutions))

    def exponential(self) -> Any:
        return sympy.exp

    def attention_exponential(self) -> Any:
        return FormalWeight

    def eps(self, mean_square: Any) -> Any:
        n = len(self.substitutions)
        eps, s = sympy.symbols(f"eps_{n} s_{n}", positive=True)
        self.substitutions[eps] = s**2 - mean_square
        return eps

    def closed(self, eps: Array) -> Array:
        return substituted(eps, self.substitutions)

    def weights(self, logits: Array, exp: Any, mask: Array | None = None) -> Array | None:
        return None

    def attention_weights(self, at: Mapping[str, Array], exp: Any, mask: Array | None = None) -> Array:
        logits = jets.attention_logits(at["X"], at["W_Q"], at["W_K"], self.scale)
        a, s = symbols("a", 2, 1), symbols("s", 2, 1)
        A = np.concatenate([a, 1 - a], 1)
        self.substitutions |= {exp(t): w for t, w in zip(logits.reshape(-1), (A * s).reshape(-1), strict=True)}
        return A


class FormalWeight(sympy.Function):
    """An exponential that SymPy differentiates (u' = u) and otherwise leaves alone: a formal weight."""

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        """Return the derivative, which is the weight itself."""
        return self


def is_identically_zero(expression: Any) -> bool:
    """Tell whether an expression in symbols, square roots and exponentials vanishes identically.

    Roots of perfect squares are taken and exponentials become independent generators. What is left is evaluated in the
    field of rational functions of its generators, where zero has one form; ``sympy.simplify`` has the last word on
    expressions with generators that are not independent (numbers' roots, error functions).

    >>> x, s = sympy.symbols("x s", positive=True)
    >>> is_identically_zero(sympy.sqrt((s + x) * (s - x) + x**2) - s), is_identically_zero(sympy.exp(x) - x)
    (True, False)
    """
    e = sympy.sympify(expression).replace(lambda p: p.is_Pow and p.exp.is_Rational and not p.exp.is_Integer, _take_root)
    e = e.replace(sympy.exp, _independent)
    generators: dict[sympy.Expr, None] = {}
    _collect(e, generators, set())
    if not generators:
        return bool(e == 0)
    K = fields.field([sympy.Dummy() for _ in generators], sympy.ZZ)[0]
    zero = _evaluate(e, K, dict(zip(generators, K.gens, strict=True))) == 0
    return bool(zero or (not all(g.is_Symbol or isinstance(g, FormalWeight) for g in generators) and sympy.simplify(e) == 0))


def _collect(e: sympy.Expr, generators: dict[sympy.Expr, None], seen: set[sympy.Expr]) -> None:
    """Gather what an expression is a rational function of."""
    if e in seen or e.is_Rational:
        return
    seen.add(e)
    if e.is_Add or e.is_Mul or (e.is_Pow and e.exp.is_Integer):
        for part in e.args[:1] if e.is_Pow else e.args:
            _collect(part, generators, seen)
    else:
        generators[e] = None


def _evaluate(e: sympy.Expr, K: Any, known: dict[sympy.Expr, Any]) -> Any:
    """Return the element of the field K that an expression is, remembering those of its parts in ``known``."""
    if e not in known:
        parts = [] if e.is_Rational else [_evaluate(part, K, known) for part in (e.args[:1] if e.is_Pow else e.args)]
        if e.is_Rational:
            known[e] = K(e.p) / K(e.q)
        elif e.is_Pow:
            known[e] = parts[0] ** int(e.exp)
        else:
            known[e] = reduce(operator.add if e.is_Add else operator.mul, parts)
    return known[e]


@cache
def _take_root(power: sympy.Pow) -> sympy.Expr:
    return sympy.sqrt(sympy.factor(sympy.expand(power.base))) ** (2 * power.exp)


@cache
def _independent(exponent: sympy.Expr) -> sympy.Expr:
    """exp(sum_k c_k t_k) = prod_k Weight(t_k)^{c_k}, with c_k rational."""
    coefficients = sympy.expand(exponent).as_coefficients_dict()
    return sympy.Mul(*(FormalWeight(term) ** c for term, c in coefficients.items()))
