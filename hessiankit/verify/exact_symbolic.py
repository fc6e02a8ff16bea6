"""The symbolic cases: closed forms on generic symbols against ``sympy.diff``, identically, at the smallest sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import sympy
from sympy.polys.fields import field

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.attention import AttentionAt
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.loss import CrossEntropyAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Shape
from derivations.softmax import SoftmaxAt
from hessiankit.verify.exact_case import ExactCase, ExactComparison, RationalDraw, SymbolicReference, against
from hessiankit.verify.exact_vecr import on_symbols, symbols, vecr_rules

Build = Callable[[RationalDraw], Iterator[ExactComparison]]


def operation(chapter: Callable[..., Operation], reference: Callable[..., Array], **shapes: Shape) -> Build:
    """Build a chapter on symbols against a function of them, entry by entry."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: symbols(name.lower(), *shape) for name, shape in shapes.items()}
        yield from against(chapter(**point), SymbolicReference(point, reference(**point)))

    return build


def affine(X: Array, W: Array, b: Array) -> Array:
    """Return sum_k x_ik w_kj + b_j."""
    rows = [[sum(x[k] * W[k, j] for k in range(len(W))) + b[j] for j in range(W.shape[1])] for x in X]
    return np.array(rows, dtype=object)


def head_product(kind: str, P: Array, R: Array, c: Any = 1) -> Array:
    """Return the scores or mixtures of two heads, each with half of the rows of P and R."""
    heads = []
    for h in range(2):
        p, r = np.split(P, 2)[h], np.split(R, 2)[h]
        heads.append(c * (p @ (r.T if kind == "scores" else r)))
    return np.concatenate(heads, 0)


def turned(cos: Array, sin: Array, X: Array) -> Array:
    """Return the rows (x, y) turned by the angles whose cosines and sines are given."""
    rows = [[c * x - s * y, s * x + c * y] for (x, y), c, s in zip(X, cos.reshape(-1), sin.reshape(-1), strict=True)]
    return np.array(rows, dtype=object)


