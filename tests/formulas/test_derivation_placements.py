"""Every placement: the derived Jacobian and second derivative are those of autograd, and the bound holds."""

from __future__ import annotations

import random

import pytest
import torch
from curvature_reference import sample
from derivation_reference import assert_agree, generic, jacobian, run, sampled_block, scalar_hessian, values

from derivations.matrix import Named, definitions
from hessiankit import TransformerBlock, derive
from hessiankit.blocks import PLACEMENTS


def check(block, names, length=2):
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(length, block.d_model, generator=generator, dtype=torch.float64)
    u = torch.randn(X.shape, generator=generator, dtype=torch.float64)
    first, second = derive(block, wrt=names[0], inputs=X), derive(block, wrt=names, inputs=X)
    point = values(block, X)
    n_i = point[names[0]].numel()
    slope, curvature = first.dense(), second.dense()
    assert_agree(slope, jacobian(block, X, names[0]))
    expected = scalar_hessian(lambda changed: (u * run(block, point, changed)).sum(), point, *names)
    contracted = (u.reshape(-1, 1, 1) * curvature.reshape(u.numel(), n_i, -1)).sum(0)
    assert_agree(contracted, expected)
    for derivation, dense in ((first, slope), (second, curvature)):
        assert derivation.shape == dense.shape
        assert derivation.norm_bound() >= torch.linalg.matrix_norm(dense, 2) * (1 - 1e-12)
    return curvature


@pytest.mark.slow
@pytest.mark.parametrize("placement", sample(PLACEMENTS, 4))
def test_placement(placement):
    block = sampled_block(placement)
    chance = random.Random(placement)
    names = [*(name for name, _ in block.named_parameters()), "X"]
    check(block, (chance.choice(names), chance.choice(names)))
    check(block, ("attention.W_Q", "attention.W_V"))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("scope", ["head", "full"])
def test_heads_with_everything(heads, scope):
    torch.manual_seed(sum(heads))
    block = TransformerBlock(
        4, 3, heads[0], "pre-qkvc-post", "rmsnorm", "swiglu", True, n_kv_heads=heads[1], d_k=2, d_v=3, attention_bias=True,
        output_projection=True, causal=True, rotary=True, norm_scope=scope,
    ).double()  # fmt: skip
    generic(block)
    for names in (("attention.W_K", "attention.W_Q"), ("attention.norm_q.weight", "feedforward.W_G")):
        assert check(block, names, length=3).abs().max() > 1e-6


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "leaky_relu", "identity", "swiglu"])
def test_activations_and_norms(activation, norm):
    torch.manual_seed(1)
    block = generic(TransformerBlock(4, 3, norm=norm, activation=activation, bias=True, placement="sandwich").double())
    check(block, ("feedforward.W_1", "feedforward.b_1"))


def test_a_norm_without_eps_has_that_of_its_type():
    block = TransformerBlock(4, 3, norm="rmsnorm", activation="gelu").double()
    block.norm_2 = torch.nn.RMSNorm(4, dtype=torch.float64)  # eps=None
    check(generic(block), ("feedforward.W_1", "norm_2.weight"))


def test_a_number_times_a_branch_of_one_feature():
    check(generic(TransformerBlock(1, 2, placement="skipinit", norm="rmsnorm", activation="tanh").double()), ("lambda_2", "X"))


def test_a_placement_of_ones_own():
    from hessiankit.blocks import register
    from hessiankit.blocks.placements import Placement

    def half(b, X):
        """Half of each branch."""
        Y = X + 0.5 * b.attention(b.norm_1(X))
        return Y + 0.5 * b.feedforward(b.norm_2(Y))

    name = "half-of-each-branch"
    register(Placement(name, half, "half", "a test"))
    try:
        block = generic(TransformerBlock(4, 3, placement=name).double())
        check(block, ("attention.W_V", "feedforward.W_2"))
        assert r"\bar{F} &= 0.5\,F" in derive(block).latex()
    finally:
        del PLACEMENTS[name]


def test_the_bound_says_how_it_comes_about():
    torch.manual_seed(0)
    found = derive(TransformerBlock(4, 5, placement="hybridnorm").double(), wrt=("query", "value"))
    lines = found.inequalities()
    assert lines[0].bound == found.norm_bound() >= float(torch.linalg.matrix_norm(found.dense(), 2))
    top = found.matrix.matrix if isinstance(found.matrix, Named) else found.matrix
    for named, line in zip(definitions(top), lines[1:], strict=True):
        assert line.symbol == named.symbol
        assert line.bound >= float(torch.linalg.matrix_norm(named.matrix.dense(), 2)) * (1 - 1e-12)
    assert found.explain_bound().startswith("‖∂²Z/(∂W_Q ∂W_V)‖ ≤")
