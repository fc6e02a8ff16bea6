"""Activations: value, first and second derivative of each, written once for tensors and for exact numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from derivations.arrays import Array, Scalar, exp, full, inverse_sqrt, is_exact, scale, symbolic

Derivatives = tuple[Array, Array, "Array | None"]
"""The value, the first and the second derivative of an activation, entry by entry; None for a second that is zero."""


def _identity(x: Array, slope: Scalar) -> Derivatives:
    return x, full(tuple(x.shape), 1, x), None


def _relu(x: Array, slope: Scalar) -> Derivatives:
    on = _positive(x)
    return x * on, on, None


def _leaky_relu(x: Array, slope: Scalar) -> Derivatives:
    on = _positive(x)
    first = on + scale(slope, 1 - on)
    return x * first, first, None


def _tanh(x: Array, slope: Scalar) -> Derivatives:
    t, first = _tanh_of(x), _steepness(x)
    return t, first, scale(-2, t * first)


def _silu(x: Array, slope: Scalar) -> Derivatives:
    s, rest = (torch.sigmoid(x), torch.sigmoid(-x)) if isinstance(x, Tensor) else (s := 1 / (1 + exp(-x)), 1 - s)
    return x * s, s + x * s * rest, s * rest * (2 + x * (rest - s))


def _gelu(x: Array, slope: Scalar) -> Derivatives:
    density = scale(_sqrt_2_over_pi(x) / 2, exp(scale(Fraction(-1, 2), x * x)))
    cumulative = _normal_cdf(x)
    return x * cumulative, cumulative + x * density, density * (2 - x * x)


def _gelu_tanh(x: Array, slope: Scalar) -> Derivatives:
    k, cubic = _sqrt_2_over_pi(x), Fraction(44715, 1_000_000)
    u = scale(k, x + scale(cubic, x * x * x))
    t = _tanh_of(u)
    du, d2u = scale(k, 1 + scale(3 * cubic, x * x)), scale(k, scale(6 * cubic, x))  # of u, the argument of tanh
    half = torch.sigmoid(2 * u) if isinstance(u, Tensor) else scale(Fraction(1, 2), 1 + t)
    steep = _steepness(u)
    second = steep * (du + scale(Fraction(1, 2), x * (d2u - scale(2, t * du * du))))
    return x * half, half + scale(Fraction(1, 2), x * steep * du), second


Kind = str | Callable[[Array, Scalar], Derivatives]
"""An activation by its name in ``KINDS``, or as a function."""
KINDS: dict[str, Callable[[Array, Scalar], Derivatives]] = {
    f.__name__[1:]: f for f in (_identity, _relu, _leaky_relu, _gelu, _gelu_tanh, _silu, _tanh)
}
SMOOTH = ("gelu", "gelu_tanh", "silu", "tanh")


def derivatives(kind: Kind, X: Array, negative_slope: Scalar = Fraction(1, 100)) -> Derivatives:
    r"""Return sigma(X), sigma'(X) and sigma''(X), entry by entry; the last is None where it vanishes identically.

        relu        x 1{x>0},           1{x>0},                    0
        leaky_relu  x (1{x>0} + a 1{x<=0}),  the bracket,          0
        tanh        t,                  1 - t^2,                   -2 t (1 - t^2)
        silu        x s,                s + x s (1 - s),           s (1 - s)(2 + x (1 - 2 s)),       s = 1/(1 + e^-x)
        gelu        x Phi,              Phi + x phi,               phi (2 - x^2),                    the normal law's Phi, phi
        gelu_tanh   x (1 + t)/2,        (1 + t)/2 + x t'/2,        t' + x t''/2,                     t = tanh(k (x + c x^3))

    At a kink the derivative is the one from the left, as in torch.

    Args:
        kind: one of ``KINDS``, or a function of X and the slope that returns the three.
        X: array of any shape. Exact numbers stay exact: the smooth kinds give SymPy expressions.
        negative_slope: a, for leaky_relu only.

    Raises:
        ValueError: if there is no such kind.

    >>> [None if v is None else v.tolist() for v in derivatives("relu", torch.tensor([-2.0, 3.0]))]
    [[-0.0, 3.0], [0.0, 1.0], None]
    """
    if callable(kind):
        return kind(X, negative_slope)
    if kind not in KINDS:
        raise ValueError(f"activation: there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    return KINDS[kind](X, negative_slope)


def _positive(x: Array) -> Array:
    """Return 1 where x > 0 and 0 elsewhere; a case distinction where the sign of a symbol is not known."""
    if isinstance(x, Tensor):
        return (x > 0).to(x.dtype)
    return np.frompyfunc(_positive_exact, 1, 1)(x)


def _positive_exact(v: Any) -> Any:
    import sympy

    holds = v > 0
    known = holds in (True, False) or holds in (sympy.true, sympy.false)
    return int(bool(holds)) if known else sympy.Piecewise((1, holds), (0, True))


def _sqrt_2_over_pi(x: Array) -> Scalar:
    """Return sqrt(2 / pi) in the arithmetic of x."""
    if not is_exact(x):
        return math.sqrt(2 / math.pi)
    import sympy

    return sympy.sqrt(2 / sympy.pi)


def _tanh_of(x: Array) -> Array:
    return symbolic("tanh", x) if is_exact(x) else torch.tanh(x)


def _steepness(x: Array) -> Array:
    """Return tanh' = 1 - tanh^2; for floats as 1 / cosh^2, which keeps its digits where tanh is saturated."""
    if is_exact(x):
        t = _tanh_of(x)
        return 1 - t * t
    return torch.cosh(x).reciprocal().square()


def _normal_cdf(x: Array) -> Array:
    if is_exact(x):
        return (1 + symbolic("erf", x * inverse_sqrt(2, x))) / 2
    return torch.erfc(x * -math.sqrt(0.5)) / 2  # torch.special.ndtr has an absolute error, and no digits in the tail
