"""Second-order Taylor arithmetic over the rationals: exact first and second derivatives without a closed form.

A *jet* carries the value, the gradient and the Hessian of a number with respect to named input variables, all as
``Fraction``. Numpy's object arrays do the matrix algebra, so that the forward formulas below are written as they are
read; Jacobians and second derivatives in vec_r order are then read off the output. Nothing here knows a derivative of
anything but ``+ * / sqrt exp log relu`` of one number, so agreement with a closed form of a whole block, entry by entry
and with ``==``, proves that closed form at the drawn point. The same formulas take SymPy expressions in place of jets.

Exponentials stay rational through *formal weights* (see ``FormalExponential``).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from derivations.arrays import Array


class ExactNumber(ABC):
    """A number with ``+ - * /`` that also meets ``int`` and ``Fraction``, and with roots of its own.

    ``derivations.arrays.sqrt`` takes the roots of such numbers by their method ``sqrt``.
    """

    __slots__ = ()

    @abstractmethod
    def __neg__(self) -> Any:
        """Return -self."""

    @abstractmethod
    def reciprocal(self) -> Any:
        """Return 1 / self."""

    @abstractmethod
    def sqrt(self) -> Any:
        """Return the square root."""


Number = int | Fraction | ExactNumber
SCALE = Fraction(2, 3)
"""A rational factor of attention logits, in place of 1/sqrt(d_K)."""
_TURNS = (Fraction(3, 5), Fraction(5, 13), Fraction(-8, 17)), (Fraction(4, 5), Fraction(12, 13), Fraction(15, 17))
"""Cosines and sines of three angles that have rational ones."""


class KinkError(ValueError):
    """The derivative of a piecewise linear function at a kink."""


class Jet:
    """A rational number with its gradient {i: g_i} and Hessian {(i, j): h_ij, i <= j}; absent keys are zero.

    >>> x, y = Jet(Fraction(3), {0: 1}), Jet(Fraction(2), {1: 1})
    >>> f = x * x / y  # df = (2x/y, -x^2/y^2), d2f = (2/y, -2x/y^2, 2x^2/y^3)
    >>> [str(v) for v in (f.value, *f.grad.values(), *f.hess.values())]
    ['9/2', '3', '-9/4', '1', '9/4', '-3/2']
    """

    __slots__ = ("grad", "hess", "value")

    def __init__(self, value: Any, grad: dict[int, Any] | None = None, hess: dict[tuple[int, int], Any] | None = None) -> None:
        self.value, self.grad, self.hess = value, grad or {}, hess or {}

    def chain(self, f: Any, df: Any, d2f: Any) -> Jet:
        """Return f(self) from the value and the first two derivatives of f at ``self.value``."""
        hess = {key: df * h for key, h in self.hess.items()}
        if d2f:
            for i, p in self.grad.items():
                for j, q in self.grad.items():
                    if i <= j:
                        hess[i, j] = hess.get((i, j), 0) + d2f * p * q
        return Jet(f, {i: df * g for i, g in self.grad.items()}, hess)

    def __add__(self, other: Any) -> Jet:
        if isinstance(other, Jet):
            return Jet(self.value + other.value, _combine(1, self.grad, 1, other.grad), _combine(1, self.hess, 1, other.hess))
        return Jet(self.value + other, self.grad, self.hess) if isinstance(other, Number) else NotImplemented

    def __mul__(self, other: Any) -> Jet:
        if isinstance(other, float):  # a constant of an equation, which is a rational number too
            other = Fraction(other)
        if isinstance(other, Jet):
            a, b = self.value, other.value
            hess = _combine(b, self.hess, a, other.hess)
            for i, p in self.grad.items():
                for j, q in other.grad.items():
                    key = (i, j) if i <= j else (j, i)
                    hess[key] = hess.get(key, 0) + (2 * p * q if i == j else p * q)
            return Jet(a * b, _combine(b, self.grad, a, other.grad), hess)
        return self.chain(self.value * other, other, 0) if isinstance(other, Number) else NotImplemented

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Jet:
        return self.chain(-self.value, -1, 0)

    def __sub__(self, other: Any) -> Jet:
        return self + (-other) if isinstance(other, Jet | Number) else NotImplemented

    def __rsub__(self, other: Any) -> Jet:
        return -self + other

    def __truediv__(self, other: Any) -> Jet:
        if isinstance(other, Jet):
            return self * other.reciprocal()
        return self * _reciprocal(other) if isinstance(other, Number) else NotImplemented

    def __rtruediv__(self, other: Any) -> Jet:
        return self.reciprocal() * other

    def reciprocal(self) -> Jet:
        """Return 1 / self."""
        r = _reciprocal(self.value)
        return self.chain(r, -(r**2), 2 * r**3)

    def sqrt(self) -> Jet:
        """Return the square root; a value whose root is irrational raises ValueError (see ``chosen_eps``)."""
        root = self.value.sqrt() if isinstance(self.value, ExactNumber) else _rational_root(Fraction(self.value))
        return self.chain(root, 1 / (2 * root), -1 / (4 * root**3))

    def log(self) -> Jet:
        """Return the logarithm, whose derivatives are rational; its value is NaN, as no rational number is right."""
        r = 1 / Fraction(self.value)
        return self.chain(math.nan, r, -(r**2))

    def relu(self, slope: Number = 0) -> Jet:
        """Return max(self, slope * self) for 0 <= slope < 1; at the kink it raises KinkError."""
        if self.value == 0:
            raise KinkError("relu: the value is 0, where the derivative is not defined; draw another point")
        return self if self.value > 0 else self * slope

    def __repr__(self) -> str:
        return f"Jet({self.value}; {len(self.grad)} first, {len(self.hess)} second derivatives)"


def _reciprocal(number: Number) -> Any:
    return number.reciprocal() if isinstance(number, ExactNumber) else 1 / Fraction(number)


def _rational_root(value: Fraction) -> Fraction:
    root = Fraction(math.isqrt(max(value.numerator, 0)), math.isqrt(value.denominator))
    if value <= 0 or root**2 != value:
        raise ValueError(f"sqrt: {value} is not the square of a positive rational; choose the point (or eps) so that it is")
    return root


def _combine(a: Any, x: Mapping[Any, Any], b: Any, y: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return {key: a x_key + b y_key}."""
    out = dict(x) if a == 1 else {key: a * v for key, v in x.items()} if a else {}
    if b:
        for key, v in y.items():
            out[key] = out[key] + b * v if key in out else b * v
    return out


