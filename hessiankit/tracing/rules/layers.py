"""The layers of transformers: norms, softmax, attention, embedding, means, cross entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.linear import Reshape
from hessiankit.primitives.loss import CrossEntropy
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.pooling import Mean, SumOver
from hessiankit.primitives.softmax import LogSoftmax, Softmax
from hessiankit.tracing.one_dtype import widest
from hessiankit.tracing.rules.registry import RULES, Match, aten, axes_of, rule


@rule(aten.layer_norm.default)
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Match:
    return LayerNorm(len(shape), eps), (x, weight, bias)


@rule(aten.rms_norm.default)
def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Match:
    default_eps = torch.finfo(widest([x.dtype])).eps  # of this type; the derivatives may be taken in a wider one
    return RMSNorm(len(shape), default_eps if eps is None else eps), (x, weight)


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(x: Tensor, dim: int, dtype: Any = None, *, result: Tensor) -> Match:
    return _normalized(Softmax(dim), x, dtype, result)


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(x: Tensor, dim: int, dtype: Any = None, *, result: Tensor) -> Match:
    return _normalized(LogSoftmax(dim), x, dtype, result)


def _normalized(primitive: Softmax | LogSoftmax, x: Tensor, dtype: Any, result: Tensor) -> Match:
    if dtype not in (None, False, x.dtype):
        return None
    return (primitive, (x,)) if x.ndim else (Reshape(()), (result,))  # of one entry, a constant


@rule(aten.scaled_dot_product_attention.default)
def _scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Match:
    if dropout_p or q.is_nested or (enable_gqa and k.shape[:-2] != v.shape[:-2]):
        return None
    additive = mask is not None and mask.dtype != torch.bool
    attention = ScaledDotProductAttention(None if additive else mask, is_causal, scale, enable_gqa)
    return attention, (q, k, v, mask) if additive else (q, k, v)


@rule(aten.embedding.default)
def _embedding(
    table: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Match:
    return None if scale_grad_by_freq else (Embedding(indices, None if padding_idx < 0 else padding_idx), (table,))


@rule(aten.mean.dim)
def _mean(x: Tensor, dims: Sequence[int] | int, keepdim: bool = False, dtype: Any = None) -> Match:
    return (Mean(axes_of(x, dims), keepdim), (x,)) if dtype in (None, x.dtype) else None


@rule(aten.sum.dim_IntList)
def _sum(x: Tensor, dims: Sequence[int] | int | None, keepdim: bool = False, dtype: Any = None) -> Match:
    return (SumOver(axes_of(x, dims), keepdim), (x,)) if dtype in (None, x.dtype) else None


RULES |= {
    aten.mean.default: lambda x, dtype=None: _mean(x, tuple(range(x.ndim)), False, dtype),
    aten.sum.default: lambda x, dtype=None: _sum(x, None, False, dtype),
}


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Match:
    if x.ndim != 2 or weight is not None or reduction == 0 or target.is_floating_point():
        return None
    count = 1 if reduction == 2 else int((target != ignore_index).sum()) or math.nan  # torch's mean over no labels is NaN
    return CrossEntropy(ignore_index, label_smoothing, count), (x, target)
