"""Functions of one number with kinks or jumps: derivatives off the kinks, and at a kink the side that torch takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from derivations.scalar_functions import Derivatives


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, rate: float = 1.0) -> Derivatives:
    bent = x <= 0
    below = scale * alpha * rate * torch.exp(rate * torch.where(bent, x, 0))
    value = scale * torch.where(bent, alpha * torch.expm1(rate * torch.where(bent, x, 0)), x)
    return value, torch.where(bent, below, scale), torch.where(bent, rate * below, 0)


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
    elu           b x for x > 0, else a b (e^(cx) - 1):  b or a b c e^(cx),  0 or a b c^2 e^(cx);  at 0 the latter
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
