"""Products, sums and factors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hessiankit.primitives.elementwise import Divide
from hessiankit.primitives.linear import Add, Linear, MatMul, Multiple, Multiply, Shift
from hessiankit.tracing.rules.registry import RULES, Match, aten, rule


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(a: Tensor, b: Tensor) -> Match:
    return (MatMul(), (a, b)) if min(a.ndim, b.ndim) >= 2 else None


@rule(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Match:
    return (Linear(), (x, weight) if bias is None else (x, weight, bias)) if weight.ndim == 2 else None


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(a: Any, b: Any, alpha: float = 1.0) -> Match:
    if not isinstance(b, Tensor):
        return Shift(alpha * b), (a,)
    return (Add(alpha), (a, b)) if isinstance(a, Tensor) else None


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(a: Any, b: Any, alpha: float = 1.0) -> Match:
    return _add(a, b, -alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(a: Any, b: Any) -> Match:
    if not isinstance(b, Tensor):
        return Multiple(b), (a,)
    return (Multiply(), (a, b)) if isinstance(a, Tensor) else None


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(a: Any, b: Any) -> Match:
    if not isinstance(b, Tensor):
        return Multiple(1 / b), (a,)
    return (Divide(), (a, b)) if isinstance(a, Tensor) else None


RULES[aten.neg.default] = lambda a: (Multiple(-1.0), (a,))
