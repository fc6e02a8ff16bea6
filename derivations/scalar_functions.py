"""Smooth functions of one number with their first two derivatives: trigonometric, hyperbolic, logarithms, error functions.

Each is written so that no digits are lost where torch's own value loses none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Derivatives = tuple[Tensor, Tensor, "Tensor | None"]
"""The value, the first and the second derivative, entry by entry; None for a second that is zero."""


def _log2(x: Tensor) -> Derivatives:
    r = 1 / (math.log(2) * x)
    return torch.log2(x), r, -r / x


def _log10(x: Tensor) -> Derivatives:
    r = 1 / (math.log(10) * x)
    return torch.log10(x), r, -r / x


def _logit(x: Tensor) -> Derivatives:
    r = 1 / (x * (1 - x))
    return torch.logit(x), r, (2 * x - 1) * r * r


def _tan(x: Tensor) -> Derivatives:
    t = torch.tan(x)
    first = 1 + t * t
    return t, first, 2 * t * first


def _asin(x: Tensor) -> Derivatives:
    first = torch.rsqrt((1 - x) * (1 + x))
    return torch.asin(x), first, x * first**3


def _acos(x: Tensor) -> Derivatives:
    _, first, second = _asin(x)
    return torch.acos(x), -first, None if second is None else -second


def _atan(x: Tensor) -> Derivatives:
    first = 1 / (1 + x * x)
    return torch.atan(x), first, -2 * x * first * first


def _sinh(x: Tensor) -> Derivatives:
    s = torch.sinh(x)
    return s, torch.cosh(x), s


def _cosh(x: Tensor) -> Derivatives:
    c = torch.cosh(x)
    return c, torch.sinh(x), c


def _asinh(x: Tensor) -> Derivatives:
    first = torch.rsqrt(1 + x * x)
    return torch.asinh(x), first, -x * first**3


def _acosh(x: Tensor) -> Derivatives:
    first = torch.rsqrt((x - 1) * (x + 1))
    return torch.acosh(x), first, -x * first**3


def _atanh(x: Tensor) -> Derivatives:
    first = 1 / ((1 - x) * (1 + x))
    return torch.atanh(x), first, 2 * x * first * first


def _erfc(x: Tensor) -> Derivatives:
    first = -2 / math.sqrt(math.pi) * torch.exp(-x * x)
    return torch.erfc(x), first, -2 * x * first


def _erfinv(x: Tensor) -> Derivatives:
    y = torch.erfinv(x)
    first = math.sqrt(math.pi) / 2 * torch.exp(y * y)
    return y, first, 2 * y * first * first


def _mish(x: Tensor) -> Derivatives:
    soft, s = torch.nn.functional.softplus(x), torch.sigmoid(x)
    t, steep = torch.tanh(soft), torch.cosh(soft).reciprocal().square()  # of tanh, in softplus
    slope = steep * s
    return x * t, t + x * slope, slope * (2 + x * (1 - s - 2 * t * s))


SMOOTH: dict[str, Callable[..., Derivatives]] = {
    "log2": _log2,
    "log10": _log10,
    "logit": _logit,
    "tan": _tan,
    "asin": _asin,
    "acos": _acos,
    "atan": _atan,
    "sinh": _sinh,
    "cosh": _cosh,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "erfc": _erfc,
    "erfinv": _erfinv,
    "mish": _mish,
}
"""
    log2, log10  log x / log b   1/(x log b)               -1/(x^2 log b)
    logit        log(x/(1-x))    r = 1/(x (1-x))           (2x - 1) r^2
    tan          t               1 + t^2                   2 t (1 + t^2)
    asin, acos   asin x          r = (1 - x^2)^(-1/2)      x r^3;                        acos x, -r, -x r^3
    atan         atan x          r = 1/(1 + x^2)           -2 x r^2
    sinh, cosh   sinh x          cosh x                    sinh x;                       cosh x, sinh x, cosh x
    asinh        asinh x         r = (1 + x^2)^(-1/2)      -x r^3
    acosh        acosh x         r = (x^2 - 1)^(-1/2)      -x r^3
    atanh        atanh x         r = 1/(1 - x^2)           2 x r^2
    erfc         1 - erf x       g = -2 e^(-x^2)/sqrt(pi)  -2 x g
    erfinv       y, erf y = x    g = sqrt(pi) e^(y^2)/2    2 y g^2
    mish         x t             t + x u                   u (2 + x (1 - s - 2 t s)),    t = tanh log(1 + e^x), u = (1 - t^2) s
"""
