"""Functions applied entry by entry, and constants of a tensor's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.tracing.decompositions.registry import DECOMPOSITIONS, aten, decomposes

DECOMPOSITIONS |= dict.fromkeys((aten.rsub.Scalar, aten.rsub.Tensor), lambda x, minuend, alpha=1: torch.add(x * -alpha, minuend))
DECOMPOSITIONS |= dict.fromkeys((aten.lerp.Scalar, aten.lerp.Tensor), lambda start, end, weight: start + (end - start) * weight)
DECOMPOSITIONS |= {
    aten.addcdiv.default: lambda c, a, b, value=1: c + (a / b if value == 1 else a / b * value),
    aten.hypot.default: lambda a, b: torch.sqrt(a * a + b * b),
    aten.ldexp.Tensor: lambda x, exponent: x * torch.pow(2.0, exponent),
    aten.polygamma_.default: lambda x, order: x.copy_(torch.polygamma(order, x)),  # whose arguments have another order
}


@decomposes(aten.glu.default)
def _gated(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate)


@decomposes(aten.prelu.default)
def _leaky_by_channel(x: Tensor, slope: Tensor) -> Tensor:
    if slope.numel() > 1 and x.ndim > 1:
        slope = slope.reshape(1, -1, *(1,) * (x.ndim - 2))
    return torch.where(x > 0, x, slope * x)


@decomposes(aten.clamp.Tensor, aten.clip.Tensor)
def _clamp(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.clamp_min(x, low)
    return x if high is None else torch.clamp_max(x, high)


for _operation, _function in ((aten.softmax.int, torch.softmax), (aten.log_softmax.int, torch.log_softmax)):

    @decomposes(_operation)
    def _in_another_type(x: Tensor, dim: int, dtype: Any = None, function: Any = _function) -> Any:
        return NotImplemented if dtype in (None, x.dtype) else function(x.to(dtype), dim)


def _constant(x: Tensor, size: Sequence[int], fill: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.full(size, fill, dtype=dtype or x.dtype, device=device or x.device)


for _fill, _name in ((0, "zeros"), (1, "ones")):

    @decomposes(getattr(aten, f"{_name}_like").default)
    def _alike(x: Tensor, *, dtype: Any = None, device: Any = None, fill: float = _fill, **_: Any) -> Tensor:
        return _constant(x, x.shape, fill, dtype, device)

    @decomposes(getattr(aten, f"new_{_name}").default)
    def _new(x: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, fill: float = _fill, **_: Any) -> Tensor:
        return _constant(x, size, fill, dtype, device)


@decomposes(aten.fill_diagonal_.default)
def _fill_diagonal(x: Tensor, number: Any, wrap: bool = False) -> Tensor:
    """Fill the diagonal in place. In a tall matrix the diagonal continues after an empty row if ``wrap``."""
    step = sum(math.prod(x.shape[k + 1 :]) for k in range(x.ndim))
    at = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    hit = at % step == 0
    return x.masked_fill_(hit if wrap and x.ndim == 2 else hit & (at < min(x.shape) * step), number)


@decomposes(aten.dropout.default)
def _dropped(x: Tensor, p: float, train: bool) -> Any:
    """The kept entries, drawn as torch draws them on a processor from a seed of the module's own, are constants."""
    if not (train and 0 < p < 1):
        return NotImplemented
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
