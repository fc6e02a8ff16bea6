"""The chain rule to second order: small operations with known derivatives, then two whole blocks, against autograd."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from second_order_reference import assembled, check_all_blocks, derivatives, random_point, relative_error

from derivations.arrays import Array
from derivations.composition import Composite, gauss_newton
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Dense, Diagonal, DiagonalLift, Identity, Matrix, Zero, kron
from derivations.operation import Operation, Renamed, Total, Variable, size
from derivations.vecr import kron_derivative_left, kron_derivative_right, transpose_rule


@dataclass(frozen=True, eq=False)
class Cube:
    """X^{o3}."""

    X: Array

    @property
    def value(self):
        return self.X * self.X * self.X

    @property
    def arguments(self):
        return {"X": tuple(self.X.shape)}

    def jacobian(self, name: str) -> Matrix:
        return Diagonal(3 * self.X * self.X)

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        return DiagonalLift(size(self.X.shape)) @ Diagonal(6 * self.X)


@dataclass(frozen=True, eq=False)
class Times:
    """X W."""

    X: Array
    W: Array

    @property
    def value(self):
        return self.X @ self.W

    @property
    def arguments(self):
        return {"X": tuple(self.X.shape), "W": tuple(self.W.shape)}

    def jacobian(self, name: str) -> Matrix:
        left, right = Dense(self.X, "X"), Dense(self.W, "W")
        return kron(Identity(left.shape[0]), right.T) if name == "X" else kron(left, Identity(right.shape[1]))

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        (rows, inner), columns = self.X.shape, self.W.shape[1]
        if name_i == name_j:
            n = size(self.arguments[name_i])
            return Zero(rows * columns * n, n)
        if name_i == "W":
            return kron_derivative_left((rows, inner), Identity(columns))
        return kron_derivative_right(Identity(rows), (columns, inner)) @ transpose_rule(inner, columns)


def chain(X, V, W, tied=False):
    """((X V)^{o3} W + X)^{o3}, in which V may stand twice."""
    first = Renamed(Times(X, V), {"W": "V"})
    cubed = Composite(Cube(first.value), {"X": first})
    times = Times(cubed.value, W)
    second = Composite(Renamed(times, {"W": "V"}) if tied else times, {"X": cubed})
    residual = Total(Variable("X", X), second)
    return Composite(Cube(residual.value), {"X": residual})


def test_depth_four_with_a_residual_branch():
    point = random_point(0, X=(3, 2), V=(2, 4), W=(4, 2))
    operation = chain(**point)
    assert isinstance(operation, Operation)
    check_all_blocks(operation, lambda X, V, W: ((X @ V) ** 3 @ W + X) ** 3, point)


def test_a_name_used_twice_is_one_parameter():
    point = random_point(1, X=(3, 2), V=(2, 2))
    operation = chain(point["X"], point["V"], point["V"], tied=True)
    check_all_blocks(operation, lambda X, V: ((X @ V) ** 3 @ V + X) ** 3, point)


def test_gauss_newton_splits_the_hessian_of_a_loss():
    point = random_point(4, X=(3, 2), V=(2, 4), W=(4, 2))
    target = torch.ones(3, 2, dtype=torch.float64)
    model = chain(**point)
    loss = MeanSquaredErrorAt(model.value, target)

    _, expected = derivatives(lambda X, V, W: (((X @ V) ** 3 @ W + X) ** 3 - target).square().mean(), point)
    J = torch.cat([model.jacobian(name).dense() for name in point], 1)
    blocks = {(i, j): gauss_newton(loss, model, i, j) for i, j in expected}
    seen = assembled({pair: split.total.dense() for pair, split in blocks.items()}, point)
    outer = assembled({pair: split.outer.dense() for pair, split in blocks.items()}, point)
    assert relative_error(seen, assembled(expected, point)) <= 1e-12
    assert relative_error(outer, J.T @ J * 2 / 6) <= 1e-12
    assert float((seen - outer).abs().max()) > 1.0  # the functional part is there


def test_errors_say_what_does_not_fit():
    point = random_point(6, X=(3, 2), W=(2, 4))
    times = Times(**point)
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), the operation put in for it \(3, 4\)"):
        Composite(Times(**point), {"X": times})
    with pytest.raises(ValueError, match="Build the outer operation at that operation's"):
        Composite(Cube(times.value + 1), {"X": times})
    with pytest.raises(ValueError, match="argument 'X' occurs with shapes"):
        Composite(
            Times(times.value, torch.ones(4, 4)),
            {"X": Renamed(times, {"X": "Y", "W": "X"}), "W": Variable("X", torch.ones(4, 4))},
        )
    with pytest.raises(ValueError, match="no argument is called 'Z'"):
        Composite(times, {"Z": times})
    with pytest.raises(ValueError, match="no argument is called 'Z'"):
        Composite(times, {}).jacobian("Z")
    with pytest.raises(ValueError, match="one name"):
        Renamed(times, {"X": "W"})
    with pytest.raises(ValueError, match="one output shape"):
        Total(times, Cube(point["X"]))
    with pytest.raises(ValueError, match="scalar loss of one argument"):
        gauss_newton(times, times, "X", "W")
