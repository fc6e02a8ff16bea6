"""The feed-forward network in vec_r: every pair of arguments against reverse-over-reverse autograd, and exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from second_order_reference import random_point, relative_error
from transformer_reference import check_every_block, feedforward

from derivations.feedforward import FeedForwardAt
from derivations.matrix import Zero
from derivations.operation import Operation

SIZES = [(3, 4, 5), (4, 3, 2)]  # L, d_V, d_ff


def make_point(seed, L, d, d_ff, d_out=None, biases=("b_1", "b_2")):
    d_out = d if d_out is None else d_out
    point = random_point(seed, Y=(L, d), W_1=(d, d_ff), W_2=(d_ff, d_out), b_1=(d_ff,), b_2=(d_out,))
    return {name: value for name, value in point.items() if not name.startswith("b") or name in biases}


@pytest.mark.parametrize("biases", [(), ("b_1",), ("b_1", "b_2")])
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_block_against_autograd(sizes, kind, biases):
    point = make_point(0, *sizes, biases=biases)
    operation = FeedForwardAt(**point, activation=kind)
    assert isinstance(operation, Operation)
    check_every_block(operation, lambda **p: feedforward(**p, kind=kind), point)


def test_without_residual_the_output_may_have_another_width():
    point = make_point(1, 3, 4, 5, d_out=2)
    operation = FeedForwardAt(**point, activation="gelu", residual=False)
    check_every_block(operation, lambda **p: feedforward(**p, kind="gelu", residual=False), point)


def test_the_residual_adds_the_identity_to_one_jacobian_and_nothing_else():
    point = make_point(2, *SIZES[0])
    with_it, without = FeedForwardAt(**point, activation="silu"), FeedForwardAt(**point, activation="silu", residual=False)
    for i in point:
        difference = with_it.jacobian(i).dense() - without.jacobian(i).dense()
        assert torch.equal(difference.round(decimals=12), torch.eye(12, dtype=torch.float64) if i == "Y" else difference * 0)
        for j in point:
            assert torch.equal(with_it.hessian(i, j).dense(point["Y"]), without.hessian(i, j).dense(point["Y"]))


def test_relu_has_only_the_bilinear_second_derivatives():
    point = make_point(3, *SIZES[0])
    relu = FeedForwardAt(**point)
    for i in ("Y", "W_1", "b_1"):
        assert isinstance(relu.hessian(i, i), Zero)
    assert isinstance(relu.hessian("W_2", "W_2"), Zero)
    assert float(relu.hessian("Y", "W_1").dense().abs().max()) > 0
    assert float(relu.hessian("W_1", "W_2").dense().abs().max()) > 0
    assert not isinstance(FeedForwardAt(**point, activation="gelu").hessian("W_1", "W_1"), Zero)


def test_what_the_paper_prints_as_the_block_1_2_is_the_block_2_1():
    at = FeedForwardAt(**make_point(4, *SIZES[0], biases=()))
    assert at.hessian("W_2", "W_1").latex().startswith(r"\left(I_{3}\otimes K_{4,5}\otimes I_{4}\right)")
    assert at.hessian("W_1", "W_2").shape == at.hessian("W_2", "W_1").shape
    assert not torch.allclose(at.hessian("W_1", "W_2").dense(), at.hessian("W_2", "W_1").dense())


def test_exact_numbers_stay_exact():
    def rational(*shape, step):
        entries = [Fraction((5 * k + step) % 9 - 4, 1 + k % 2) for k in range(int(np.prod(shape)))]
        return np.array(entries, dtype=object).reshape(shape)

    shapes = {"Y": (2, 3), "W_1": (3, 2), "W_2": (2, 3), "b_1": (2,), "b_2": (3,)}
    point = {name: rational(*shape, step=step) for step, (name, shape) in enumerate(shapes.items(), start=1)}
    exact = FeedForwardAt(**point)
    floating = FeedForwardAt(**{name: torch.tensor(value.astype(float)) for name, value in point.items()})
    for i in point:
        for j in point:
            block = exact.hessian(i, j).dense(exact.Y)
            assert all(isinstance(entry, (int, Fraction)) for entry in block.reshape(-1))
            assert relative_error(torch.tensor(block.astype(float)), floating.hessian(i, j).dense(floating.Y)) <= 1e-14


def test_errors_name_the_argument_and_the_shapes():
    point = make_point(5, *SIZES[0])
    with pytest.raises(ValueError, match="no argument is called 'b_1'"):
        FeedForwardAt(**make_point(5, *SIZES[0], biases=())).hessian("b_1", "Y")
    with pytest.raises(ValueError, match="need to conform"):
        FeedForwardAt(**{**point, "W_1": point["W_1"].T})
    with pytest.raises(ValueError, match="need to conform"):
        FeedForwardAt(**make_point(5, 3, 4, 5, d_out=2))
    with pytest.raises(ValueError, match=r"b_1 needs shape \(5,\)"):
        FeedForwardAt(**{**point, "b_1": point["b_2"]})
