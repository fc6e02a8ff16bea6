"""Functions of one number with their first two derivatives: smooth ones, and ones with kinks or jumps.

The smooth ones (trigonometric, hyperbolic, logarithms, error functions) are written so that no digits are lost where torch's own
value loses none; at a kink derivatives are those of the side that torch takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

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
    "special_entr": lambda x: (torch.special.entr(x), -1 - torch.log(x), -1 / x),
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
    special_entr -x log x          -1 - log x                -1/x
    mish         x t             t + x u                   u (2 + x (1 - s - 2 t s)),    t = tanh log(1 + e^x), u = (1 - t^2) s
"""


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, rate: float = 1.0) -> Derivatives:
    bent = x <= 0
    below = scale * alpha * rate * torch.exp(rate * torch.where(bent, x, 0))
    value = scale * torch.where(bent, alpha * torch.expm1(rate * torch.where(bent, x, 0)), x)
    return value, torch.where(bent, below, scale), torch.where(x < 0, rate * below, 0)


def _hardswish(x: Tensor) -> Derivatives:
    bent = (x > -3) & (x < 3)
    first = torch.where(bent, x / 3 + 0.5, _indicator(x >= 3, x))
    return F.hardswish(x), first, _indicator(bent, x) / 3


def _logit_within(x: Tensor, eps: float) -> Derivatives:
    inside = (x >= eps) & (x <= 1 - eps)
    r = torch.where(inside, 1 / (x * (1 - x)), 0)
    return torch.logit(x, eps), r, (2 * x - 1) * r * r


def _indicator(where: Tensor, x: Tensor) -> Tensor:
    return where.to(x.dtype)


KINKED: dict[str, Callable[..., Derivatives]] = {
    "elu": _elu,
    "hardsigmoid": lambda x: ((x + 3).clamp(0, 6) / 6, _indicator((x > -3) & (x < 3), x) / 6, None),
    "hardswish": _hardswish,
    "hardshrink": lambda x, width=0.5: (F.hardshrink(x, width), _indicator((x < -width) | (x > width), x), None),
    "softshrink": lambda x, width=0.5: (F.softshrink(x, width), _indicator((x < -width) | (x > width), x), None),
    "threshold": lambda x, level, fill: (F.threshold(x, level, fill), _indicator(x > level, x), None),
    "logit_within": _logit_within,
    "frac": lambda x: (torch.frac(x), torch.ones_like(x), None),
    "remainder": lambda x, divisor: (torch.remainder(x, divisor), torch.ones_like(x), None),
    "fmod": lambda x, divisor: (torch.fmod(x, divisor), torch.ones_like(x), None),
    "finite": lambda x, nan=0.0, above=None, below=None: (
        torch.nan_to_num(x, nan, above, below),
        _indicator(torch.isfinite(x), x),
        None,
    ),
}
"""
    elu           b x for x > 0, else a b (e^(cx) - 1):  b or a b c e^(cx),  0 or a b c^2 e^(cx);  at 0 as torch
                  (constants a, b, c: selu has b for a scale, celu c = 1/a)
    hardsigmoid   0, (x + 3)/6, 1:     slope 1/6 within -3 < x < 3
    hardswish     0, x (x + 3)/6, x:   slope x/3 + 1/2 and curvature 1/3 within -3 < x < 3
    hardshrink    x where |x| > w, else 0:               slope 1 where |x| > w
    softshrink    x - w, 0, x + w:                       slope 1 where |x| > w
    threshold     x where x > l, else a constant:        slope 1 where x > l
    logit_within  logit of x brought within [e, 1 - e]:  slope 0 where x lies outside
    frac          x - trunc x;  remainder, fmod  x - m floor(x/m), x - m trunc(x/m):  slope 1, also at the jumps
    finite        x with NaN and infinities replaced:    slope 1 where x is finite
"""