class FormalFunction:
    """A smooth scalar function known at each argument by three drawn rationals: its value and first two derivatives.

    A closed form that is an identity in sigma(x), sigma'(x), sigma''(x) holds for every smooth sigma if it holds for
    these: some polynomial takes any such numbers at finitely many points.

    Args:
        seed: of the three numbers.
        number: a source of them, in place of rationals.

    >>> f = FormalFunction(seed=0)
    >>> f.taylor(Fraction(1, 2)) == f.taylor(Fraction(1, 2)), f(Jet(Fraction(2), {0: 1})).grad[0] == f.taylor(2)[1]
    (True, True)
    """

    def __init__(self, seed: int | str = 0, number: Callable[[], Any] | None = None) -> None:
        self._random, self._taylor = random.Random(seed), dict[Any, tuple[Any, Any, Any]]()
        self._number = number or self._rational

    def taylor(self, x: Number) -> tuple[Any, Any, Any]:
        """Return the value, the first and the second derivative at x."""
        if x not in self._taylor:
            self._taylor[x] = self._draw()
        return self._taylor[x]

    def __call__(self, x: Jet | Number) -> Any:
        """Return the function of x, a jet or a number as x is."""
        return x.chain(*self.taylor(x.value)) if isinstance(x, Jet) else self.taylor(x)[0]

    def _draw(self) -> tuple[Any, Any, Any]:
        return self._number(), self._number(), self._number()

    def _rational(self) -> Fraction:
        return Fraction(self._random.choice((-1, 1)) * self._random.randint(1, 9), 2)


class FormalExponential(FormalFunction):
    """An exponential with rational values: exp(t) is a positive rational u(t) drawn once for each t, with u' = u'' = u.

    Why this is legitimate: a closed form and the derivative that it claims to be are both rational functions of the
    inputs x and of the weights u_k = exp(t_k(x)), obtained from u' = u alone. If they are equal with the u_k as free
    variables then they are equal at u_k = exp(t_k). Conversely, exponentials of functions t_k(x) that are linearly
    independent over Q (up to constants) are algebraically independent over the rational functions of x (Ax), so that
    nothing true is rejected. And two different rational functions differ at random u with probability one.

    >>> exp = FormalExponential(seed=0)
    >>> exp(Fraction(1, 2)) == exp(Fraction(1, 2)) > 0
    True
    """

    def _draw(self) -> tuple[Any, Any, Any]:
        u = self._number()
        return u, u, u

    def _rational(self) -> Fraction:
        return Fraction(self._random.randint(1, 9), self._random.choice((1, 2)))


