"""Symbols for every entry: with numbers put in, the SymPy matrix is the matrix of numbers."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

from hessiankit import InputError, TransformerBlock, derive
from hessiankit.formulas.symbols import spelling, symbol_of


def put_in(block, X, matrix, target=None):
    """Replace every symbol by its number."""
    arrays = {symbol_of(name): p.detach() for name, p in block.named_parameters()} | {"X": X}
    if target is not None:
        arrays["T"] = target
    numbers = {}
    for letter, array in arrays.items():
        for index in torch.cartesian_prod(*(torch.arange(n) for n in array.shape)).reshape(-1, array.ndim).tolist():
            name = ",".join(str(k + 1) for k in index)
            mark = "^" if "_" in letter else "_"
            numbers[f"{letter}{mark}{{{name}}}"] = float(array[tuple(index)])
    factor = spelling(block)
    if factor is not None:
        (letter,) = factor[0].free_symbols
        numbers[letter.name] = float(sympy.solve(factor[0] - block.factor, letter)[0])
    known: dict[int, float] = {}
    return torch.tensor([[number(entry, numbers, known) for entry in row] for row in matrix.tolist()], dtype=torch.float64)


def number(expression, numbers, known):
    """Evaluate an expression, each part once: SymPy's own functions walk shared parts again and again."""
    if id(expression) not in known:
        if expression.args:
            found = OPERATIONS[expression.func]([number(part, numbers, known) for part in expression.args])
        else:
            found = numbers[expression.name] if expression.is_Symbol else float(expression)
        known[id(expression)] = found
    return known[id(expression)]


OPERATIONS = {
    sympy.Add: math.fsum,
    sympy.Mul: math.prod,
    sympy.Pow: lambda arguments: arguments[0] ** arguments[1],
    sympy.exp: lambda arguments: math.exp(arguments[0]),
    sympy.cos: lambda arguments: math.cos(arguments[0]),
    sympy.sin: lambda arguments: math.sin(arguments[0]),
}


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
    derivation = derive(block, wrt=names, inputs=X, loss=loss, target=T if loss else None)
    found, expected = put_in(block, X, derivation.sympy(), T if loss else None), derivation.dense()
    is_equal = found.shape == expected.shape and bool(
        torch.allclose(found, expected, rtol=0, atol=1e-10 * max(float(expected.abs().max()), 1e-3))
    )
    assert is_equal  # a bool: pytest would print the symbolic entries


@pytest.mark.parametrize("options", [{"placement": "lns", "layer": 4}, {"placement": "lns", "layer": 7}])
def test_the_letter_of_a_factor_has_its_value(options):
    block = TransformerBlock(2, 1, **options)
    letter, (name, value) = spelling(block)
    assert float(letter.subs(sympy.Symbol(name, positive=True), int(value))) == pytest.approx(block.factor)


def test_too_many_entries_are_refused():
    with pytest.raises(InputError, match=r"144 x 16 is 2304 symbolic entries, more than 2000; derive a smaller block"):
        derive(TransformerBlock(4, 5, d_k=3)).sympy()
