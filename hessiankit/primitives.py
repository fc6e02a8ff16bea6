"""Which chapter of ``derivations`` an operation of torch's tracer belongs to.

Each rule takes the arguments of one ``aten`` operation and returns the primitive and the tensors it acts on. Whatever
has no rule, or whose rule declines by returning None, falls back on automatic differentiation of that one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiply, Permute, Reshape, Scale, Shift
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Mean, Sum
from derivations.primitive import Primitive
from derivations.softmax import Softmax

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
    return (Scale(1 / b), (a,)) if not isinstance(b, Tensor) else None


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
    aten.squeeze.default,
    aten.clone.default,
    aten.contiguous.default,
)
def _reshape(x: Tensor, *rest: Any, result: Tensor, **options: Any) -> Match:
    return Reshape(tuple(result.shape)), (x,)


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


@rule(aten.masked_fill.Scalar)
def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Match:
    return (MaskedFill(mask, value), (x,)) if torch.broadcast_shapes(x.shape, mask.shape) == x.shape else None


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


RULES |= {
    aten.relu.default: _activation("relu"),
    aten.silu.default: _activation("silu"),
    aten.tanh.default: _activation("tanh"),
    aten.gelu.default: lambda x, approximate="none": (Activation("gelu" if approximate == "none" else "gelu_tanh"), (x,)),
    aten.leaky_relu.default: lambda x, slope=0.01: (Activation("leaky_relu", slope), (x,)),
}
