"""The affine map against reverse-over-reverse, and the letters it is printed with."""

import pytest
import torch
from second_order_reference import check_all_blocks, random_point
from structured_reference import check_exact_equals_floats, check_structure_of_all_blocks, integers

from derivations.affine import AffineAt
from derivations.arrays import to_float
from derivations.matrix import letters

POINT = random_point(0, X=(4, 3), W=(3, 2), b=(2,))


def without_bias(X, W):
    return X @ W


def with_bias(X, W, b):
    return X @ W + b


def test_all_blocks_equal_autograd():
    check_all_blocks(AffineAt(**POINT), with_bias, POINT)
    bare = {name: POINT[name] for name in ("X", "W")}
    check_all_blocks(AffineAt(**bare), without_bias, bare)


def test_structure():
    check_structure_of_all_blocks(AffineAt(**POINT), POINT["X"], sharp=("X", "W", "b"))


def test_exact_numbers_stay_exact():
    point = {"X": integers(1, 3, 2), "W": integers(2, 2, 4), "b": integers(3, 4)}
    check_exact_equals_floats(AffineAt(**point), AffineAt(**{name: to_float(v) for name, v in point.items()}))


def test_latex():
    point = AffineAt(**POINT)
    with letters({"W": "W_Q", "X": "Y"}):
        jacobians = [point.jacobian(name) for name in "XWb"]
    assert [jacobian.latex() for jacobian in jacobians] == [
        r"I_{4}\otimes W_Q^\top",
        r"Y\otimes I_{2}",
        r"\mathbf{1}_{4}\otimes I_{2}",
    ]
    assert point.hessian("X", "W").latex() == (
        r"\left(I_{4}\otimes K_{2,4}\otimes I_{3}\right)\,\left(\operatorname{vec}_r(I_{4})\otimes I_{6}\right)\,K_{2,3}"
    )


def test_errors():
    X, W, _ = POINT.values()
    with pytest.raises(ValueError, match=r"AffineAt: expected X \(L, d\), W \(d, m\) and b \(m,\), got"):
        AffineAt(X, W.T)
    with pytest.raises(ValueError, match="AffineAt: expected"):
        AffineAt(X, W, torch.ones(3))
    with pytest.raises(ValueError, match="no argument is called 'b'"):
        AffineAt(X, W).jacobian("b")
