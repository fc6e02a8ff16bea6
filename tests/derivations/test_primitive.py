"""What a primitive says about its rows has to be true: no entry of its derivatives may couple two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from second_order_reference import random_point
from torch import Tensor

from derivations.activation import KINDS, Activation
from derivations.axis_maps import AxisMaps
from derivations.binary import Binary
from derivations.cast import Cast
from derivations.elementwise import KINDS as FUNCTIONS
from derivations.elementwise import Divide, Elementwise
from derivations.indexing import Concatenate, Select, Slice, Stack, Take, Where
from derivations.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from derivations.loss import CrossEntropy, MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Extreme, Mean, SumOver
from derivations.primitive import Primitive
from derivations.scattering import TakeAmong
from derivations.softmax import LogSoftmax, Softmax

Case = tuple[Primitive, tuple[tuple[int, ...], ...]]
CONSTANTS = {
    "exponential": (2.0,),
    "power": (2,),
    "threshold": (0.1, 0.2),
    "logit_within": (0.3,),
    "remainder": (0.7,),
    "fmod": (0.7,),
}
SHAPES = [(3,), (3, 3), (2, 3), (1, 3), (3, 1), (2, 2, 3), (2, 3, 2), (3, 1, 2)]
"""Small, and many of equal length: that is where a comparison of shapes goes wrong."""


def cases() -> Iterator[Case]:
    pairs = list(itertools.product(SHAPES, repeat=2))
    for s, t in pairs:
        if fits(torch.add, s, t):
            yield Add(2.0), (s, t)
            yield Multiply(), (s, t)
            yield Divide(), (s, t)
            yield Binary("logaddexp"), (s, t)
            for condition in ((3,), (3, 1), (2, 1, 1)):
                if fits(torch.add, condition, tuple(torch.broadcast_shapes(s, t))):
                    yield Where(torch.arange(torch.Size(condition).numel()).reshape(condition) % 2 == 0), (s, t)
        if min(len(s), len(t)) >= 2 and fits(torch.matmul, s, t):
            yield MatMul(), (s, t)
        if len(t) == 2 and s[-1] == t[1]:
            yield Linear(), (s, t)
            yield Linear(), (s, t, t[:1])
        if fits(torch.Tensor.expand, s, t):
            yield Expand(t), (s,)
        if torch.Size(s).numel() == torch.Size(t).numel():
            yield Reshape(t), (s,)
        if fits(torch.add, s, t) and torch.broadcast_shapes(s, t) == s:
            yield MaskedFill(torch.arange(torch.Size(t).numel()).reshape(t) % 2 == 0, 0.5), (s,)
    for s in SHAPES:
        axes = range(-len(s), len(s))
        yield Multiple(2.0), (s,)
        yield Cast(torch.float64), (s,)
        yield TakeAmong(torch.nn.functional.pad(torch.arange(1, 1 + torch.Size(s).numel()).reshape(s), (1, 2))), ((), s)
        yield Shift(2.0), (s,)
        yield MeanSquaredError(2.0), (s, s)
        for order in itertools.permutations(range(len(s))):
            yield Permute(order), (s,)
        for dim in axes:
            yield Softmax(dim), (s,)
            yield Extreme("amax", (dim,)), (s,)
            yield AxisMaps((dim,), (torch.ones(s[dim], s[dim]).tril(),)), (s,)
            yield LogSoftmax(dim), (s,)
            yield Select(dim, 0), (s,)
            yield Select(dim, -1), (s,)
            yield Stack(dim), (s, s)
            for start, stop, step in ((None, None, 1), (0, 9, 1), (1, None, 1), (0, -1, 1), (None, None, 2)):
                if len(range(s[dim])[start:stop:step]):
                    yield Slice(dim, start, stop, step), (s,)
            for t in SHAPES:
                if len(s) == len(t) and all(s[k] == t[k] for k in range(len(s)) if k != dim % len(s)):
                    yield Concatenate(dim), (s, t)
        positions = torch.arange(torch.Size(s).numel()).reshape(s)
        for at in (
            positions,
            positions.flip(-1),
            positions.flip(0),
            positions[..., :1],
            positions.transpose(0, -1),
            positions // 2,
        ):
            yield Take(at), (s,)
        for dims in [(), *((i,) for i in axes), *itertools.combinations(range(len(s)), 2)]:
            for keepdim in (False, True):
                yield Mean(dims, keepdim), (s,)
                yield SumOver(dims, keepdim), (s,)
        for dims in range(1, len(s) + 1):
            weights = s[len(s) - dims :]
            yield LayerNorm(dims), (s,)
            yield LayerNorm(dims), (s, weights, weights)
            yield RMSNorm(dims), (s, weights)
    for kind in KINDS:
        yield Activation(kind), ((2, 2, 3),)
    for kind in FUNCTIONS:
        yield Elementwise(kind, CONSTANTS.get(kind, ())), ((2, 2, 3),)


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


def couples(block: Tensor, out: torch.Size, into: torch.Size, axes: int) -> bool:
    """Tell whether a Jacobian (out x into) has entries off the block diagonal over the first axes of both."""
    if out[:axes] != into[:axes]:
        return True
    rows = out[:axes].numel()
    entries = block.reshape(rows, -1, rows, into[axes:].numel()).abs().amax((1, 3))
    return bool((entries - entries.diagonal().diag()).any())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({type(p).__name__ for p, _ in cases()}))
def test_separate_rows_are_separate(name):
    claims = 0
    for primitive, shapes in cases():
        if type(primitive).__name__ != name:
            continue
        inputs = [x + 0.1 for x in random_point(52, **{f"x{k}": s for k, s in enumerate(shapes)}).values()]
        if isinstance(primitive, Elementwise):
            inputs = [0.9 * x.abs().tanh() + (primitive.kind == "acosh") for x in inputs]  # where all of them are defined
        value = primitive.value(*inputs)
        first = None
        for axes, moving in claimed(primitive, inputs, "rowwise"):
            claims += 1
            first = first or torch.func.jacrev(primitive.value, tuple(range(len(inputs))))(*inputs)
            for k in (k for k, m in enumerate(moving) if m):
                assert not couples(first[k], value.shape, inputs[k].shape, axes), (primitive, shapes, axes, moving)
        adjoint = torch.linspace(0.3, 1.7, value.numel(), dtype=torch.float64).reshape(value.shape)
        second = None
        for axes, moving in claimed(primitive, inputs, "separable"):
            claims += 1
            second = second or curvature(primitive, inputs, adjoint)
            some = [k for k, m in enumerate(moving) if m]
            for i, j in itertools.product(some, repeat=2):
                assert not couples(second[i][j], inputs[i].shape, inputs[j].shape, axes), (primitive, shapes, axes, moving)
    assert claims > 0


def curvature(primitive: Primitive, inputs: Sequence[Tensor], adjoint: Tensor) -> Sequence[Sequence[Tensor]]:
    """The second derivative of <adjoint, phi> by autograd over the primitive's value."""

    def scalar(*xs: Tensor) -> Tensor:
        return (adjoint * primitive.value(*xs)).sum()

    return torch.autograd.functional.hessian(scalar, tuple(inputs))


