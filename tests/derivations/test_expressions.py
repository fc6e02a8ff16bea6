"""Named expressions, the tree of inequalities, and letters: what a matrix expression prints and bounds."""

from __future__ import annotations

import pytest
import torch

from derivations.gains import ColumnScaleAt
from derivations.matrix import (
    BlockDiagonal,
    Commutation,
    Dense,
    Identity,
    Matrix,
    Named,
    definitions,
    inequalities,
    kron,
    letters,
)
from derivations.matrix.letters import with_index
from derivations.operation import Lettered

J = Named("J", Dense(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64), "M"), "given")


def test_one_name_for_two_things_is_refused():
    other = Named("J", Dense(torch.ones(2, 3, dtype=torch.float64), "N"))
    with pytest.raises(ValueError, match=r"definitions: J stands for .*M.* and for .*N"):
        definitions(J + other)
    same = Named("J", Dense(torch.ones(2, 3, dtype=torch.float64), "M"))
    assert len(definitions(J + same)) == 1  # printed alike


def dense(m: int, n: int, symbol: str, seed: int) -> Matrix:
    return Dense(torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), symbol)


A, B, C = dense(3, 4, "A", 0), dense(4, 3, "B", 1), dense(3, 3, "C", 2)


@pytest.mark.parametrize(
    ("matrix", "rule", "bound"),
    [
        (A @ B, r"\|A\|\,\|B\|", lambda a, b, c: a * b),
        (A @ B + C, r"\|A\|\,\|B\| + \|C\|", lambda a, b, c: a * b + c),
        (A @ B - 3 * C, r"\|A\|\,\|B\| + 3\cdot \|C\|", lambda a, b, c: a * b + 3 * c),
        (C @ (A @ B + C), r"\|C\|\,\left(\|A\|\,\|B\| + \|C\|\right)", lambda a, b, c: c * (a * b + c)),
        (kron(Identity(2), A) @ Commutation(2, 4), r"\|A\|", lambda a, b, c: a),
        (kron(A, C.T), r"\|A\|\,\|C\|", lambda a, b, c: a * c),
        (BlockDiagonal([C, 2 * C]), r"\max_h \|C\|", lambda a, b, c: 2 * c),
        (Commutation(2, 3), "1", lambda a, b, c: 1.0),
    ],
)
def test_rules(matrix, rule, bound):
    (line,) = inequalities(matrix, "M")
    assert line.rule == rule
    norms = [float(torch.linalg.matrix_norm(X.dense(), 2)) for X in (A, B, C)]
    assert line.bound == pytest.approx(bound(*norms))
    assert line.bound >= float(torch.linalg.matrix_norm(matrix.dense(), 2)) * (1 - 1e-12)


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


def test_inner_letters_are_read_in_the_outer_ones():
    gain = Lettered(ColumnScaleAt(torch.ones(1, 2), torch.ones(2)), {"v": r"\gamma"})
    assert gain.jacobian("X").latex() == r"\operatorname{diag}(\gamma)"
    with letters({r"\gamma": r"\gamma_1", "v": "u"}):
        assert gain.jacobian("X").latex() == r"\operatorname{diag}(\gamma_1)"
        assert Dense(torch.ones(1, 1), "v").latex() == "u"
    assert Dense(torch.ones(1, 1), "v").latex() == "v"
