"""Which chapter of ``derivations`` an operation of torch's tracer belongs to.

Each rule takes the arguments of one ``aten`` operation and returns the primitive and the tensors it acts on. A rule may
ask for the operation's ``result``, and where there are several outputs for the position of its ``piece``. Whatever has
no rule, or whose rule declines by returning None, falls back on automatic differentiation of that one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.elementwise import Divide, Elementwise
from derivations.embedding import Embedding
from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Concatenate, Select, Slice, Stack, Take, Where
from derivations.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiply, Permute, Reshape, Scale, Shift
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Mean, Sum
from derivations.primitive import Primitive
from derivations.softmax import LogSoftmax, Softmax

Match: TypeAlias = "tuple[Primitive, tuple[Tensor | None, ...]] | None"
Rule: TypeAlias = Callable[..., Match]

aten = torch.ops.aten
RULES: dict[Any, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register a rule for some operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operations, function))
        return function

    return register


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(a: Tensor, b: Tensor) -> Match:
    return (MatMul(), (a, b)) if min(a.ndim, b.ndim) >= 2 else None


@rule(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Match:
    if weight.ndim != 2:
        return None
    return Linear(), (x, weight) if bias is None else (x, weight, bias)


@rule(aten.add.Tensor)
def _add(a: Any, b: Any, alpha: float = 1.0) -> Match:
    if not isinstance(b, Tensor):
        return Shift(alpha * b), (a,)
    return (Add(alpha), (a, b)) if isinstance(a, Tensor) else None


@rule(aten.sub.Tensor)
def _sub(a: Any, b: Any, alpha: float = 1.0) -> Match:
    return _add(a, b, -alpha)


@rule(aten.mul.Tensor)
def _mul(a: Any, b: Any) -> Match:
    if not isinstance(b, Tensor):
        return Scale(b), (a,)
    return (Multiply(), (a, b)) if isinstance(a, Tensor) else None


@rule(aten.div.Tensor)
def _div(a: Any, b: Any) -> Match:
    if not isinstance(b, Tensor):
        return Scale(1 / b), (a,)
    return (Divide(), (a, b)) if isinstance(a, Tensor) else None


@rule(aten.neg.default)
def _neg(a: Tensor) -> Match:
    return Scale(-1.0), (a,)


@rule(aten.transpose.int)
def _transpose(x: Tensor, i: int, j: int) -> Match:
    order = list(range(x.ndim))
    order[i], order[j] = order[j], order[i]
    return Permute(tuple(order)), (x,)


@rule(aten.mT.default, aten.t.default)
def _mt(x: Tensor) -> Match:
    return _transpose(x, -2, -1) if x.ndim >= 2 else None


@rule(aten.permute.default)
def _permute(x: Tensor, order: Sequence[int]) -> Match:
    return Permute(tuple(i % x.ndim for i in order)), (x,)


@rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
)
def _reshape(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    return Reshape(tuple(result.shape)), (x,)


@rule(aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default)
def _same_kind(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    return (Reshape(tuple(x.shape)), (x,)) if (result.dtype, result.device) == (x.dtype, x.device) else None


@rule(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
def _dropout(x: Tensor, p: float, train: bool) -> Match:
    return None if train and p else (Reshape(tuple(x.shape)), (x,))


@rule(aten.expand.default)
def _expand(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    return Expand(tuple(result.shape)), (x,)


@rule(aten.layer_norm.default)
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Match:
    return LayerNorm(len(shape), eps), (x, weight, bias)


@rule(aten.rms_norm.default)
def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Match:
    return RMSNorm(len(shape), eps), (x, weight)


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(x: Tensor, dim: int, dtype: Any = None) -> Match:
    return (Softmax(dim), (x,)) if dtype in (None, False, x.dtype) else None


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


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Match:
    return (LogSoftmax(dim), (x,)) if dtype in (None, False, x.dtype) and x.ndim else None


@rule(aten.masked_fill.Scalar)
def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Match:
    if torch.broadcast_shapes(x.shape, mask.shape) == x.shape:
        return MaskedFill(mask, value), (x,)
    return Where(mask), (x.new_full((), value), x)


@rule(aten.masked_fill.Tensor)
def _masked_fill_by_tensor(x: Tensor, mask: Tensor, value: Tensor) -> Match:
    return _where(mask, value, x)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
def _where(condition: Tensor, x: Any, y: Any) -> Match:
    if not isinstance(y, Tensor):
        return _masked_fill(x, ~condition, y)
    if not isinstance(x, Tensor):
        return _masked_fill(y, condition, x)
    return (Where(condition), (x, y)) if x.dtype == y.dtype and condition.dtype == torch.bool else None


@rule(aten.tril.default)
def _tril(x: Tensor, diagonal: int = 0) -> Match:
    return MaskedFill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(diagonal + 1), 0.0), (x,)


@rule(aten.triu.default)
def _triu(x: Tensor, diagonal: int = 0) -> Match:
    return MaskedFill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal - 1), 0.0), (x,)


@rule(aten.select.int)
def _select(x: Tensor, dim: int, index: int) -> Match:
    return Select(dim, index), (x,)


@rule(aten.slice.Tensor)
def _slice(x: Tensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Match:
    return Slice(dim, start, stop, step), (x,)


@rule(aten.unbind.int)
def _unbind(x: Tensor, dim: int = 0, *, piece: int) -> Match:
    return Select(dim, piece), (x,)


@rule(aten.split.Tensor)
def _split(x: Tensor, size: int, dim: int = 0, *, piece: int) -> Match:
    return Slice(dim, piece * size, (piece + 1) * size), (x,)


@rule(aten.split_with_sizes.default, aten.split.sizes)
def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0, *, piece: int) -> Match:
    start = sum(sizes[:piece])
    return Slice(dim, start, start + sizes[piece]), (x,)


@rule(aten.broadcast_tensors.default)
def _broadcast(tensors: Sequence[Tensor], *, piece: int, result: Tensor) -> Match:
    return Expand(tuple(result.shape)), (tensors[piece],)


@rule(aten.atleast_1d.Sequence, aten.atleast_2d.Sequence, aten.atleast_3d.Sequence)
def _more_axes(tensors: Sequence[Tensor], *, piece: int, result: Tensor) -> Match:
    return Reshape(tuple(result.shape)), (tensors[piece],)


@rule(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Match:
    alike = len({(x.ndim, x.dtype) for x in tensors}) == 1  # torch lets empty vectors join anything
    return (Concatenate(dim), tuple(tensors)) if alike else None


@rule(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Match:
    return (Stack(dim), tuple(tensors)) if len({x.dtype for x in tensors}) == 1 else None


@rule(aten.embedding.default)
def _embedding(
    table: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Match:
    return None if scale_grad_by_freq else (Embedding(indices, None if padding_idx < 0 else padding_idx), (table,))


@rule(aten.mean.dim)
def _mean(x: Tensor, dims: Sequence[int] | int, keepdim: bool = False, dtype: Any = None) -> Match:
    return (Mean(_axes(x, dims), keepdim), (x,)) if dtype is None else None


@rule(aten.mean.default)
def _mean_all(x: Tensor, dtype: Any = None) -> Match:
    return _mean(x, tuple(range(x.ndim)), False, dtype)


@rule(aten.sum.dim_IntList)
def _sum(x: Tensor, dims: Sequence[int] | int | None, keepdim: bool = False, dtype: Any = None) -> Match:
    return (Sum(_axes(x, dims), keepdim), (x,)) if dtype is None else None


@rule(aten.sum.default)
def _sum_all(x: Tensor, dtype: Any = None) -> Match:
    return _sum(x, None, False, dtype)


def _axes(x: Tensor, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    listed = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return tuple(i % x.ndim for i in listed)


def _activation(kind: str) -> Rule:
    return lambda x, *_, **__: (Activation(kind), (x,))


def _elementwise(kind: str) -> Rule:
    return lambda x: (Elementwise(kind), (x,))


def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Match:
    return Elementwise("clamp", (-math.inf if low is None else low, math.inf if high is None else high)), (x,)


def _power_of(base: float, x: Tensor) -> Match:
    return (Elementwise("exponential", (base,)), (x,)) if base > 0 else None


def _taken(operation: Any) -> Rule:
    """The rule of an operation that chooses entries of its first argument: applied to their positions, it gives them away."""

    def taken(x: Tensor, *rest: Any, **options: Any) -> Match:
        positions = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        return Take(operation(positions, *rest, **options)), (x,)

    return taken


RULES |= {
    operation: _taken(operation)
    for operation in (
        aten.diagonal.default,
        aten.flip.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.repeat.default,
        aten.roll.default,
        aten.take.default,
        aten.unfold.default,
    )
}
RULES |= {
    aten.abs.default: _elementwise("abs"),
    aten.clamp.default: _clamp,
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.clamp_min.default: _clamp,
    aten.cos.default: _elementwise("cos"),
    aten.erf.default: _elementwise("erf"),
    aten.exp.default: _elementwise("exp"),
    aten.exp2.default: lambda x: _power_of(2.0, x),
    aten.expm1.default: _elementwise("expm1"),
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    aten.log.default: _elementwise("log"),
    aten.log1p.default: _elementwise("log1p"),
    aten.log_sigmoid.default: _elementwise("log_sigmoid"),
    aten.pow.Scalar: _power_of,
    aten.pow.Tensor_Scalar: lambda x, p: (Elementwise("power", (p,)), (x,)),
    aten.reciprocal.default: _elementwise("reciprocal"),
    aten.relu6.default: lambda x: _clamp(x, 0.0, 6.0),
    aten.rsqrt.default: _elementwise("rsqrt"),
    aten.sigmoid.default: _elementwise("sigmoid"),
    aten.sin.default: _elementwise("sin"),
    aten.softplus.default: lambda x, beta=1.0, threshold=20.0: (Elementwise("softplus", (beta, threshold)), (x,)),
    aten.sqrt.default: _elementwise("sqrt"),
}
RULES |= {
    aten.relu.default: _activation("relu"),
    aten.silu.default: _activation("silu"),
    aten.tanh.default: _activation("tanh"),
    aten.gelu.default: lambda x, approximate="none": (Activation("gelu" if approximate == "none" else "gelu_tanh"), (x,)),
    aten.leaky_relu.default: lambda x, slope=0.01: (Activation("leaky_relu", slope), (x,)),
}
