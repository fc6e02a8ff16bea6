"""Operations that change shape, type or order and leave the entries as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.cast import Cast
from hessiankit.primitives.indexing import Concatenate, Select, Slice, Stack, Take
from hessiankit.primitives.linear import Expand, Permute, Reshape
from hessiankit.support.errors import TraceError
from hessiankit.tracing.rules.registry import RULES, Match, Rule, are_real, aten, axes_of, positions, rule


@rule(aten.transpose.int)
def _transpose(x: Tensor, i: int, j: int) -> Match:
    order = list(range(x.ndim))
    if x.ndim:
        order[i], order[j] = order[j], order[i]
    return Permute(tuple(order)), (x,)


@rule(aten.mT.default, aten.t.default)
def _mt(x: Tensor) -> Match:
    return _transpose(x, -2, -1) if x.ndim >= 2 else None


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int, aten.flatten.using_ints,
    aten.unsqueeze.default, aten.positive.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.lift_fresh_copy.default,
)  # fmt: skip
def _reshape(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    return Reshape(tuple(result.shape)), (x,)


@rule(aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default)
def _cast(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    if (result.dtype, result.device) == (x.dtype, x.device):
        return Reshape(tuple(x.shape)), (x,)
    if torch.finfo(result.dtype).eps >= 1:
        raise TraceError(
            f"trace: values that the parameters reach are cast to {result.dtype}, which has no digits beside an exponent, so "
            "that the cast has no derivative to speak of; leave the cast out, or detach() what enters it"
        )
    return Cast(result.dtype, None if result.device == x.device else result.device), (x,)


@rule(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
def _dropout(x: Tensor, p: float, train: bool) -> Match:
    return None if train and p else (Reshape(tuple(x.shape)), (x,))


RULES |= {
    aten.broadcast_tensors.default: lambda xs, *, output_index, result: (Expand(tuple(result.shape)), (xs[output_index],)),
    aten.expand.default: lambda x, *_, result, **__: (Expand(tuple(result.shape)), (x,)),
    aten.permute.default: lambda x, order: (Permute(axes_of(x, order)), (x,)),
    aten.select.int: lambda x, dim, index: (Select(dim, index), (x,)),
    aten.slice.Tensor: lambda x, dim=0, start=None, stop=None, step=1: (Slice(dim, start, stop, step), (x,)),
    aten.stack.default: lambda tensors, dim=0: (Stack(dim), tuple(tensors)) if are_real(*tensors) else None,
    aten.unbind.int: lambda x, dim=0, *, output_index: (Select(dim, output_index), (x,)),
}


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(x: Tensor, size: int, dim: int = 0, *, output_index: int) -> Match:
    return Slice(dim, output_index * size, (output_index + 1) * size), (x,)


@rule(aten.split_with_sizes.default, aten.split.sizes, aten.unsafe_split_with_sizes.default)
def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0, *, output_index: int) -> Match:
    start = sum(sizes[:output_index])
    return Slice(dim, start, start + sizes[output_index]), (x,)


@rule(aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence)
def _more_axes(tensors: Sequence[Tensor], *, output_index: int, result: Tensor) -> Match:
    return Reshape(tuple(result.shape)), (tensors[output_index],)


@rule(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Match:
    parts = [x for x in tensors if x.shape != (0,)]  # torch lets empty vectors join anything, such as a cache to be
    return (Concatenate(dim), tuple(parts)) if are_real(*parts) and len({x.ndim for x in parts}) == 1 else None


def _taken(operation: Any) -> Rule:
    """The rule of an operation that chooses entries of its first argument: applied to positions, it returns the chosen ones."""

    def taken(x: Tensor, *rest: Any, **options: Any) -> Match:
        return Take(operation(positions(x), *rest, **options)), (x,)

    return taken


_SELECTIONS = (
    aten.channel_shuffle.default, aten.diagonal.default, aten.flip.default, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.masked_select.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
    aten.repeat.default, aten.roll.default, aten.rot90.default, aten.take.default, aten.unfold.default,
)  # fmt: skip
RULES |= {operation: _taken(operation) for operation in _SELECTIONS}
