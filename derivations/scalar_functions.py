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


def _mish(x: Tensor) -> Derivatives:
    soft, s = torch.nn.functional.softplus(x), torch.sigmoid(x)
    t, steep = torch.tanh(soft), torch.cosh(soft).reciprocal().square()  # of tanh, in softplus
    slope = steep * s
    return x * t, t + x * slope, slope * (2 + x * (1 - s - 2 * t * s))


SMOOTH: dict[str, Callable[..., Derivatives]] = {
    "log2": lambda x: (torch.log2(x), r := 1 / (math.log(2) * x), -r / x),
    "log10": lambda x: (torch.log10(x), r := 1 / (math.log(10) * x), -r / x),
    "logit": lambda x: (torch.logit(x), r := 1 / (x * (1 - x)), (2 * x - 1) * r * r),
    "tan": lambda x: (t := torch.tan(x), first := 1 + t * t, 2 * t * first),
    "asin": lambda x: (torch.asin(x), r := torch.rsqrt((1 - x) * (1 + x)), x * r**3),
    "acos": lambda x: (torch.acos(x), -(r := torch.rsqrt((1 - x) * (1 + x))), -x * r**3),
    "atan": lambda x: (torch.atan(x), r := 1 / (1 + x * x), -2 * x * r * r),
    "sinh": lambda x: (s := torch.sinh(x), torch.cosh(x), s),
    "cosh": lambda x: (c := torch.cosh(x), torch.sinh(x), c),
    "asinh": lambda x: (torch.asinh(x), r := torch.rsqrt(1 + x * x), -x * r**3),
    "acosh": lambda x: (torch.acosh(x), r := torch.rsqrt((x - 1) * (x + 1)), -x * r**3),
    "atanh": lambda x: (torch.atanh(x), r := 1 / ((1 - x) * (1 + x)), 2 * x * r * r),
    "erfc": lambda x: (torch.erfc(x), first := -2 / math.sqrt(math.pi) * torch.exp(-x * x), -2 * x * first),
    "erfinv": lambda x: (y := torch.erfinv(x), first := math.sqrt(math.pi) / 2 * torch.exp(y * y), 2 * y * first * first),
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
