"""Primitives linearised at a point: both terms pulled at once equal their sum, for any inputs that are wanted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.elementwise import Elementwise
from derivations.fused_attention import ScaledDotProductAttention
from derivations.linear import Add, Linear, MatMul, Multiply
from derivations.loss import CrossEntropy
from derivations.normalization_actions import LayerNorm, RMSNorm
from derivations.primitive import Primitive
from derivations.softmax import Softmax


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES: dict[str, tuple[Primitive, tuple[tuple[int, ...], ...]]] = {
    "rows times a matrix": (MatMul(), ((2, 3, 4), (4, 5))),
    "matrix times matrix": (MatMul(), ((3, 4), (4, 5))),
    "stack times stack": (MatMul(), ((2, 3, 4), (2, 4, 5))),
    "repeated stack": (MatMul(), ((2, 1, 3, 4), (6, 4, 5))),
    "matrix times stack": (MatMul(), ((3, 4), (2, 4, 5))),
    "linear": (Linear(), ((2, 3, 4), (5, 4))),
    "linear with bias": (Linear(), ((2, 3, 4), (5, 4), (5,))),
    "linear of one row": (Linear(), ((4,), (5, 4), (5,))),
    "sum": (Add(2.0), ((2, 3, 4), (4,))),
    "entrywise product": (Multiply(), ((2, 3, 4), (3, 1))),
    "gelu": (Activation("gelu"), ((3, 4),)),
    "relu": (Activation("relu"), ((3, 4),)),
    "sine": (Elementwise("sin"), ((3, 4),)),
    "softmax": (Softmax(-2), ((2, 3, 4),)),
    "layer norm": (LayerNorm(), ((2, 3, 4), (4,), (4,))),
    "layer norm without weights": (LayerNorm(), ((2, 3, 4),)),
    "root mean square norm": (RMSNorm(eps=1e-3), ((2, 3, 4), (4,))),
    "attention": (ScaledDotProductAttention(), ((2, 3, 4), (2, 5, 4), (2, 5, 6), (3, 5))),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_both_terms_at_once_equal_their_sum(name: str, count: int) -> None:
    primitive, shapes = CASES[name]
    inputs = [draw(*shape, seed=k) for k, shape in enumerate(shapes)]
    out = primitive.value(*inputs)
    adjoint, bar = draw(*out.shape, seed=7), draw(count, *out.shape, seed=8)
    everything = [draw(count, *shape, seed=10 + k) for k, shape in enumerate(shapes)]
    for moving in itertools.product([False, True], repeat=len(shapes)):
        if not any(moving):
            continue
        tangents = [t if moves else None for t, moves in zip(everything, moving, strict=True)]
        at_point = primitive.linearise(inputs, adjoint, moving)
        first, second = primitive.vjp(inputs, bar), primitive.curvature(inputs, adjoint, tangents)
        for _ in range(2):  # nothing that is kept may have been written into
            assert torch.equal(at_point.push(tangents), primitive.jvp(inputs, tangents))
            found = at_point.pull(bar, tangents)
            for wanted, covector, a, b in zip(moving, found, first, second, strict=True):
                if wanted:
                    total = (0 if a is None else a) + (torch.zeros(()) if b is None else b)
                    torch.testing.assert_close(covector, total, rtol=1e-12, atol=1e-12)


def test_cross_entropy() -> None:
    logits, labels = draw(2, 3, 4), torch.tensor([[0, 3, -100], [1, 2, 0]])
    primitive, t, bar = CrossEntropy(), draw(2, 2, 3, 4, seed=1), draw(2, seed=2)
    at_point = primitive.linearise((logits, labels), torch.tensor(0.5).double(), (True, False))
    expected = (
        primitive.vjp((logits, labels), bar)[0]
        + primitive.curvature(  # type: ignore[operator]
            (logits, labels), torch.tensor(0.5).double(), (t, None)
        )[0]
    )
    torch.testing.assert_close(at_point.pull(bar, (t, None))[0], expected, rtol=1e-12, atol=1e-14)


def test_tangents_need_an_adjoint() -> None:
    for primitive, shape in ((MatMul(), (3, 4)), (Softmax(-1), (3, 4)), (LayerNorm(), (3, 4))):
        inputs = [draw(3, 4), draw(4, 5)] if isinstance(primitive, MatMul) else [draw(*shape)]
        tangents = [draw(1, *x.shape) for x in inputs]
        with pytest.raises(ValueError, match="without an adjoint"):
            primitive.linearise(inputs).pull(None, tangents)
