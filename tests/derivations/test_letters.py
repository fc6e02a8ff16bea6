"""Letters from a caller, inside each other, and with an index for the head."""

import pytest
import torch

from derivations.gains import ColumnScaleAt
from derivations.head_products import HeadProductAt
from derivations.matrix import Dense, in_letters, letters
from derivations.matrix.letters import with_index
from derivations.operation import Lettered
from derivations.rotary import rotary
from derivations.selection import Selection


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("K", "K_h"),
        ("K'", "K'_h"),
        ("W_Q", "W_{Q,h}"),
        ("K_{rot}", "K_{rot,h}"),
        ("K^{(2)}", "K_h^{(2)}"),
        (r"\Gamma", r"\Gamma_h"),
        (r"\Gamma_1", r"\Gamma_{1,h}"),
        (r"\tilde{K}", r"\tilde{K}_h"),
        (r"\tilde{K}^{(2)}", r"\tilde{K}_h^{(2)}"),
        ("XW_Q", r"\left(XW_Q\right)_h"),
        ("X+Y", r"\left(X+Y\right)_h"),
    ],
)
def test_with_index(symbol, expected):
    assert with_index(symbol, "h") == expected


def test_a_letter_without_a_name_of_its_own_keeps_its_index():
    with letters({"P": r"\tilde{Q}^{(2)}", "P_0": "E"}):
        assert [in_letters(symbol) for symbol in ("P_h", "P_0", "Q_h", "P")] == [
            r"\tilde{Q}_h^{(2)}",
            "E",
            "Q_h",
            r"\tilde{Q}^{(2)}",
        ]


def test_heads_of_arguments_with_names():
    product = HeadProductAt(torch.ones(2, 3), torch.ones(2, 3), 2, "scores", 1)
    with letters({"P": "Q", "R": r"\hat{K}"}):
        found = product.jacobian("P").latex(), product.jacobian("R").latex()
    assert found == (r"\operatorname{blockdiag}_h(\hat{K}_h)", r"\operatorname{blockdiag}_h(Q_h)")
    assert product.jacobian("P").latex() == r"\operatorname{blockdiag}_h(R_h)"


def test_inner_letters_are_read_in_the_outer_ones():
    gain = Lettered(ColumnScaleAt(torch.ones(1, 2), torch.ones(2)), {"v": r"\gamma"})
    assert gain.jacobian("X").latex() == r"\operatorname{diag}(\gamma)"
    with letters({r"\gamma": r"\gamma_1", "v": "u"}):
        assert gain.jacobian("X").latex() == r"\operatorname{diag}(\gamma_1)"
        assert Dense(torch.ones(1, 1), "v").latex() == "u"
    assert Dense(torch.ones(1, 1), "v").latex() == "v"


def test_selections_and_rotations_have_letters_that_transposition_keeps():
    with letters({"P": "S", "R": r"\Theta"}):
        taken, turned = Selection([0], 2), rotary(2, 2)
        transposed = taken.T.latex(), turned.T.latex()
    assert (taken.latex(), turned.latex()) == ("S", r"\operatorname{blockdiag}_l(\Theta_l)")
    assert transposed == (r"S^\top", r"\operatorname{blockdiag}_l(\Theta_l^\top)") == (taken.T.latex(), turned.T.latex())
