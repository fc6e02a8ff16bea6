"""What a primitive says about its rows has to be true: no entry of its derivatives may couple two of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from action_reference import couples
from primitive_cases import attention
from second_order_reference import random_point
from torch import Tensor

from hessiankit.primitives.activation import Activation
from hessiankit.primitives.axis_maps import AxisMaps
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.elementwise import Divide, Elementwise
from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.indexing import Concatenate, Select, Slice, Stack, Take, Where
from hessiankit.primitives.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError
from hessiankit.primitives.normalization import LayerNorm
from hessiankit.primitives.pooling import Extreme, SumOver
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.scattering import TakeAmong
from hessiankit.primitives.softmax import LogSoftmax, Softmax

Case = tuple[Primitive, tuple[tuple[int, ...], ...]]
SHAPES = [(3,), (3, 3), (2, 3), (1, 3), (3, 1), (2, 2, 3), (2, 3, 2), (3, 1, 2)]
"""Small, and many of equal length: that is where a comparison of shapes goes wrong."""
LEADING = [(), (2,), (2, 2), (1, 2), (2, 1)]


def cases() -> Iterator[Case]:
    for s, t in itertools.product(SHAPES, repeat=2):
        if fits(torch.add, s, t):
            for entrywise in (Add(2.0), Multiply(), Divide(), Binary("logaddexp")):
                yield entrywise, (s, t)
            for condition in ((3,), (3, 1), (2, 1, 1)):
                if fits(torch.add, condition, tuple(torch.broadcast_shapes(s, t))):
                    yield Where(torch.arange(torch.Size(condition).numel()).reshape(condition) % 2 == 0), (s, t)
            if torch.broadcast_shapes(s, t) == s:
                yield MaskedFill(torch.arange(torch.Size(t).numel()).reshape(t) % 2 == 0, 0.5), (s,)
        if min(len(s), len(t)) >= 2 and fits(torch.matmul, s, t):
            yield MatMul(), (s, t)
        if len(t) == 2 and s[-1] == t[1]:
            yield Linear(), (s, t, t[:1])
        if fits(torch.Tensor.expand, s, t):
            yield Expand(t), (s,)
        if torch.Size(s).numel() == torch.Size(t).numel():
            yield Reshape(t), (s,)
        for dim in range(-len(s), len(s)):
            if len(s) == len(t) and all(s[k] == t[k] for k in range(len(s)) if k != dim % len(s)):
                yield Concatenate(dim), (s, t)
    for s in SHAPES:
        yield TakeAmong(torch.nn.functional.pad(torch.arange(1, 1 + torch.Size(s).numel()).reshape(s), (1, 2))), ((), s)
        yield MeanSquaredError(2.0), (s, s)
        for order in itertools.permutations(range(len(s))):
            yield Permute(order), (s,)
        for dim in range(-len(s), len(s)):
            matrix = AxisMaps((dim,), (torch.ones(s[dim], s[dim]).tril(),))
            for along in (Softmax(dim), LogSoftmax(dim), Extreme("amax", (dim,)), matrix, Select(dim, 0), Select(dim, -1)):
                yield along, (s,)
            yield Stack(dim), (s, s)
            for start, stop, step in ((None, None, 1), (0, 9, 1), (1, None, 1), (0, -1, 1), (None, None, 2)):
                if len(range(s[dim])[start:stop:step]):
                    yield Slice(dim, start, stop, step), (s,)
        at = torch.arange(torch.Size(s).numel()).reshape(s)
        for positions in (at, at.flip(-1), at.flip(0), at[..., :1], at.transpose(0, -1), at // 2):
            yield Take(positions), (s,)
        for dims, keepdim in itertools.product(
            [(), *((i,) for i in range(-len(s), len(s))), *itertools.combinations(range(len(s)), 2)], (False, True)
        ):
            yield SumOver(dims, keepdim), (s,)
        for dims in range(1, len(s) + 1):
            yield LayerNorm(dims), (s, s[len(s) - dims :], s[len(s) - dims :])
    for queries, keys, values in itertools.product(LEADING, repeat=3):
        yield ScaledDotProductAttention(), ((*queries, 2, 2), (*keys, 2, 2), (*values, 2, 2))
    for entrywise in (Activation("gelu"), Elementwise("exp"), Cast(torch.float64), Multiple(2.0), Shift(2.0)):
        yield entrywise, ((2, 2, 3),)


def fits(operation: object, s: tuple[int, ...], t: tuple[int, ...]) -> bool:
    try:
        operation(torch.zeros(s), t if operation is torch.Tensor.expand else torch.zeros(t))  # type: ignore[operator]
    except RuntimeError:
        return False
    return True


def claimed(primitive: Primitive, inputs: Sequence[Tensor], claim: str) -> Iterator[tuple[int, tuple[bool, ...]]]:
    """Yield every number of row axes, and every choice of moving inputs, for which a primitive claims separate rows."""
    for moving in itertools.product((False, True), repeat=len(inputs)):
        if any(moving):
            ndim = min(x.ndim for x, m in zip(inputs, moving, strict=True) if m)
            for axes in range(1, ndim + 1):
                if getattr(primitive, claim)(inputs, axes, moving):
                    yield axes, moving


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({type(p).__name__ for p, _ in cases()}))
def test_separate_rows_are_separate(name):
    claims = 0
    for primitive, shapes in cases():
        if type(primitive).__name__ != name:
            continue
        inputs = [x + 0.1 for x in random_point(52, **{f"x{k}": s for k, s in enumerate(shapes)}).values()]
        f = attention if isinstance(primitive, ScaledDotProductAttention) else primitive.value
        value = f(*inputs)
        first = None
        for axes, moving in claimed(primitive, inputs, "rowwise"):
            claims += 1
            first = first or torch.func.jacrev(f, tuple(range(len(inputs))))(*inputs)
            for k in (k for k, m in enumerate(moving) if m):
                assert not couples(first[k], value.shape, inputs[k].shape, axes), (primitive, shapes, axes, moving)
        adjoint = torch.linspace(0.3, 1.7, value.numel(), dtype=torch.float64).reshape(value.shape)
        second = None
        for axes, moving in claimed(primitive, inputs, "separable"):
            claims += 1
            second = second or curvature(f, inputs, adjoint)
            some = [k for k, m in enumerate(moving) if m]
            for i, j in itertools.product(some, repeat=2):
                assert not couples(second[i][j], inputs[i].shape, inputs[j].shape, axes), (primitive, shapes, axes, moving)
    assert claims > 0


def curvature(f: Callable[..., Tensor], inputs: Sequence[Tensor], adjoint: Tensor) -> Sequence[Sequence[Tensor]]:
    """The second derivative of <adjoint, f> by autograd."""
    return torch.autograd.functional.hessian(lambda *xs: (adjoint * f(*xs)).sum(), tuple(inputs))


@pytest.mark.parametrize("labels", [(3,), (2, 3)])
def test_cross_entropy_keeps_tokens_apart_but_not_classes(labels):
    logits = random_point(53, x=(*labels, 4))["x"]
    primitive, target = CrossEntropy(), torch.arange(torch.Size(labels).numel()).reshape(labels) % 4
    second = torch.autograd.functional.hessian(lambda z: primitive.value(z, target), logits)
    for axes in range(1, logits.ndim + 1):
        says = primitive.separable((logits, target), axes, (True, False))
        assert says == (axes < logits.ndim) == (not couples(second, logits.shape, logits.shape, axes))
        assert not primitive.rowwise((logits, target), axes, (True, False))  # a scalar has no rows


X, V = (2, 3, 4), (4,)
CLAIMS: list[tuple[Primitive, tuple[tuple[int, ...], ...], str, str]] = [
    # the primitive, its inputs' shapes, which of them move, and for how many row axes, 1 to n, rows are said to stay apart
    (MatMul(), (X, (4, 5)), "10", "TT-"),
    (MatMul(), (X, (2, 4, 3)), "11", "T--"),
    (Linear(), (X, (5, 4), (5,)), "100", "TT-"),
    (Multiply(), (X, X), "11", "TTT"),
    (Binary("power"), ((2, 3), (2, 3)), "11", "TT"),
    (Binary("power"), ((2, 3), (3,)), "10", "TT"),
    (Binary("power"), ((2, 3), (3,)), "11", "-"),
    (Activation("gelu"), (X,), "1", "TTT"),
    (LayerNorm(), (X, V, V), "100", "TT-"),
    (LayerNorm(), (X, V, V), "110", "-"),
    (LayerNorm(2), (X,), "1", "T--"),
    (Softmax(-1), (X,), "1", "TT-"),
    (Softmax(1), (X,), "1", "T--"),
    (LogSoftmax(0), (X,), "1", "---"),
    (Reshape((2, 3, 2, 2)), (X,), "1", "TT-"),
    (Reshape((6, 4)), (X,), "1", "---"),
    (Expand((2, 3, 4)), ((2, 3, 1),), "1", "TT-"),
    (Expand((3, 3)), ((3,),), "1", "-"),  # a new axis in front shifts the rows
    (Select(2, 0), (X,), "1", "TT-"),
    (Slice(1, 1), (X,), "1", "T--"),
    (Slice(1, 0, 2**62), (X,), "1", "TTT"),  # all of an axis
    (Concatenate(-1), (X, X), "11", "TT-"),
    (Take(torch.arange(24).reshape(X).flip(-1)), (X,), "1", "TT-"),
    (TakeAmong(torch.arange(24).reshape(X).flip(1)), (X,), "1", "T--"),
    (TakeAmong(torch.nn.functional.pad(torch.arange(24).reshape(X), (1, 2), value=24)), (X, ()), "10", "TT-"),
    (Where(torch.ones(3, 1, dtype=torch.bool)), (X, X), "11", "TTT"),
    (Where(torch.ones(3, 1, dtype=torch.bool)), (X, (3, 4)), "11", "--"),
    (Embedding(torch.arange(5)), ((5, 3),), "1", "-"),
    (AxisMaps((-1,), (torch.ones(2, 4),)), (X,), "1", "TT-"),
    (AxisMaps((1,), (torch.ones(5, 3),)), (X,), "1", "T--"),
    (ScaledDotProductAttention(), (X, (2, 5, 4), (2, 5, 2)), "111", "T--"),
    (ScaledDotProductAttention(), (X, (2, 5, 4), (2, 5, 2)), "100", "TT-"),
    (SumOver((-1,)), (X,), "1", "TT-"),
    (SumOver(()), (X,), "1", "---"),
    (Extreme("amax", (-1,)), (X,), "1", "TT-"),
    (MeanSquaredError(1.0), (X, X), "10", "---"),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_claims_that_speed_depends_on(claim):
    primitive, shapes, moving, expected = claim
    inputs, flags = [torch.zeros(shape) for shape in shapes], [flag == "1" for flag in moving]
    assert "".join("T" if primitive.rowwise(inputs, n + 1, flags) else "-" for n in range(len(expected))) == expected
