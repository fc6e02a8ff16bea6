"""Variances, norms, distances, sums of exponentials, products of entries, sums and means of bags of embeddings."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hessiankit.tracing.decompositions.registry import DECOMPOSITIONS, aten, decomposes
from hessiankit.tracing.rules.registry import axes_of

LONGEST_PRODUCT = 64
"""More factors than this are left to automatic differentiation, as each would be an operation."""


def _as_it_is(x: Tensor, dtype: Any) -> bool:
    """Tell whether a sum or mean in a type is not a cast followed by the sum: integers keep their given type."""
    return dtype in (None, x.dtype) or not (x.is_floating_point() and dtype.is_floating_point)


@decomposes(aten.var.correction)
def _variance(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    axes = axes_of(x, dim)
    count = math.prod(x.shape[axis] for axis in axes)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        return NotImplemented
    deviation = x - x.mean(axes, keepdim=True)
    mean = (deviation * deviation).mean(axes, keepdim=keepdim)
    return mean if divisor == count else mean * (count / divisor)


@decomposes(aten.std.correction)
def _deviation(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Any:
    variance = _variance(x, dim, **options)
    return variance if variance is NotImplemented else torch.sqrt(variance)


for _operation, _moment in ((aten.var.dim, _variance), (aten.std.dim, _deviation)):

    @decomposes(_operation)
    def _along(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False, moment: Any = _moment) -> Any:
        return moment(x, dim, correction=int(unbiased), keepdim=keepdim)


for _operation, _moment in ((aten.var_mean.correction, _variance), (aten.std_mean.correction, _deviation)):

    @decomposes(_operation)
    def _and_mean(
        x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False, moment: Any = _moment
    ) -> Any:
        moments = moment(x, dim, correction=correction, keepdim=keepdim)
        return moments if moments is NotImplemented else (moments, x.mean(axes_of(x, dim), keepdim=keepdim))


@decomposes(aten.linalg_vector_norm.default)
def _norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype not in (None, x.dtype) or ord == 0:
        return NotImplemented
    axes = axes_of(x, dim)
    if ord == 2:
        return torch.sqrt((x * x).sum(axes, keepdim=keepdim))
    if math.isinf(ord):
        return x.abs().amax(axes, keepdim=keepdim) if ord > 0 else x.abs().amin(axes, keepdim=keepdim)
    total = x.abs().pow(ord).sum(axes, keepdim=keepdim) if ord != 1 else x.abs().sum(axes, keepdim=keepdim)
    return total if ord == 1 else total.pow(1 / ord)


@decomposes(aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _norm_by_its_old_name(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim)


@decomposes(aten.nansum.default)
def _sum_of_numbers(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return x.masked_fill(x.isnan(), 0).sum(axes_of(x, dim), keepdim, dtype=dtype)


DECOMPOSITIONS |= {
    aten.dist.default: lambda x, y, p=2: torch.linalg.vector_norm(x - y, p),
    aten.prod.default: lambda x, dtype=None: _product_along(x.reshape(-1), 0, dtype=dtype),
}


@decomposes(aten.cdist.default)
def _distances(x: Tensor, y: Tensor, p: float = 2, compute_mode: int | None = None) -> Tensor:
    """The distance of a row from itself is 0 whatever the row, and has no part in the derivatives."""
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    if x is not y:
        return torch.linalg.vector_norm(difference, p, -1)
    diagonal = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    return torch.linalg.vector_norm(difference.masked_fill(diagonal.unsqueeze(-1), 1), p, -1).masked_fill(diagonal, 0)


@decomposes(aten.cosine_similarity.default)
def _cosine(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """torch's own parts raise short vectors to ``eps`` in place, with gradients switched off."""
    x, y = torch.broadcast_tensors(x, y)
    x, y = (z / torch.linalg.vector_norm(z, 2, dim, keepdim=True).clamp_min(eps) for z in (x, y))
    return (x * y).sum(dim)


def _products(x: Tensor, dim: int, dtype: Any) -> list[Tensor]:
    """The products of the first entries along an axis, one by one, so that zeros need no division; [] where they are too many."""
    if dtype not in (None, x.dtype) or not x.ndim or not 0 < x.shape[dim] <= LONGEST_PRODUCT:
        return []
    return list(accumulate(x.unbind(dim), operator.mul))


@decomposes(aten.prod.dim_int)
def _product_along(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    products = _products(x, dim, dtype)
    if not products:
        return NotImplemented
    return products[-1].unsqueeze(dim) if keepdim else products[-1]


@decomposes(aten.cumprod.default)
def _cumulative_product(x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    products = _products(x, dim, dtype)
    return torch.stack(products, dim) if products else NotImplemented


for _operation, _total in (
    (aten.mean.dim, torch.mean),
    (aten.sum.dim_IntList, torch.sum),
    (aten.mean.default, torch.mean),
    (aten.sum.default, torch.sum),
    (aten.cumsum.default, torch.cumsum),
):

    @decomposes(_operation)
    def _converted(x: Tensor, *rest: Any, dtype: Any = None, total: Any = _total) -> Any:
        return NotImplemented if _as_it_is(x, dtype) else total(x.to(dtype), *rest)


@decomposes(aten.logsumexp.default)
def _log_sum_exp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    top = x.detach().amax(dim, keepdim=True)  # a shift that the result does not depend on
    out = torch.log(torch.exp(x - top).sum(dim, keepdim=True)) + top
    return out if keepdim else out.squeeze(dim)


@decomposes(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def _bags(
    table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums (mode 0) or means (mode 1) of the rows of a table from each offset to the next, those of the padding left out."""
    if scale_grad_by_freq or mode not in (0, 1):
        return NotImplemented
    starts = offsets[:-1] if include_last_offset else offsets
    bag = torch.bucketize(torch.arange(len(indices), device=indices.device), starts, right=True) - 1
    if padding_idx is not None:
        mask = indices != padding_idx % len(table)
        indices, bag, weights = indices[mask], bag[mask], None if weights is None else weights[mask]
    rows = torch.embedding(table, indices)
    rows = rows if weights is None else rows * weights.unsqueeze(1)
    total = rows.new_zeros(len(starts), table.shape[1]).index_add(0, bag, rows)
    count = torch.bincount(bag, minlength=len(starts))
    return total if mode == 0 else total / count.clamp(min=1).unsqueeze(1), bag, count, count
