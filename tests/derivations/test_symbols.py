"""Symbols with one more index, and letters from a caller and from the context together."""

import pytest
import torch

from derivations.head_products import HeadProductAt
from derivations.matrix import letters
from derivations.symbols import expect_symbols, with_index


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("K", "K_h"),
        ("W_Q", "W_{Q,h}"),
        ("K_{rot}", "K_{rot,h}"),
        (r"\Gamma", r"\Gamma_h"),
        (r"\Gamma_1", r"\Gamma_{1,h}"),
        (r"\hat K", r"\left(\hat K\right)_h"),
        ("XW_Q", r"\left(XW_Q\right)_h"),
        ("K'", r"\left(K'\right)_h"),
    ],
)
def test_with_index(symbol, expected):
    assert with_index(symbol, "h") == expected


def test_unknown_names_are_refused():
    expect_symbols("Who", {"X": "Y"}, {"X": (2, 3)})
    with pytest.raises(ValueError, match=r"Who: symbols names 'Y', which is no argument\. The arguments are X\."):
        expect_symbols("Who", {"Y": "X"}, {"X": (2, 3)})


def test_letters_of_the_context_are_indexed_too():
    product = HeadProductAt(torch.ones(2, 3), torch.ones(2, 3), 2, "scores", 1)
    with letters({"P": "Q", "R": "K"}):
        found = product.jacobian("P").latex(), product.jacobian("R").latex()
    assert found == (r"\operatorname{blockdiag}_h(K_h)", r"\operatorname{blockdiag}_h(Q_h)")
