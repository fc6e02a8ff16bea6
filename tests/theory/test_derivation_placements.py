"""Derived Jacobians, second derivatives and loss Hessians are those of autograd for every placement, in numbers and symbols."""

from __future__ import annotations

import inspect
import random

import pytest
import sympy
import torch
from curvature_reference import sample
from derivation_reference import assert_agree, expected_of, generic, run, sampled_block, values
from torch.nn import functional as F

from derivations.matrix import Named, definitions
from hessiankit import InputError, TransformerBlock, derive, hessian
from hessiankit.blocks import ACTIVATIONS, GATED, PLACEMENTS
from hessiankit.theory.formulas.code import identifier
from hessiankit.theory.formulas.symbols import spelling, symbol_of


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


def assert_numbers(block, X, derivation, target=None):
    """Put the block's numbers in for the symbols, by SymPy and by the function of the list."""
    arrays = {identifier(symbol_of(name)): p.detach() for name, p in block.named_parameters()} | {"X": X}
    arrays |= {} if target is None else {"Target": target}
    function = derivation.function("torch")
    found = function(**{name: arrays[name] for name in inspect.signature(function).parameters if name in arrays})
    assert_agree(found, derivation.dense())
    listed = derivation.sympy()
    numbers = {
        symbol: value
        for letter, symbols in listed.inputs.items()
        for symbol, value in zip(symbols, arrays[identifier(letter)].reshape(-1).tolist(), strict=True)
    }
    assert_agree(torch.tensor(listed.evalf(subs=numbers).tolist(), dtype=torch.float64), derivation.dense())


CASES = [
    ("post", ("query", "value"), {"activation": "identity"}, None, 1),
    ("pre", ("up", "down"), {"activation": "identity", "norm": "rmsnorm"}, None, 1),
    ("deepnorm", ("value", "key"), {"activation": "identity", "affine": False}, None, 2),
    ("lns", ("value",), {"activation": "identity", "norm": "rmsnorm"}, None, 2),
    ("hybridnorm", ("down",), {"activation": "identity"}, "mse", 2),
    (
        "lns-only-ffn",
        ("value",),
        {"activation": "identity", "norm": "rmsnorm", "affine": False, "rotary": True, "d_k": 4},
        None,
        2,
    ),
]


@pytest.mark.parametrize(("placement", "names", "options", "loss", "length"), CASES, ids=[case[0] for case in CASES])
def test_numbers_for_symbols(placement, names, options, loss, length):
    torch.manual_seed(0)
    block = TransformerBlock(2, 1, placement=placement, layer=2, n_layers=3, **{"d_k": 1} | options).double()
    X, T = torch.randn(length, 2, dtype=torch.float64), torch.randn(length, 2, dtype=torch.float64)
    target = T if loss else None
    assert_numbers(block, X, derive(block, wrt=names, inputs=X, loss=loss, target=target), target)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_numbers_for_symbols_on_both_sides_of_a_kink(activation):
    torch.manual_seed(0)
    block = generic(TransformerBlock(2, 1, placement="post", norm="rmsnorm", activation=activation, d_k=1).double())
    X, sides = torch.tensor([[1.0, 0.3], [-1.2, 0.4]], dtype=torch.float64), set()
    block.feedforward.register_forward_hook(lambda m, inputs, _: sides.update((inputs[0] @ m.W_1 > 0).flatten().tolist()))
    block(X)
    assert sides == {True, False}
    for names in (("up",), ("up", "up"), ("up", "down")):
        assert_numbers(block, X, derive(block, wrt=names, inputs=X))


@pytest.mark.slow
@pytest.mark.parametrize("placement", sample(PLACEMENTS, 4))
def test_the_function_of_a_placement(placement):
    chance = random.Random(placement)
    torch.manual_seed(chance.randrange(1000))
    heads, kv_heads = chance.choice([(1, 1), (2, 1), (2, 2)])
    options = {name: chance.random() < 0.5 for name in ("bias", "attention_bias", "causal", "rotary")}
    activation = chance.choice(["relu", "gelu", "swiglu", "leaky_relu"])
    block = generic(
        TransformerBlock(
            2, 1, heads, placement, "rmsnorm", activation, n_kv_heads=kv_heads, d_k=2, layer=2, n_layers=3, **options
        ).double()
    )
    names, loss = [name for name, _ in block.named_parameters()], chance.choice([None, "mse"])
    X, T = torch.randn(2, 2).double(), torch.randn(2, 2).double()
    target = None if loss is None else T
    found = derive(block, wrt=(chance.choice(names), chance.choice(names)), inputs=X, loss=loss, target=target)
    assert_numbers(block, X, found, target)


@pytest.mark.parametrize("options", [{"placement": "lns", "layer": 4}, {"placement": "lns", "layer": 7}])
def test_the_letter_of_a_factor_has_its_value(options):
    block = TransformerBlock(2, 1, **options)
    letter, (name, value) = spelling(block)
    assert float(letter.subs(sympy.Symbol(name, positive=True), int(value))) == pytest.approx(block.factor)


def test_too_many_entries_are_refused():
    with pytest.raises(InputError, match=r"1536 x 64 is 98304 symbolic entries, more than 20000; derive a smaller block"):
        derive(TransformerBlock(8, 5)).sympy()
