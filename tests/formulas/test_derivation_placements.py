"""Derived Jacobians, second derivatives and loss Hessians are those of autograd, for every placement; the post-norm block's is the theorem."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from curvature_reference import sample
from derivation_reference import assert_agree, expected_of, generic, run, sampled_block, values
from torch.nn import functional as F

from derivations.matrix import Named, definitions
from derivations.stage import leaf
from derivations.transformer import PostNormBlockAt
from hessiankit import TransformerBlock, derive, hessian
from hessiankit.blocks import PLACEMENTS
from hessiankit.formulas.block_at import BlockAt, block_stage
from hessiankit.formulas.symbols import symbol_of


def check(block, names, length=2):
    X = torch.randn(length, block.d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    point = values(block, X)
    for wrt in (names[:1], names):
        derivation = derive(block, wrt=wrt, inputs=X)
        dense = derivation.dense()
        assert_agree(dense, expected_of(lambda changed: run(block, point, changed), point, *wrt))
        assert derivation.shape == dense.shape
        assert derivation.norm_bound() >= torch.linalg.matrix_norm(dense, 2) * (1 - 1e-12)
    return dense


@pytest.mark.slow
@pytest.mark.parametrize("placement", sample(PLACEMENTS, 4))
def test_placement(placement):
    block = sampled_block(placement)
    chance = random.Random(placement)
    names = [*(name for name, _ in block.named_parameters()), "X"]
    check(block, (chance.choice(names), chance.choice(names)))
    check(block, ("attention.W_Q", "attention.W_V"))


@pytest.mark.parametrize(("heads", "scope"), [((2, 2), "head"), ((4, 2), "full"), ((4, 1), "head")])
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


LOSSES = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}
PAIRS = [("attention.W_Q", "attention.W_V"), ("feedforward.W_1", "feedforward.W_2"), ("norm_2.weight", "attention.W_K")]


@pytest.fixture(params=LOSSES)
def case(request):
    torch.manual_seed(0)
    block = generic(TransformerBlock(4, 3, 2, "sandwich", activation="gelu", causal=True).double())
    X = torch.randn(3, 4, dtype=torch.float64)
    target = torch.randn(3, 4, dtype=torch.float64) if request.param == "mse" else torch.tensor([3, 0, 0])
    return block, X, target, request.param


def test_against_the_hessian_and_autograd(case):
    block, X, target, loss = case
    H, point = hessian(block, X, target, loss=loss), values(block, X)

    def value(changed):
        return LOSSES[loss](run(block, point, changed), target)

    for names in (*PAIRS, *((name,) for name, _ in block.named_parameters())):
        found = derive(block, wrt=names, inputs=X, target=target, loss=loss)
        assert_agree(found.dense(), expected_of(value, point, *names))
        if len(names) == 2:
            assert_agree(found.dense(), H.block(*names))
            assert found.norm_bound() >= torch.linalg.matrix_norm(found.dense(), 2)


SHORT = {
    "X": "X", "attention.W_Q": "Q", "attention.W_K": "K", "attention.W_V": "V", "attention.W_O": "O", "norm_1.weight": "gamma_1",
    "norm_1.bias": "beta_1", "feedforward.W_1": "1", "feedforward.b_1": "b_1", "feedforward.W_2": "2", "feedforward.b_2": "b_2",
    "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2",
}  # fmt: skip


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return generic(TransformerBlock(4, 3, activation="gelu", bias=True, d_k=2, d_v=3, output_projection=True).double())


@pytest.fixture(scope="module")
def point(block):
    letters = {"norm_1.weight": "gamma_1", "norm_1.bias": "beta_1", "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2"}
    given = {letters.get(name, name.split(".")[-1]): p.detach() for name, p in block.named_parameters()}
    X = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return PostNormBlockAt(X, **given, activation="gelu", eps=block.norm_1.eps)


def test_every_pair_and_every_jacobian_is_the_theorem(block, point):
    Z = block_stage(BlockAt(block, {name: p.detach() for name, p in block.named_parameters()}), leaf("X", point.X))
    symbols = {name: name if name == "X" else symbol_of(name) for name in SHORT}
    for (i, short_i), (j, short_j) in itertools.product(SHORT.items(), repeat=2):
        found, expected = Z.hessian(symbols[i], symbols[j]).dense(), point.H_tr(short_i, short_j).dense()
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max().clamp_min(1.0), (i, j)
    for i, short in SHORT.items():
        found, expected = derive(block, wrt=i, inputs=point.X).dense(), point.jacobian(short).dense()
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max(), i


def test_the_printed_theorem():
    story = derive(TransformerBlock(4, 5), wrt=("query", "value")).story
    lines = {line.symbol: line.formula for line in story.lines}
    assert lines[r"\frac{\partial^2 Z}{\partial W_Q\,\partial W_V}"] == (
        r"\left(J_{Z}\otimes I_{dd_K}\right)\,\xi_{Q,V}+\left(I_{Ld}\otimes B_{Q}^\top\right)\,H_{Z}\,B_{V}"
    )
    assert lines["B_{Q}"] == r"J_{S Y}\,J_{Y}\,G_{Q}"
    assert lines["B_{V}"] == r"J_{S Y}\,J_{Y}\,G_{V}"
    assert lines["J_{S Y}"] == r"I_{Ld}+J_{M Y}"
    assert lines["G_{V}"] == r"A\,X\otimes I_{d}"
    assert lines[r"\xi_{Q,V}"] == r"\left(J_{S Y}\otimes I_{dd_K}\right)\,Y_{Q,V}"
    assert lines["Y_{Q,V}"] == (
        r"\left(J_{Y}\otimes I_{dd_K}\right)\,\Phi_{Q,V}+\left(I_{Ld}\otimes G_{Q}^\top\right)\,H_{Y}\,G_{V}"
    )
    gain = r"\operatorname{diag}(\rho_{Z}^{-1})\otimes \operatorname{diag}(\gamma_2)"
    assert lines["J_{Z}"] == rf"\left({gain}\right)\,\left(I_{{L}}\otimes C_{{d}}-\frac{{1}}{{d}}\,V_{{Z}}\,V_{{Z}}^\top\right)"


def test_a_smooth_activation_adds_the_curvature_of_the_network():
    """The last term of xi_kl vanishes for ReLU only."""
    relu, gelu = (
        {line.symbol: line.formula for line in derive(TransformerBlock(4, 5, activation=name)).story.lines}
        for name in ("relu", "gelu")
    )
    assert r"H_{M,Y Y}" not in relu[r"\xi_{Q,V}"]
    assert (
        gelu[r"\xi_{Q,V}"] == relu[r"\xi_{Q,V}"] + r"+\left(I_{Ld}\otimes G_{Q}^\top\,J_{Y}^\top\right)\,H_{M,Y Y}\,J_{Y}\,G_{V}"
    )
