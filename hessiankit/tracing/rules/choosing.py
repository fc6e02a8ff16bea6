"""Operations that choose among entries: masks, extremes, sorting, padding, scattering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.directions import joint_shape
from hessiankit.primitives.indexing import Take, Where
from hessiankit.primitives.linear import MaskedFill, Reshape
from hessiankit.primitives.pooling import Extreme
from hessiankit.primitives.scattering import AddAt, TakeAmong
from hessiankit.tracing.rules.registry import RULES, Match, Rule, are_real, aten, axes_of, positions, rule


@rule(aten.masked_fill.Scalar)
def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Match:
    if joint_shape(x.shape, mask.shape) == x.shape:
        return MaskedFill(mask, value), (x,)
    return Where(mask), (x.new_full((), value), x)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
def _where(condition: Tensor, x: Any, y: Any) -> Match:
    if not isinstance(y, Tensor):
        return _masked_fill(x, ~condition, y)
    if not isinstance(x, Tensor):
        return _masked_fill(y, condition, x)
    return (Where(condition), (x, y)) if are_real(x, y) and condition.dtype == torch.bool else None


def _everywhere(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)


def _along(operation: Any) -> Rule:
    """The rule of an operation that returns entries of each vector along an axis, and their indices."""
    names = [argument.name for argument in operation._schema.arguments]

    def match(x: Tensor, *rest: Any, output_index: int, **options: Any) -> Match:
        at = operation(x, *rest, **options)[1]
        if not x.ndim:
            return Reshape(()), (x,)
        dim = {**dict(zip(names[1:], rest, strict=False)), **options}.get("dim", -1)
        indices = at if at.ndim == x.ndim else at.unsqueeze(dim)
        axes = (dim % x.ndim,) if indices.shape[dim] == 1 else ()
        return Take(positions(x).gather(dim, indices).reshape(at.shape), axes), (x,)

    return match


def _extreme(kind: str) -> Rule:
    def match(x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Match:
        return Extreme(kind, axes_of(x, dim), keepdim), (x,)

    return match


@rule(aten.aminmax.default)
def _both_extremes(x: Tensor, *, dim: int | None = None, keepdim: bool = False, output_index: int) -> Match:
    return _extreme(("amin", "amax")[output_index])(x, dim, keepdim)


def _pooled_by_maximum(operation: Callable[..., tuple[Tensor, Tensor]], axes: int) -> Rule:
    """The rule of a maximum over windows: each is an entry, whose position within its channel torch tells."""

    def match(x: Tensor, *rest: Any, result: Tensor) -> Match:
        indices = operation(x, *rest)[1].flatten(-axes)
        pooled_axes = tuple(range(x.ndim - axes, x.ndim))
        return Take(positions(x).flatten(-axes).gather(-1, indices).reshape(result.shape), pooled_axes), (x,)

    return match


def _among(operation: Any, *indices: int) -> Rule:
    """The rule of an operation that assembles entries of some arguments: applied to positions, it gives each entry's source."""

    def match(*args: Any, **options: Any) -> Match:
        tensors = [args[k] for k in indices]
        if not are_real(*tensors):
            return None
        arguments, start = list(args), 0
        for k, x in zip(indices, tensors, strict=True):
            arguments[k] = start + positions(x)
            start += x.numel()
        return TakeAmong(operation(*arguments, **options)), tuple(tensors)

    return match


def _filling(operation: Any, index: int) -> Rule:
    """The rule of an operation that puts one number, the argument at ``index``, among the entries of its first."""

    def match(x: Tensor, *rest: Any) -> Match:
        arguments = [x, *rest]
        fill = x.new_full((), arguments[index]) if not isinstance(arguments[index], Tensor) else arguments[index]
        arguments[0], arguments[index] = positions(x), x.numel()
        return TakeAmong(operation(*arguments)), (x, fill)

    return match


def _with_zeros(operation: Any) -> Rule:
    """The rule of an operation that puts zeros among the entries of its first argument, such as ``diag_embed``."""

    def match(x: Tensor, *rest: Any, **options: Any) -> Match:
        return TakeAmong(operation(1.0 + positions(x).double(), *rest, **options).long()), (x.new_zeros(()), x)

    return match