def rotation(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the rotations of two rows by any numbers in place of cosines and sines."""
    X, cos, sin = symbols("x", 2, 2), symbols("c", 2, 1), symbols("s", 2, 1)
    at = LinearMapAt(X, rotary(2, 2, cos=cos, sin=sin), (2, 2))
    yield from against(at, SymbolicReference({"X": X}, turned(cos, sin, X)))


def heads_and_back(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the split of rows into two heads, and that it is undone by merging them."""
    X = symbols("x", 2, 4)
    split = split_heads(2, 2, 2)
    by_head = np.concatenate([X[:, :2], X[:, 2:]], 0)
    yield from against(LinearMapAt(X, split, (4, 2)), SymbolicReference({"X": X}, by_head))
    yield from against(LinearMapAt(X, merge_heads(2, 2, 2) @ split, (2, 4)), SymbolicReference({"X": X}, X))


def group_norm(kind: str, width: int, *names: str) -> Build:
    """Build the norm of two groups of a row with eps = s^2 - (mean square), so that the scales are symbols."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        d = 2 * width
        point = {"X": symbols("x", 1, d), **{name: symbols(name, d) for name in names}}
        eps, s, parts, chosen = symbols("eps", 2), symbols("s", 2), [], {}
        for g in range(2):
            x = point["X"][:, g * width : (g + 1) * width]
            x = x - x.sum() / sympy.Integer(width) if kind == "layernorm" else x
            square = (x**2).sum() / sympy.Integer(width)
            parts.append(x / sympy.sqrt(square + eps[g]))
            chosen[eps[g]] = s[g] ** 2 - square
        output = np.concatenate(parts, 1) * point.get("gamma", np.ones(d, dtype=object))
        output = output if "beta" not in names else output + point["beta"]
        at = GroupNormRowsAt(**point, groups=2, eps=np.array(list(chosen.values()), dtype=object), kind=kind)
        yield from against(at, SymbolicReference(point, output, chosen))

    return build


SYMBOLIC_PARTS: tuple[ExactCase, ...] = (
    ExactCase("affine", "X W + b", "L=2 d=2 m=3", operation(AffineAt, affine, X=(2, 2), W=(2, 3), b=(3,))),
    ExactCase(
        "head_products",
        "scores, two heads",
        "L=1 S=2 k=2",
        operation(
            lambda P, R: HeadProductAt(P, R, 2, "scores"),
            partial(head_product, "scores", c=1 / sympy.sqrt(2)),
            P=(2, 2),
            R=(4, 2),
        ),
    ),
    ExactCase(
        "head_products",
        "mixtures, two heads",
        "L=1 S=2 v=2",
        operation(lambda P, R: HeadProductAt(P, R, 2, "mix"), partial(head_product, "mix"), P=(2, 2), R=(4, 2)),
    ),
    ExactCase("linear_map", "rotary embedding", "L=2 w=2", rotation),
    ExactCase("linear_map", "split and merge heads", "L=2 H=2 w=2", heads_and_back),
    ExactCase("gains", "X diag(v)", "2x3", operation(ColumnScaleAt, lambda X, v: np.stack([x * v for x in X]), X=(2, 3), v=(3,))),
    ExactCase("gains", "a X", "2x2", operation(ScalarScaleAt, lambda X, a: a[0] * X, X=(2, 2), a=(1,))),
    ExactCase("gains", "X o Y", "2x2", operation(HadamardAt, lambda X, Y: X * Y, X=(2, 2), Y=(2, 2))),
    ExactCase("group_normalization", "two groups, gamma, beta, eps", "L=1 d=4", group_norm("layernorm", 2, "gamma", "beta")),
    ExactCase("group_normalization", "two groups, RMS norm, gamma, eps", "L=1 d=4", group_norm("rmsnorm", 2, "gamma")),
)


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
    K = field([sympy.Dummy() for _ in generators], sympy.ZZ)[0]
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


def normalization(kind: str, L: int, d: int, *names: str) -> Build:
    """Build a layer norm or RMS norm with eps_i = s_i^2 - var_i, so that its scale s_i is a symbol and eps is generic."""
    operation = {"layer": LayerNormAt, "rms": RMSNormAt}[kind]

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {"X": symbols("x", L, d), **{name: symbols(name, d) for name in names}}
        eps, s = symbols("eps", L), symbols("s", L)
        mean = point["X"].sum(1).reshape(L, 1) / sympy.Integer(d) if kind == "layer" else 0
        centred = point["X"] - mean
        variance = (centred**2).sum(1) / sympy.Integer(d)
        root = np.frompyfunc(sympy.sqrt, 1, 1)(variance + eps)
        output = centred / root.reshape(L, 1) * point.get("gamma", np.ones(d, dtype=object)) + point.get(
            "beta", 0 * symbols("b", d)
        )
        chosen = s**2 - variance
        reference = SymbolicReference(point, output, dict(zip(eps, chosen, strict=True)))
        yield from against(operation(**point, eps=chosen), reference)

    return build


def softmax(L: int, S: int) -> Build:
    """Build a row softmax of L x S logits."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        T = symbols("t", L, S)
        u = np.frompyfunc(sympy.exp, 1, 1)(T)
        yield from against(SoftmaxAt(T), SymbolicReference({"T": T}, u / u.sum(1).reshape(L, 1)))

    return build


def cross_entropy(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the cross entropy of one row of three logits (its value, a logarithm, is not rational in exponentials)."""
    logits = symbols("t", 1, 3)
    loss = sympy.log(sum(sympy.exp(t) for t in logits[0])) - logits[0, 1]
    reference = SymbolicReference({"logits": logits}, np.array([loss], dtype=object))
    yield from against(CrossEntropyAt(logits, [1]), reference, value=False)


def attention(d_V: int, d_K: int, d_v: int, d_out: int | None = None) -> Build:
    """Build attention of L = 2 tokens with formal weights u(T_ij), differentiated by SymPy.

    After differentiation row i's weights are written as (a_i s_i, (1 - a_i) s_i): the attention matrix has the rows
    (a_i, 1 - a_i), the s_i cancel, and what is left to compare are polynomials.
    """
    shapes = {"X": (2, d_V), "W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_v)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: symbols(name.lower(), *shape) for name, shape in shapes.items()}
        if d_out is not None:
            point["W_O"] = symbols("w_o", d_v, d_out)
        c, a, s = sympy.Symbol("c", positive=True), symbols("a", 2, 1), symbols("s", 2, 1)
        u = np.frompyfunc(FormalWeight, 1, 1)(c * (point["X"] @ point["W_Q"]) @ (point["X"] @ point["W_K"]).T)
        output = u / u.sum(1).reshape(2, 1) @ point["X"] @ point["W_V"]
        output = output if d_out is None else output @ point["W_O"]
        A = np.concatenate([a, 1 - a], 1)
        reference = SymbolicReference(point, output, dict(zip(u.reshape(-1), (A * s).reshape(-1), strict=True)))
        yield from against(AttentionAt(**point, scale=c, weights=A), reference)

    return build


def activation(kind: str, function: Callable[[Any], Any]) -> Build:
    """Build an activation of two symbols of either sign."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        X = np.array([sympy.symbols("x_0 x_1", real=True)], dtype=object)
        yield from against(ActivationAt(kind, X), SymbolicReference({"X": X}, np.frompyfunc(function, 1, 1)(X)))

    return build


def _gelu(x: Any) -> Any:
    return x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2


def _gelu_tanh(x: Any) -> Any:
    return x * (1 + sympy.tanh(sympy.sqrt(2 / sympy.pi) * (x + sympy.Rational(44715, 10**6) * x**3))) / 2


def _silu(x: Any) -> Any:
    return x / (1 + sympy.exp(-x))


SYMBOLIC: tuple[ExactCase, ...] = (
    ExactCase("vecr", "rules", "X 2x3, Y 3x4, D 2x2", lambda draw: vecr_rules(draw, on_symbols)),
    ExactCase("normalization", "layer norm", "L=1 d=3", normalization("layer", 1, 3)),
    ExactCase("normalization", "layer norm, gamma, beta, eps", "L=2 d=3", normalization("layer", 2, 3, "gamma", "beta")),
    ExactCase("normalization", "RMS norm, gamma, eps", "L=2 d=3", normalization("rms", 2, 3, "gamma")),
    ExactCase("softmax", "softmax", "L=1 S=3", softmax(1, 3)),
    ExactCase("softmax", "softmax", "L=2 S=2", softmax(2, 2)),
    ExactCase("activation", "gelu", "1x2", activation("gelu", _gelu)),
    ExactCase("activation", "gelu, tanh form", "1x2", activation("gelu_tanh", _gelu_tanh)),
    ExactCase("activation", "silu", "1x2", activation("silu", _silu)),
    ExactCase("activation", "tanh", "1x2", activation("tanh", sympy.tanh)),
    ExactCase("loss", "cross entropy", "L=1 C=3", cross_entropy),
    *SYMBOLIC_PARTS,
    ExactCase("attention", "nine Phi, X blocks", "L=2 d_V=2 d_K=1 d_v=1", attention(2, 1, 1)),
    ExactCase("attention", "sixteen Phi, X blocks, W_O", "L=2 d_V=2 d_K=1 d_v=1 d_out=1", attention(2, 1, 1, 1)),
)
