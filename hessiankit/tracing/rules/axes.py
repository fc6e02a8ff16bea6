"""Operations that are a constant matrix along each axis: average pooling, interpolation, cumulative sums.

The matrix is what the operation makes of an identity matrix, whose rows it takes for channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hessiankit.primitives.axis_maps import AxisMaps
from hessiankit.primitives.linear import Reshape
from hessiankit.tracing.one_dtype import widest
from hessiankit.tracing.rules.registry import RULES, Match, Rule, aten, rule


@rule(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, dtype: Any = None) -> Match:
    if dtype not in (None, x.dtype):
        return None
    if not x.ndim:
        return Reshape(()), (x,)
    n = x.shape[dim]
    return AxisMaps((dim,), (torch.ones(n, n, dtype=widest([x.dtype]), device=x.device).tril(),)), (x,)


def _maps(x: Tensor, operations: Sequence[Callable[[Tensor], Tensor]]) -> Match:
    """Maps along the last axes, each given by an operation on (1, channels, length)."""
    dims = tuple(range(-len(operations), 0))
    eyes = [torch.eye(x.shape[dim], dtype=widest([x.dtype]), device=x.device).unsqueeze(0) for dim in dims]
    return AxisMaps(dims, tuple(f(eye)[0].mT for f, eye in zip(operations, eyes, strict=True))), (x,)


def _each(value: int | Sequence[int], axes: int) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * (axes // len(sizes))


def _average_pool(axes: int) -> Rule:
    def match(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Match:
        if divisor_override is not None:
            return None
        kernels = _each(kernel, axes)
        strides = _each(stride, axes) if isinstance(stride, int) or len(stride) else kernels

        def along(k: int) -> Callable[[Tensor], Tensor]:
            window = (kernels[k], strides[k], _each(padding, axes)[k])
            return lambda eye: F.avg_pool1d(eye, *window, ceil_mode, count_include_pad)

        return _maps(x, [along(k) for k in range(axes)])

    return match


def _adaptive_average_pool(axes: int) -> Rule:
    def match(x: Tensor, size: Sequence[int]) -> Match:
        return _maps(x, [partial(F.adaptive_avg_pool1d, output_size=n) for n in _each(size, axes)])

    return match


def _interpolated(operation: Any, axes: int) -> Rule:
    def match(x: Tensor, size: Sequence[int] | None, *rest: Any, result: Tensor) -> Match:
        *options, factors = rest
        pair_sizes = [2] * (axes - 1)  # axes of length one would leave torch in doubt about the memory's order

        def along(k: int) -> Callable[[Tensor], Tensor]:
            out = None if size is None else [result.shape[2 + k], *pair_sizes]
            factor = None if factors is None else [factors[k], *(1.0 for _ in pair_sizes)]

            def map_rows(eye: Tensor) -> Tensor:
                image = eye.reshape(*eye.shape, *(1 for _ in pair_sizes)).expand(*eye.shape, *pair_sizes).contiguous()
                mapped = operation(image, out, *options, factor)
                return mapped.flatten(3)[..., 0] if pair_sizes else mapped

            return map_rows

        return _maps(x, [along(k) for k in range(axes)])

    return match


RULES |= {
    aten.avg_pool1d.default: _average_pool(1),
    aten.avg_pool2d.default: _average_pool(2),
    aten.avg_pool3d.default: _average_pool(3),
    aten.adaptive_avg_pool1d.default: _adaptive_average_pool(1),
    aten.adaptive_avg_pool2d.default: _adaptive_average_pool(2),
    aten.adaptive_avg_pool3d.default: _adaptive_average_pool(3),
}
for _axes, _names in (
    (1, ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d")),
    (2, ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d")),
    (2, ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")),
    (3, ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d")),
):
    RULES |= {getattr(aten, name).vec: _interpolated(getattr(aten, name).vec, _axes) for name in _names}