@rule(aten.constant_pad_nd.default)
def _constant_pad(x: Tensor, pad: Sequence[int], value: float = 0.0) -> Match:
    return _filling(aten.constant_pad_nd.default, 2)(x, pad, value)


@rule(aten.pad.default)
def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Match:
    if mode == "constant":
        return _constant_pad(x, pad, value or 0.0)
    return Take(aten.pad.default(positions(x).double(), pad, mode).long()), (x,)


@rule(aten.index_put.default)
def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Match:
    if not accumulate:
        return _among(aten.index_put.default, 0, 2)(x, indices, values)
    at = aten.index.Tensor(positions(x), indices)
    return (AddAt(at), (x, values)) if values.shape == at.shape and are_real(x, values) else None


@rule(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Match:
    if not x.ndim or not are_real(x, source):
        return None
    return AddAt(positions(x).index_select(dim, index), alpha), (x, source)


@rule(aten.scatter_add.default)
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Match:
    if not x.ndim or source.shape != index.shape or not are_real(x, source):
        return None
    return AddAt(positions(x).gather(dim, index)), (x, source)


@rule(aten.col2im.default)
def _fold(
    x: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    *,
    result: Tensor,
) -> Match:
    if any(padding):
        return None
    at = aten.im2col.default(positions(result).double(), kernel, dilation, padding, stride).long()
    return AddAt(at), (torch.zeros_like(result), x)


@rule(aten.scatter_reduce.two)
def _scatter_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Match:
    return _scatter_add(x, dim, index, source) if reduce == "sum" and include_self else None


_GATHERS = (
    aten.cummax.default, aten.cummin.default, aten.kthvalue.default, aten.max.dim, aten.median.dim, aten.min.dim,
    aten.sort.default, aten.sort.stable, aten.topk.default,
)  # fmt: skip
RULES |= {operation: _along(operation) for operation in _GATHERS}
RULES |= {
    aten.masked_fill.Tensor: lambda x, mask, value: _where(mask, value, x),
    aten.msort.default: lambda x: _along(aten.sort.default)(x, 0, output_index=0),
    aten.tril.default: lambda x, diagonal=0: (MaskedFill(_everywhere(x).triu(diagonal + 1), 0.0), (x,)),
    aten.triu.default: lambda x, diagonal=0: (MaskedFill(_everywhere(x).tril(diagonal - 1), 0.0), (x,)),
    aten.amax.default: _extreme("amax"),
    aten.amin.default: _extreme("amin"),
    aten.max.default: _extreme("amax"),
    aten.median.default: _extreme("median"),
    aten.min.default: _extreme("amin"),
    aten.max_pool1d.default: _pooled_by_maximum(aten.max_pool1d_with_indices.default, 1),
    aten.max_pool2d.default: _pooled_by_maximum(aten.max_pool2d_with_indices.default, 2),
    aten.max_pool3d.default: _pooled_by_maximum(aten.max_pool3d_with_indices.default, 3),
    aten.adaptive_max_pool2d.default: _pooled_by_maximum(aten.adaptive_max_pool2d.default, 2),
    aten.adaptive_max_pool3d.default: _pooled_by_maximum(aten.adaptive_max_pool3d.default, 3),
    aten.diag_embed.default: _with_zeros(aten.diag_embed.default),
    aten.diag.default: _with_zeros(aten.diag.default),
    aten.diagonal_scatter.default: _among(aten.diagonal_scatter.default, 0, 1),
    aten.im2col.default: _with_zeros(aten.im2col.default),
    aten.index_copy.default: _among(aten.index_copy.default, 0, 3),
    aten.index_fill.int_Scalar: _filling(aten.index_fill.int_Scalar, 3),
    aten.index_fill.int_Tensor: _filling(aten.index_fill.int_Scalar, 3),
    aten.masked_scatter.default: _among(aten.masked_scatter.default, 0, 2),
    aten.scatter.src: _among(aten.scatter.src, 0, 3),
    aten.scatter.value: _filling(aten.scatter.value, 3),
    aten.select_scatter.default: _among(aten.select_scatter.default, 0, 1),
    aten.slice_scatter.default: _among(aten.slice_scatter.default, 0, 1),
}