Exponential = Callable[[Any], Any]
"""A ``FormalExponential``, or a function that SymPy differentiates as one."""


class Variables:
    """Named rational arrays lifted to jets, one variable an entry, and the vec_r derivatives of what is built on them.

    >>> v = Variables({"A": np.array([[2, 3]], dtype=object), "B": np.array([[5], [7]], dtype=object)})
    >>> out = v["A"] @ v["B"]
    >>> v.jacobian(out, "A").tolist(), v.hessian(out, "A", "B").tolist()
    ([[5, 7]], [[1, 0], [0, 1]])
    """

    def __init__(self, arguments: Mapping[str, Array]) -> None:
        self.arrays, self._offset, start = dict[str, Array](), dict[str, int](), 0
        for name, values in arguments.items():
            jets = np.empty(values.size, dtype=object)
            jets[:] = [Jet(value, {start + k: 1}) for k, value in enumerate(values.reshape(-1))]
            self.arrays[name], self._offset[name] = jets.reshape(values.shape), start
            start += values.size

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def _indices(self, name: str) -> range:
        return range(self._offset[name], self._offset[name] + self.arrays[name].size)

    def jacobian(self, output: Array, name: str) -> Array:
        """Return d vec_r(output) / d vec_r(name)^T, of shape (out, n)."""
        columns = self._indices(name)
        entries = [[_as_jet(y).grad.get(i, 0) for i in columns] for y in output.reshape(-1)]
        return np.array(entries, dtype=object).reshape(output.size, len(columns))

    def hessian(self, output: Array, name_i: str, name_j: str) -> Array:
        """Return d vec_r(d output / d name_i) / d vec_r(name_j)^T, of shape (out * n_i, n_j)."""
        rows, columns = self._indices(name_i), self._indices(name_j)
        entries = [[_as_jet(y).hess.get((min(i, j), max(i, j)), 0) for j in columns] for y in output.reshape(-1) for i in rows]
        return np.array(entries, dtype=object).reshape(output.size * len(rows), len(columns))


def _as_jet(y: Jet | Number) -> Jet:
    return y if isinstance(y, Jet) else Jet(y)


def _map(function: Any, x: Array) -> Array:
    return np.frompyfunc(function, 1, 1)(x)


def root(x: Any) -> Any:
    """Return the square root of a jet, an exact number or an expression."""
    return sympy.sqrt(x) if isinstance(x, sympy.Expr) else x.sqrt()


def values(x: Array) -> Array:
    """Return the values of an array of jets, an array of numbers or expressions as it is."""
    return _map(lambda y: _as_jet(y).value, x)


def eps_for(mean_square: Fraction) -> Fraction:
    """Return the eps > 0 for which sqrt(mean_square + eps) is the next multiple of 1/2.

    >>> eps_for(Fraction(2)), eps_for(Fraction(1, 3))  # 2 + 1/4 = 1.5^2, 1/3 + 2/3 = 1^2
    (Fraction(1, 4), Fraction(2, 3))
    """
    return Fraction(math.isqrt(math.floor(4 * mean_square)) + 1, 2) ** 2 - mean_square


Eps = Array | Number | Callable[[Any], Any]
"""Numbers, one a row or one for all, or a function that chooses eps from the mean square of a row."""


def rms_norm(X: Array, gamma: Array | None = None, eps: Eps = eps_for) -> tuple[Array, Array]:
    """Return X_ij gamma_j / sqrt(mean_j X_ij^2 + eps_i) and the eps used, one a row."""
    mean_square = (X * X).sum(1) * Fraction(1, X.shape[1])
    used = _map(eps, values(mean_square)) if callable(eps) else np.full(X.shape[0], 0, dtype=object) + eps
    out = X / _map(root, mean_square + used).reshape(-1, 1)
    return (out if gamma is None else out * gamma.reshape(1, -1)), used


def layer_norm(X: Array, gamma: Array | None = None, beta: Array | None = None, eps: Eps = eps_for) -> tuple[Array, Array]:
    """Return gamma_j (X_ij - mu_i) / sqrt(var_i + eps_i) + beta_j and the eps used, one a row."""
    centred = X - (X.sum(1) * Fraction(1, X.shape[1])).reshape(-1, 1)
    out, used = rms_norm(centred, gamma, eps)
    return (out if beta is None else out + beta.reshape(1, -1)), used


def softmax(T: Array, exp: Exponential, mask: Array | None = None) -> Array:
    """Return the row softmax of T; where ``mask`` is False the weight is exactly 0."""
    weights = _map(exp, T)
    if mask is not None:
        weights = np.where(mask, weights, 0)
    return weights / weights.sum(1).reshape(-1, 1)


