"""Matrix products, sums, products and re-arrangements as primitives: four actions each, against torch.func."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import jacobian, random_point, relative_error

from derivations.linear import (
    Add,
    Expand,
    Linear,
    MaskedFill,
    MatMul,
    Multiple,
    Multiply,
    Permute,
    Reshape,
    Shift,
    weight_jacobian,
)

WHICH = [(0, 1), (0,), (1,)]


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [x.to(dtype) for x in random_point(50, **{f"x{k}": shape for k, shape in enumerate(shapes)}).values()]


def test_weight_jacobian_is_x_kron_identity():
    point = random_point(51, X=(3, 4), W=(4, 2))
    expected = jacobian(lambda X, W: X @ W, point, "W")
    assert relative_error(weight_jacobian(point["X"], 2).dense(point["X"]), expected) == 0


@pytest.mark.parametrize("moving", WHICH)
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 2)),
        ((2, 3, 4), (4, 5)),  # a weight
        ((2, 5, 3, 4), (4, 2)),
        ((3, 4), (2, 4, 5)),  # a weight from the left
        ((2, 3, 4), (2, 4, 5)),
        ((5, 2, 3, 4), (5, 2, 4, 2)),
        ((2, 1, 3, 4), (5, 4, 2)),  # both repeated
        ((1, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (1, 4, 5)),
        ((2, 5, 3, 4), (2, 1, 4, 2)),
        ((1, 1), (1, 1)),
    ],
)
def test_matmul(shapes, moving):
    check_actions(MatMul(), lambda A, B: torch.einsum("...ij,...jk->...ik", A, B), draw(*shapes), moving)


@pytest.mark.parametrize("moving", [(0, 1, 2), (0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("rows", [(3,), (2, 3), (2, 3, 5), ()])
def test_linear(rows, moving):
    inputs = draw((*rows, 4), (2, 4), (2,))
    check_actions(Linear(), lambda X, W, b: torch.einsum("...i,oi->...o", X, W) + b, inputs, moving)
    without = [k for k in moving if k < 2]
    if without:
        check_actions(Linear(), lambda X, W: torch.einsum("...i,oi->...o", X, W), inputs[:2], without)


BROADCAST = [
    ((3, 4), (3, 4)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 3, 4)),
    ((2, 1, 4), (3, 1)),
    ((3, 4), ()),
    ((), (2,)),
    ((1, 4), (3, 4)),
]


@pytest.mark.parametrize("moving", WHICH)
@pytest.mark.parametrize("shapes", BROADCAST)
def test_add_and_multiply(shapes, moving):
    inputs = draw(*shapes)
    check_actions(Add(), lambda a, b: a + b, inputs, moving)
    check_actions(Add(-1.7), lambda a, b: a - 1.7 * b, inputs, moving)
    check_actions(Multiply(), lambda a, b: a * b, inputs, moving)


def test_one_value_in_both_places():
    (x,) = draw((2, 3, 3))
    adjoint, t = draw((2, 3, 3), (5, 2, 3, 3))
    gradient = torch.func.grad(lambda x: (adjoint * (x @ x)).sum())
    expected = torch.stack([torch.func.jvp(gradient, (x,), (row,))[1] for row in t])
    assert relative_error(sum(MatMul().curvature((x, x), adjoint, (t, t))), expected) < 1e-14
    both = sum(Multiply().curvature((x, x), adjoint, (t, t)))
    assert torch.equal(both, 2 * adjoint * t)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_scale_and_shift(shape):
    (x,) = draw(shape)
    check_actions(Multiple(-2.5), lambda x: x / -0.4, (x,), (0,))
    check_actions(Shift(3.0), lambda x: x + 3, (x,), (0,))


@pytest.mark.parametrize("mask", [(3, 4), (4,), (3, 1)])
def test_masked_fill(mask):
    (x,) = draw((2, 3, 4))
    where = torch.arange(torch.Size(mask).numel()).reshape(mask) % 3 == 1
    check_actions(MaskedFill(where, 7.0), lambda x: torch.where(where, 7.0, x), (x,), (0,))
    hidden = MaskedFill(where, -torch.inf)
    assert torch.isinf(hidden.value(x)[where.expand(2, 3, 4)]).all()
    (t,) = draw((5, 2, 3, 4))
    assert torch.isfinite(hidden.jvp((x,), (t,))).all()
    assert (hidden.vjp((x,), t)[0][:, where.expand(2, 3, 4)] == 0).all()


@pytest.mark.parametrize("shape", [(24,), (2, 12), (2, 3, 2, 2), (1, 2, 3, 4), (4, 3, 2)])
def test_reshape(shape):
    (x,) = draw((2, 3, 4))
    check_actions(Reshape(shape), lambda x: x.contiguous().view(shape), (x,), (0,))
    check_actions(Reshape(shape), lambda x: x.contiguous().view(shape), (x.mT.contiguous().mT,), (0,))  # not contiguous


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)])
def test_permute(order):
    (x,) = draw((2, 3, 4))
    names = "abc"
    check_actions(Permute(order), lambda x: torch.einsum(f"abc->{''.join(names[i] for i in order)}", x), (x,), (0,))


@pytest.mark.parametrize(
    ("before", "after"), [((3, 1), (3, 4)), ((4,), (2, 3, 4)), ((1, 4), (3, 4)), ((), (2, 3)), ((3,), (3, 3))]
)
def test_expand(before, after):
    (x,) = draw(before)
    check_actions(Expand(after), lambda x: x + torch.zeros(after, dtype=x.dtype), (x,), (0,))


def test_without_any_tangent():
    x, y = draw((3, 3), (3, 3))
    for primitive in (MatMul(), Linear(), Add(), Multiply()):
        with pytest.raises(ValueError, match="every tangent is None"):
            primitive.jvp((x, y), (None, None))
        assert all(c is None for c in primitive.curvature((x, y), x, (None, None)))
    for primitive in (Multiple(2.0), Shift(1.0), Reshape((9,)), Permute((1, 0)), Expand((3, 3)), MaskedFill(x > 0, 0.0)):
        with pytest.raises(ValueError, match="every tangent is None"):
            primitive.jvp((x,), (None,))
        assert primitive.is_linear
        assert primitive.curvature((x,), x, (None,)) == (None,)


def test_float32():
    A, B, a, adjoint = draw((2, 3, 16), (16, 5), (4, 2, 3, 16), (2, 3, 5))
    single = MatMul().curvature((A.float(), B.float()), adjoint.float(), (a.float(), None))[1]
    assert relative_error(single.double(), MatMul().curvature((A, B), adjoint, (a, None))[1]) < 2e-6
