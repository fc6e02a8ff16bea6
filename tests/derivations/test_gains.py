"""Gains and gates against reverse-over-reverse."""

import pytest
import torch
from second_order_reference import check_all_blocks, random_point
from structured_reference import check_exact_equals_floats, check_structure_of_all_blocks, integers

from derivations.arrays import to_float
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.matrix import letters

CASES = {
    "columns": (ColumnScaleAt, lambda X, v: X * v, {"X": (3, 4), "v": (4,)}, ("X",)),
    "scalar": (ScalarScaleAt, lambda X, a: a * X, {"X": (3, 2), "a": ()}, ("X", "a")),
    "scalar of one entry": (ScalarScaleAt, lambda X, a: a * X, {"X": (3, 2), "a": (1,)}, ("X", "a")),
    "entries": (HadamardAt, lambda X, Y: X * Y, {"X": (3, 2), "Y": (3, 2)}, ("X", "Y")),
}


@pytest.mark.parametrize("case", CASES)
def test_all_blocks_equal_autograd(case):
    operation, f, shapes, sharp = CASES[case]
    point = random_point(0, **shapes)
    check_all_blocks(operation(**point), f, point)
    check_structure_of_all_blocks(operation(**point), point["X"], sharp=sharp)


@pytest.mark.parametrize("case", CASES)
def test_exact_numbers_stay_exact(case):
    operation, _, shapes, _ = CASES[case]
    point = {name: integers(seed, *shape) for seed, (name, shape) in enumerate(shapes.items()) if shape}
    if "a" in shapes and "a" not in point:
        point["a"] = integers(7, 1).reshape(())
    check_exact_equals_floats(operation(**point), operation(**{name: to_float(v) for name, v in point.items()}))


def test_latex():
    X, v = torch.ones(2, 3), torch.ones(3)
    with letters({"X": "F", "v": r"\lambda", "a": r"\alpha", "Y": "U"}):
        expect_latex(ColumnScaleAt(X, v), ScalarScaleAt(X, v[:1]), HadamardAt(X, X))


def expect_latex(columns, scalar, entries):
    assert columns.jacobian("X").latex() == r"I_{2}\otimes \operatorname{diag}(\lambda)"
    assert columns.jacobian("v").latex() == (
        r"\operatorname{diag}(\operatorname{vec}_r(F))\,\left(\mathbf{1}_{2}\otimes I_{3}\right)"
    )
    assert [scalar.jacobian(name).latex() for name in "Xa"] == [r"\alpha\otimes I_{6}", r"\operatorname{vec}_r(F)"]
    assert entries.jacobian("X").latex() == r"\operatorname{diag}(\operatorname{vec}_r(U))"


def test_errors():
    X = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"ColumnScaleAt: expected X \(L, d\) and v \(d,\), got \(2, 3\) and \(2,\)"):
        ColumnScaleAt(X, torch.ones(2))
    with pytest.raises(ValueError, match=r"ScalarScaleAt: a must be one number, of shape \(\) or \(1,\), got \(3,\)"):
        ScalarScaleAt(X, torch.ones(3))
    with pytest.raises(ValueError, match=r"HadamardAt: X and Y need one shape, got \(2, 3\) and \(3,\)"):
        HadamardAt(X, torch.ones(3))
    for operation in (ColumnScaleAt(X, X[0]), ScalarScaleAt(X, X[0, 0]), HadamardAt(X, X)):
        with pytest.raises(ValueError, match="no argument is called 'Z'"):
            operation.hessian("X", "Z")
