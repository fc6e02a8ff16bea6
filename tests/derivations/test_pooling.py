"""Mean-pool head in vec_r, and the reductions as primitives."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from action_reference import check_actions
from second_order_reference import check_all_blocks, exact_hessian, exact_jacobian, random_point, same, symbols

from derivations.matrix import Zero
from derivations.operation import Operation
from derivations.pooling import Extreme, Mean, MeanPoolHeadAt, SumOver


@pytest.mark.parametrize("names", [("Z", "W_c"), ("Z", "W_c", "b_c")])
@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 3, 5), (1, 2, 3), (3, 1, 2), (4, 2, 1)])
def test_head_blocks_against_autograd(names, sizes):
    L, d, C = sizes
    everything = random_point(60, Z=(L, d), W_c=(d, C), b_c=(C,))
    point = {name: everything[name] for name in names}
    check_all_blocks(MeanPoolHeadAt(**point), lambda Z, W_c, b_c=0.0: Z.mean(0, keepdim=True) @ W_c + b_c, point)


def test_head_exactly():
    Z, W_c, b_c = symbols("z", 2, 3), symbols("w", 3, 2), symbols("b", 2)
    point = MeanPoolHeadAt(Z, W_c, b_c)
    assert isinstance(point, Operation)
    outputs = [sum(Z[i, k] * W_c[k, c] for i in range(2) for k in range(3)) / 2 + b_c[c] for c in range(2)]
    for name, s in (("Z", Z), ("W_c", W_c), ("b_c", b_c)):
        assert same(point.jacobian(name).sympy(), exact_jacobian(outputs, s))
    assert same(point.hessian("Z", "W_c").sympy(), exact_hessian(outputs, Z, W_c))
    assert same(point.hessian("W_c", "Z").sympy(), exact_hessian(outputs, W_c, Z))
    assert isinstance(point.hessian("b_c", "Z"), Zero)
    rational = MeanPoolHeadAt(np.array([[Fraction(1)], [Fraction(2)]], dtype=object), np.array([[Fraction(5)]], dtype=object))
    assert rational.value.tolist() == [[Fraction(15, 2)]]


def test_head_errors():
    Z = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="expected Z"):
        MeanPoolHeadAt(Z, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="expected Z"):
        MeanPoolHeadAt(Z, torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="no argument is called 'b_c'"):
        MeanPoolHeadAt(Z, torch.zeros(3, 4)).jacobian("b_c")


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 2), (-2, -1), (0, 1, 2), ()])
def test_reductions(dims, keepdim):
    X = random_point(61, X=(2, 3, 4))["X"]
    axes = dims or (0, 1, 2)
    for primitive, f in ((Mean(dims, keepdim), torch.mean), (SumOver(dims, keepdim), torch.sum)):
        check_actions(primitive, lambda X, f=f: f(X, dim=axes, keepdim=keepdim), (X,), (0,))
        assert primitive.is_linear


def test_reductions_of_a_number():
    check_actions(Mean(()), lambda X: X * 1, (torch.tensor(3.0, dtype=torch.float64),), (0,))


def test_rows_stay_apart_in_front_of_the_axes():
    X = torch.zeros(2, 3, 4)
    assert [Mean((1,)).rowwise((X,), axes, (True,)) for axes in (1, 2)] == [True, False]
    assert SumOver((-1,)).rowwise((X,), 2, (True,))
    assert not SumOver(()).rowwise((X,), 1, (True,))
    with pytest.raises(ValueError, match="tangent of X is None"):
        Mean((0,)).jvp((X,), (None,))


DISTINCT = random_point(69, X=(2, 3, 4))["X"]
EXTREMES = {
    "largest": (Extreme("amax", (1,)), lambda x: x.max(1).values),
    "smallest, kept": (Extreme("amin", (-1,), keepdim=True), lambda x: x.min(-1, keepdim=True).values),
    "largest over two axes": (Extreme("amax", (0, -1)), lambda x: x.transpose(0, 1).flatten(1).max(1).values),
    "largest of all": (Extreme("amax"), torch.max),
    "smallest of all": (Extreme("amin"), torch.min),
    "middle of all": (Extreme("median"), lambda x: x.flatten().sort().values[11]),
    "middle over two axes": (
        Extreme("median", (0, 2), keepdim=True),
        lambda x: x.mT.flatten(0, 1).sort(0).values[3][None, :, None],
    ),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name):
    primitive, f = EXTREMES[name]
    check_actions(primitive, f, (DISTINCT,), [0])
    assert primitive.is_linear


def test_equal_extremes_share_the_slope_as_in_torch():
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    for kind in ("amax", "amin"):
        (slope,) = torch.autograd.grad(getattr(x, kind)(1).sum(), x)
        seen = Extreme(kind, (1,)).vjp((x.detach(),), torch.ones(1, 2, dtype=torch.float64))[0][0]
        assert torch.equal(seen, slope)


def test_extremes_keep_rows_apart():
    assert Extreme("amax", (-1,)).rowwise((DISTINCT,), 2, (True,))
    assert not Extreme("amax", (1,)).rowwise((DISTINCT,), 2, (True,))
    with pytest.raises(ValueError, match="no kind 'mode'; the kinds are amax, amin, median"):
        Extreme("mode")
    with pytest.raises(ValueError, match="tangent of X is None"):
        Extreme("amax").jvp((DISTINCT,), (None,))
