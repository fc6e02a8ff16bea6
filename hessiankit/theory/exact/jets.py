"""Second-order Taylor arithmetic over a prime field: exact first and second derivatives without a closed form.

A *jet* carries the value, the gradient and the Hessian of a number with respect to named input variables, all as residues
(``Residue``). Numpy's object arrays do the matrix algebra; Jacobians and second derivatives in vec_r order are read off the
output. Nothing here knows a derivative of anything but ``+ * / sqrt relu`` of one number and of drawn functions, so agreement
with a closed form, entry by entry and with ``==``, shows that closed form to be right at the drawn point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from derivations.arrays import Array
from hessiankit.theory.exact.residues import Arithmetic, Residue

Number = int | Fraction | Residue


class Jet(Arithmetic):
    """A number with its gradient {i: g_i} and Hessian {(i, j): h_ij, i <= j}; absent keys are zero.

    >>> x, y = Jet(Residue(3), {0: 1}), Jet(Residue(2), {1: 1})
    >>> f = x * x * y  # df = (2xy, x^2), d2f = (2y, 2x, 0)
    >>> f.value, f.grad, f.hess
    (18 mod p, {0: 12 mod p, 1: 9 mod p}, {(0, 0): 4 mod p, (0, 1): 6 mod p})
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

    def reciprocal(self) -> Jet:
        """Return 1 / self."""
        r = 1 / self.value
        return self.chain(r, -(r**2), 2 * r**3)

    def sqrt(self) -> Jet:
        """Return the square root; a value that is no square raises ValueError."""
        root = self.value.sqrt()
        return self.chain(root, 1 / (2 * root), -1 / (4 * root**3))

    def relu(self, slope: Number = 0) -> Jet:
        """Return max(self, slope * self) for 0 <= slope < 1; at the kink ValueError is raised."""
        if self.value == 0:
            raise ValueError("relu: the value is 0, where the derivative is not defined; draw another point")
        return self if self.value > 0 else self * slope

    def __repr__(self) -> str:
        return f"Jet({self.value}; {len(self.grad)} first, {len(self.hess)} second derivatives)"


def _combine(a: Any, x: Mapping[Any, Any], b: Any, y: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return {key: a x_key + b y_key}."""
    out = dict(x) if a == 1 else {key: a * v for key, v in x.items()} if a else {}
    if b:
        for key, v in y.items():
            out[key] = out[key] + b * v if key in out else b * v
    return out


class FormalFunction:
    """A scalar function known at each argument by its value and first two derivatives there, which are drawn.

    A closed form that is an identity in sigma(x), sigma'(x), sigma''(x) holds for every smooth sigma if it holds for
    these: some polynomial takes any such numbers at finitely many points.

    >>> f = FormalFunction(lambda x: (5, 6, 7))
    >>> f(Jet(2, {0: 1})), f(2)
    (Jet(5; 1 first, 1 second derivatives), 5)
    """

    def __init__(self, draw: Callable[[Any], tuple[Any, Any, Any]]) -> None:
        self.taylor = cache(draw)  # value, first and second derivative at x, drawn once

    def derivatives(self, x: Array, slope: Any = None) -> tuple[Array, Array, Array]:
        """Return value, first and second derivative of every entry: a kind of ``derivations.activation_functions``."""
        taylor: Any = np.frompyfunc(self.taylor, 1, 3)(x)
        return taylor

    def __call__(self, x: Jet | Number) -> Any:
        """Return the function of x: a jet for a jet, a number for a number."""
        return x.chain(*self.taylor(x.value)) if isinstance(x, Jet) else self.taylor(x)[0]


class Variables:
    """Named arrays of numbers, ``at``, the same lifted to ``jets``, one variable an entry, and vec_r derivatives in these.

    >>> v = Variables({"A": np.array([[2, 3]], dtype=object), "B": np.array([[5], [7]], dtype=object)})
    >>> out = v.jets["A"] @ v.jets["B"]
    >>> v.jacobian(out, "A").tolist(), v.hessian(out, "A", "B").tolist()
    ([[5, 7]], [[1, 0], [0, 1]])
    """

    def __init__(self, at: Mapping[str, Array]) -> None:
        self.at, self.jets, self._offset, start = dict(at), dict[str, Array](), dict[str, int](), 0
        for name, numbers in at.items():
            jets = np.empty(numbers.size, dtype=object)
            jets[:] = [Jet(value, {start + k: 1}) for k, value in enumerate(numbers.reshape(-1))]
            self.jets[name], self._offset[name] = jets.reshape(numbers.shape), start
            start += numbers.size

    def _indices(self, name: str) -> range:
        return range(self._offset[name], self._offset[name] + self.at[name].size)

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


def values(x: Array) -> Array:
    """Return the values of an array of jets, an array of numbers unchanged."""
    return np.frompyfunc(lambda y: _as_jet(y).value, 1, 1)(x)
