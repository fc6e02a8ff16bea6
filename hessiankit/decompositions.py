"""Operations that are others in disguise: the tracer records what they are made of, so that each part has its closed form.

``torch.einsum`` is permutations and one product, ``addmm`` a product and a sum (so that the weight and the bias of a
layer written with it are recognised), a convolution over patches that do not overlap is a linear map of each patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COMPOSITE = (
    "broadcast_to.default",
    "chunk.default",
    "column_stack.default",
    "concat.default",
    "concatenate.default",
    "divide.Tensor",
    "dstack.default",
    "expand_as.default",
    "hstack.default",
    "inner.default",
    "movedim.int",
    "movedim.intlist",
    "moveaxis.int",
    "moveaxis.intlist",
    "multiply.Tensor",
    "narrow.default",
    "numpy_T.default",
    "outer.default",
    "repeat_interleave.self_int",
    "repeat_interleave.self_Tensor",
    "square.default",
    "subtract.Tensor",
    "swapaxes.default",
    "swapdims.default",
    "take_along_dim.default",
    "tensor_split.indices",
    "tensor_split.sections",
    "tensordot.default",
    "tile.default",
    "true_divide.Tensor",
    "view_as.default",
    "reshape_as.default",
    "vstack.default",
)
"""Operations for which torch itself knows the parts."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
for _name in COMPOSITE:
    _packet, _overload = _name.split(".")
    if (_operation := getattr(getattr(aten, _packet, None), _overload, None)) is not None:
        DECOMPOSITIONS[_operation] = _operation.decompose


def decomposes(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the parts of some operations; returning NotImplemented leaves the operation whole."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(operations, function))
        return function

    return register


@decomposes(aten.addmm.default, aten.baddbmm.default)
def _add_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = a @ b
    return (product if alpha == 1 else product * alpha) + (c if beta == 1 else c * beta)


@decomposes(aten.addbmm.default)
def _add_sum_of_products(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = (a @ b).sum(0)
    return (product if alpha == 1 else product * alpha) + (c if beta == 1 else c * beta)


@decomposes(aten.addmv.default)
def _add_matrix_times_vector(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add_product(c.unsqueeze(-1), a, b.unsqueeze(-1), beta=beta, alpha=alpha).squeeze(-1)


@decomposes(aten.addcmul.default)
def _add_entrywise_product(c: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return c + (a * b if value == 1 else a * b * value)


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
    """Rows times a weight as a product, which keeps the weight's site; anything else as torch does it."""
    compact = equation.replace(" ", "")
    terms, _, out = compact.partition("->")
    left, _, right = terms.partition(",")
    letters = [term.replace("...", "") for term in (left, right, out)]
    if len(operands) == 2 and out and len(right) == 2 and letters[0] and left[-1] in right:
        at = right.index(left[-1])  # the weight's contracted axis
        free, (x, weight) = right[1 - at], operands
        fits = x.shape[-1] == weight.shape[at] and out == left[:-1] + free  # einsum repeats axes of length one
        if fits and all(len(set(term)) == len(term) for term in letters):
            return torch.matmul(x, weight) if at == 0 else torch._C._nn.linear(x, weight)
    return aten.einsum.default.decompose(equation, operands, path=path)


@decomposes(aten.rsub.Scalar, aten.rsub.Tensor)
def _subtract_from(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return torch.add(x * -alpha, other)


@decomposes(aten.glu.default)
def _gated(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate)


@decomposes(aten.var.correction)
def _variance(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    axes = tuple(range(x.ndim)) if dim is None or not len(dim) else tuple(dim)
    count = math.prod(x.shape[axis] for axis in axes)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        return NotImplemented
    centred = x - x.mean(axes, keepdim=True)
    mean = (centred * centred).mean(axes, keepdim=keepdim)
    return mean if divisor == count else mean * (count / divisor)


@decomposes(aten.var.dim)
def _variance_along(x: Tensor, dim: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _variance(x, dim, correction=int(unbiased), keepdim=keepdim)


@decomposes(aten.std.correction)
def _deviation(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    variance = _variance(x, dim, correction=correction, keepdim=keepdim)
    return variance if variance is NotImplemented else torch.sqrt(variance)


@decomposes(aten.std.dim)
def _deviation_along(x: Tensor, dim: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _deviation(x, dim, correction=int(unbiased), keepdim=keepdim)


@decomposes(aten.linalg_vector_norm.default)
def _euclidean_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord != 2 or dtype is not None:
        return NotImplemented
    axes = tuple(range(x.ndim)) if dim is None else dim
    return torch.sqrt((x * x).sum(axes, keepdim=keepdim))


@decomposes(aten.logsumexp.default)
def _log_sum_exp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    top = x.detach().amax(dim, keepdim=True)  # a shift that the result does not depend on
    out = torch.log(torch.exp(x - top).sum(dim, keepdim=True)) + top
    return out if keepdim else out.squeeze(dim)


def _constant(x: Tensor, size: Sequence[int], fill: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.full(size, fill, dtype=dtype or x.dtype, device=device or x.device)


for _fill, _name in ((0, "zeros"), (1, "ones")):

    @decomposes(getattr(aten, f"{_name}_like").default)
    def _alike(x: Tensor, *, dtype: Any = None, device: Any = None, fill: float = _fill, **_: Any) -> Tensor:
        return _constant(x, x.shape, fill, dtype, device)

    @decomposes(getattr(aten, f"new_{_name}").default)
    def _new(x: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, fill: float = _fill, **_: Any) -> Tensor:
        return _constant(x, size, fill, dtype, device)


@decomposes(aten.mse_loss.default)
def _squared_error(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    difference = x - target
    squares = difference * difference
    return squares if reduction == 0 else squares.mean() if reduction == 1 else squares.sum()


@decomposes(aten.conv2d.default)
def _patches(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Any:
    """A convolution whose patches tile the image, as a linear map of each patch; others stay whole."""
    height, width = weight.shape[2:]
    strides = tuple(stride) * (2 // len(stride))
    plain = strides == (height, width) and not any(padding) and set(dilation) == {1} and groups == 1
    if x.ndim != 4 or not plain or x.shape[2] % height or x.shape[3] % width:
        return NotImplemented
    batch, channels, rows, columns = x.shape
    tiles = x.reshape(batch, channels, rows // height, height, columns // width, width).permute(0, 2, 4, 1, 3, 5)
    flat = tiles.reshape(batch, rows // height, columns // width, channels * height * width)
    return torch._C._nn.linear(flat, weight.reshape(weight.shape[0], -1), bias).permute(0, 3, 1, 2)
