"""The chain rule to second order: small operations with known derivatives, then two whole blocks, against autograd."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from second_order_reference import assembled, check_all_blocks, derivatives, random_point, relative_error
from transformer_reference import attention, post_norm_block

from derivations.arrays import Array
from derivations.composition import Composite, gauss_newton
from derivations.feedforward import FeedForwardAt
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Dense, Diagonal, DiagonalLift, Identity, Matrix, Zero, kron
from derivations.multihead import MultiHeadAttentionAt
from derivations.normalization import LayerNormAt
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


class Untouchable:
    """An operation that must not be differentiated."""

    value = torch.ones(3, 2, dtype=torch.float64)
    arguments = {"V": (3, 2)}  # noqa: RUF012

    def jacobian(self, name: str) -> Matrix:
        raise AssertionError(f"jacobian({name}) was asked for")

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        raise AssertionError(f"hessian({name_i}, {name_j}) was asked for")


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


def test_two_inner_operations_for_two_arguments():
    point = random_point(2, X=(3, 2), W=(2, 4))
    X, W = point["X"], point["W"]
    inner = {"X": Cube(X), "W": Renamed(Cube(W), {"X": "W"})}
    check_all_blocks(Composite(Times(X**3, W**3), inner), lambda X, W: X**3 @ W**3, point)


def test_what_vanishes_is_not_computed():
    point = random_point(3, X=(3, 2), W=(2, 2))
    both = Total(Times(**point), Untouchable())
    assert isinstance(both.hessian("V", "W"), Zero)
    assert relative_error(both.jacobian("X").dense(), Times(**point).jacobian("X").dense()) == 0.0
    composite = Composite(Times(both.value, point["W"]), {"X": both})
    assert isinstance(Composite(Times(**point), {}).hessian("W", "W"), Zero)
    assert composite.hessian("X", "X").shape == (36, 6)


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


def two_blocks(point, mask, eps):
    """Two stacked post-norm blocks with two heads each, and a linear head, made of chapters by composition alone."""
    out: Operation = Variable("X", point["X"])
    for layer in ("0.", "1."):
        p = {name.removeprefix(layer): value for name, value in point.items() if name.startswith(layer)}
        heads = [{name: p[f"{name}[{h}]"] for name in ("W_Q", "W_K", "W_V", "W_O")} for h in range(2)]
        out = then(out, "X", Total(Variable("X", out.value), MultiHeadAttentionAt(out.value, heads, mask)), layer)
        out = then(out, "X", LayerNormAt(out.value, p["gamma_1"], p["beta_1"], eps), layer, gamma="gamma_1", beta="beta_1")
        ffn = FeedForwardAt(out.value, *(p[name] for name in ("W_1", "W_2", "b_1", "b_2")), activation="gelu")
        out = then(out, "Y", ffn, layer)
        out = then(out, "X", LayerNormAt(out.value, p["gamma_2"], p["beta_2"], eps), layer, gamma="gamma_2", beta="beta_2")
    return Composite(Renamed(Times(out.value, point["head"]), {"W": "head"}), {"X": out})


def then(inner, argument, outer, prefix, **names):
    """Put ``inner`` in for one argument of ``outer``, whose other arguments get the layer's prefix."""
    renamed = {name: prefix + names.get(name, name) for name in outer.arguments if name != argument}
    return Composite(Renamed(outer, renamed), {argument: inner})


@pytest.mark.slow
def test_two_blocks_with_heads_mask_gelu_biases_and_cross_entropy_end_to_end():
    L, d, d_ff, classes, eps = 2, 4, 3, 3, 0.1
    shapes = {"gamma_1": (d,), "beta_1": (d,), "W_1": (d, d_ff), "W_2": (d_ff, d), "b_1": (d_ff,), "b_2": (d,)}
    shapes |= {"gamma_2": (d,), "beta_2": (d,)}
    shapes |= {f"{name}[{h}]": (1, d) if name == "W_O" else (d, 1) for name in ("W_Q", "W_K", "W_V", "W_O") for h in (0, 1)}
    point = random_point(
        5, X=(L, d), head=(d, classes), **{layer + name: s for layer in ("0.", "1.") for name, s in shapes.items()}
    )
    labels = torch.tensor([2, 0])
    model = two_blocks(point, torch.ones(L, L, dtype=torch.bool).tril(), eps)
    loss = CrossEntropyAt(model.value, labels)
    parameters = [name for name in point if name != "X"]

    def heads(X, causal, **weights):
        return sum(attention(X, **{n[:3]: W for n, W in weights.items() if n.endswith(f"[{h}]")}, causal=causal) for h in (0, 1))

    block = post_norm_block("gelu", causal=True, eps=(eps, eps), attend=heads)

    def whole(**p):
        Z = point["X"]
        for layer in ("0.", "1."):
            Z = block(Z, **{name.removeprefix(layer): value for name, value in p.items() if name.startswith(layer)})
        return torch.nn.functional.cross_entropy(Z @ p["head"], labels)

    _, expected = derivatives(whole, {name: point[name] for name in parameters})
    for k, i in enumerate(parameters):
        largest = max(float(expected[i, j].abs().max()) for j in parameters)
        for j in parameters[k::3]:  # of all kinds, within a layer and across the two
            seen = gauss_newton(loss, model, i, j).total.dense()
            assert float((seen - expected[i, j]).abs().max()) <= 1e-10 * largest, (i, j)


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