def attention_logits(X: Array, W_Q: Array, W_K: Array, scale: Number) -> Array:
    """Return scale X W_Q W_K^T X^T."""
    return scale * (X @ W_Q) @ (X @ W_K).T


def attention(
    X: Array,
    W_Q: Array,
    W_K: Array,
    W_V: Array,
    W_O: Array | None = None,
    *,
    scale: Number,
    exp: Exponential,
    mask: Array | None = None,
) -> Array:
    """Return softmax(scale X W_Q W_K^T X^T) X W_V (W_O)."""
    out = softmax(attention_logits(X, W_Q, W_K, scale), exp, mask) @ (X @ W_V)
    return out if W_O is None else out @ W_O


def linear(X: Array, W: Array, b: Array | None = None) -> Array:
    """Return X W + 1 b^T."""
    return X @ W if b is None else X @ W + b.reshape(1, -1)


def feed_forward(
    Y: Array,
    W_1: Array,
    W_2: Array,
    b_1: Array | None = None,
    b_2: Array | None = None,
    *,
    activation: Callable[[Jet], Jet] = Jet.relu,
    residual: bool = True,
) -> Array:
    """Return (Y +) activation(Y W_1 + b_1) W_2 + b_2."""
    out = linear(_map(activation, linear(Y, W_1, b_1)), W_2, b_2)
    return Y + out if residual else out


def post_norm_block(
    v: Mapping[str, Array], *, activation: Callable[[Jet], Jet] = Jet.relu, **options: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Return Z = LN_2(Y + FFN(Y)) with Y = LN_1(X + attention(X)), and the two eps used, for arrays by their names.

    ``options`` are those of ``attention`` (scale, exp, mask); names that are absent (biases, gains, W_O) are left out.
    """
    X, get = v["X"], v.get
    F = attention(X, v["W_Q"], v["W_K"], v["W_V"], get("W_O"), **options)
    Y, eps_1 = layer_norm(X + F, get("gamma_1"), get("beta_1"))
    S = feed_forward(Y, v["W_1"], v["W_2"], get("b_1"), get("b_2"), activation=activation)
    Z, eps_2 = layer_norm(S, get("gamma_2"), get("beta_2"))
    return Z, (eps_1, eps_2)


def rational_turns(length: int, pairs: int = 1) -> tuple[Array, Array]:
    """Return the cosines and the sines of rational rotations, L x pairs, neighbours all different.

    >>> cos, sin = rational_turns(2)
    >>> (cos * cos + sin * sin).tolist()
    [[Fraction(1, 1)], [Fraction(1, 1)]]
    """
    found = [[[values[(row + 2 * k) % 3] for k in range(pairs)] for row in range(length)] for values in _TURNS]
    return np.array(found[0], dtype=object), np.array(found[1], dtype=object)


def turned(X: Array, length: int, turns: tuple[Array, Array] | None = None) -> Array:
    """Return the rows of stacked heads, row l of each with its pairs (x_i, x_{i + w/2}) turned, by default by rational turns."""
    half = X.shape[1] // 2
    cos, sin = turns or rational_turns(length, half)
    rows = []
    for n, x in enumerate(X):
        pairs = [(cos[n % length, i], sin[n % length, i], x[i], x[i + half]) for i in range(half)]
        rows.append([c * a - s * b for c, s, a, b in pairs] + [s * a + c * b for c, s, a, b in pairs])
    return np.array(rows, dtype=object)


def mean_squared_error(Z: Array, target: Array) -> Array:
    """Return mean((Z - target)^2) as an array of one entry."""
    difference = Z - target
    return np.array([(difference * difference).sum() * Fraction(1, Z.size)], dtype=object)


def cross_entropy(logits: Array, labels: Sequence[int], exp: Exponential) -> Array:
    """Return the mean over rows of -log softmax(logits)[label] as an array of one entry (its value is NaN, see ``Jet.log``)."""
    sums = [_map(exp, row).sum() for row in logits]
    logarithms = [sympy.log(s) if isinstance(s, sympy.Expr) else s.log() for s in sums]
    losses = [log - row[label] for log, row, label in zip(logarithms, logits, labels, strict=True)]
    return np.array([sum(losses) * Fraction(1, len(losses))], dtype=object)


def mean_pool_head(Z: Array, W_c: Array, b_c: Array | None = None) -> Array:
    """Return (1/L) 1^T Z W_c + b_c, of shape (1, C)."""
    return linear(Z.sum(0).reshape(1, -1) * Fraction(1, Z.shape[0]), W_c, b_c)