@pytest.mark.parametrize("labels", [(3,), (2, 3)])
def test_cross_entropy_keeps_tokens_apart_but_not_classes(labels):
    logits = random_point(53, x=(*labels, 4))["x"]
    primitive, target = CrossEntropy(), torch.arange(torch.Size(labels).numel()).reshape(labels) % 4
    second = torch.autograd.functional.hessian(lambda z: primitive.value(z, target), logits)
    for axes in range(1, logits.ndim + 1):
        says = primitive.separable((logits, target), axes, (True, False))
        assert says == (axes < logits.ndim) == (not couples(second, logits.shape, logits.shape, axes))
        assert not primitive.rowwise((logits, target), axes, (True, False))  # a scalar has no rows


def test_useful_claims_are_made():
    x, w, b = torch.zeros(2, 3, 4), torch.zeros(4, 5), torch.zeros(5)
    assert MatMul().rowwise((x, w), 2, (True, False))
    assert MatMul().rowwise((x, x.mT), 1, (True, True))
    assert Linear().rowwise((x, w.T, b), 2, (True, False, False))
    assert Add().rowwise((x, torch.zeros(4)), 2, (True, False))
    assert Multiply().rowwise((x, x), 3, (True, True))
    assert LayerNorm().rowwise((x, torch.zeros(4), None), 2, (True, False, False))
    assert Reshape((2, 3, 2, 2)).rowwise((x,), 2, (True,))
    assert not Reshape((6, 4)).rowwise((x,), 1, (True,))
    assert Expand((2, 3, 4)).rowwise((torch.zeros(2, 3, 1),), 2, (True,))
    assert not Expand((3, 3)).rowwise((torch.zeros(3),), 1, (True,))  # a new axis in front shifts the rows
