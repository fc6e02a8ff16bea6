"""Products and sums of products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hessiankit.tracing.decompositions.registry import DECOMPOSITIONS, aten, decomposes


def _sum(c: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    return (product if alpha == 1 else product * alpha) + (c if beta == 1 else c * beta)


DECOMPOSITIONS |= {
    aten.addmm.default: lambda c, a, b, beta=1, alpha=1: _sum(c, a @ b, beta, alpha),
    aten.baddbmm.default: lambda c, a, b, beta=1, alpha=1: _sum(c, a @ b, beta, alpha),
    aten.addbmm.default: lambda c, a, b, beta=1, alpha=1: _sum(c, (a @ b).sum(0), beta, alpha),
    aten.addmv.default: lambda c, a, b, beta=1, alpha=1: _sum(c.unsqueeze(-1), a @ b.unsqueeze(-1), beta, alpha).squeeze(-1),
    aten.addr.default: lambda c, a, b, beta=1, alpha=1: _sum(c, a.unsqueeze(1) * b.unsqueeze(0), beta, alpha),
    aten.addcmul.default: lambda c, a, b, value=1: c + (a * b if value == 1 else a * b * value),
    aten.linalg_cross.default: lambda x, y, dim=-1: x.roll(-1, dim) * y.roll(1, dim) - x.roll(1, dim) * y.roll(-1, dim),
    aten.trace.default: lambda x: x.diagonal().sum(),
}


@decomposes(aten.matmul.default, aten.mv.default, aten.dot.default)
def _vector(a: Tensor, b: Tensor) -> Any:
    """Products with a vector, as products with a matrix of one row or column."""
    if min(a.ndim, b.ndim) >= 2:
        return NotImplemented
    rows, columns = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(-1) if b.ndim == 1 else b)
    product = rows @ columns
    product = product.squeeze(-1) if b.ndim == 1 else product
    return product.squeeze(-1 if b.ndim == 1 else -2) if a.ndim == 1 else product


@decomposes(aten.linear.default)
def _linear_to_a_number(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.ndim != 1:
        return NotImplemented
    product = x @ weight
    return product if bias is None else product + bias


@decomposes(aten.einsum.default)
def _einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Any:
    """Rows times a weight as a product, which keeps the weight's site; other products by torch's own decomposition."""
    terms, _, out = equation.replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    letters = [term.replace("...", "") for term in (left, right, out)]
    if len(operands) == 2 and out and len(right) == 2 and letters[0] and left[-1] in right:
        at = right.index(left[-1])  # the weight's contracted axis
        free, (x, weight) = right[1 - at], operands
        fits = x.shape[-1] == weight.shape[at] and out == left[:-1] + free  # einsum repeats axes of length one
        if fits and all(len(set(term)) == len(term) for term in letters):
            return torch.matmul(x, weight) if at == 0 else torch._C._nn.linear(x, weight)
    return aten.einsum.default.decompose(equation, operands, path=path)


@decomposes(*([aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []))
def _products_of_groups(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Any:
    """Rows of ``a`` up to each offset times the matrix of their group, as a mixture of experts computes them."""
    if offs is None or bias is not None or out_dtype not in (None, a.dtype) or (a.ndim, b.ndim) != (2, 3):
        return NotImplemented
    ends = [int(end) for end in offs.tolist()]
    if not ends or ends[-1] != len(a):
        return NotImplemented
    return torch.cat([a[start:end] @ b[k] for k, (start, end) in enumerate(zip([0, *ends], ends, strict=False))])


@decomposes(aten.bilinear.default)
def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """N[..., o] = sum_ij x[..., i] W[o, i, j] y[..., j]."""
    rows = (x.unsqueeze(-2).unsqueeze(-2) @ weight).squeeze(-2)  # (..., o, j)
    out = (rows @ y.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias
