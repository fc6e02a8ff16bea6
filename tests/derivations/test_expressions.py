"""What a matrix expression prints and bounds: names, the tree of inequalities, letters; and its two arithmetics, which do not mix."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch

from derivations import arrays
from derivations.arrays import Array
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


# Exact and floating-point arrays --------------------------------------------------------------------------------------

F64 = torch.float64
EXACT = np.array([[1, Fraction(9, 4)], [4, 16]], dtype=object)
FLOATS = torch.tensor([[1.0, 2.25], [4.0, 16.0]], dtype=F64)
SYMBOL = sympy.Symbol("x", positive=True)


def as_floats(x: Array) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in x.tolist()], dtype=F64)


class TestAsArray:
    def test_what_is_kept(self) -> None:
        assert arrays.as_array(FLOATS) is FLOATS
        assert arrays.as_array(EXACT).tolist() == EXACT.tolist()
        assert arrays.as_array(np.ones(2, dtype=np.float32)).dtype == torch.float32

    def test_lists(self) -> None:
        assert arrays.as_array([[1, SYMBOL]]).dtype == object
        assert arrays.as_array([1, 2]).tolist() == [1, 2]
        assert arrays.as_array([1, 2.5]).dtype == torch.float64
        assert arrays.as_array([1, 2.5j]).dtype == torch.complex128

    @pytest.mark.parametrize(
        "value", [[Fraction(1, 2), 0.5], [SYMBOL, 1.0], np.array([1, 0.5], dtype=object)], ids=["Fraction", "symbol", "objects"]
    )
    def test_floats_among_exact_numbers(self, value: object) -> None:
        with pytest.raises(TypeError, match="floats stand among exact numbers"):
            arrays.as_array(value)


class TestFunctions:
    """Each function on exact numbers is exact, and agrees with torch."""

    @pytest.mark.parametrize("name", ["sqrt", "exp", "reciprocal"])
    def test_entrywise(self, name: str) -> None:
        function = getattr(arrays, name)
        assert torch.allclose(as_floats(function(EXACT)), function(FLOATS), rtol=1e-15, atol=0)
        assert not any(isinstance(v, float) for v in function(EXACT).reshape(-1))

    def test_other_roots_are_symbolic(self) -> None:
        root = arrays.sqrt(np.array([Fraction(1, 2), SYMBOL**2, -1], dtype=object)).tolist()
        assert root == [1 / sympy.sqrt(2), SYMBOL, sympy.I]


@pytest.mark.parametrize("c", [0.5, 1j, torch.tensor(2.0)], ids=str)
def test_exact_numbers_stay_exact(c: object) -> None:
    with pytest.raises(TypeError, match="Fraction"):
        arrays.scale(c, EXACT)
    with pytest.raises(TypeError, match="Substitute"):
        arrays.to_float(np.array([SYMBOL], dtype=object))


class TestCommon:
    @pytest.mark.parametrize(
        ("a", "b"), [(torch.float32, torch.float64), (torch.float64, torch.complex64), (torch.float16, torch.bfloat16)], ids=str
    )
    def test_precisions_stay_apart(self, a: torch.dtype, b: torch.dtype) -> None:
        with pytest.raises(TypeError, match="precision"):
            arrays.common(torch.ones(1, dtype=a), torch.ones(1, dtype=b))


def test_exact_products_equal_numpy_and_leave_zeros_alone() -> None:
    a = np.array([[0, Fraction(1, 2), 0], [2, 0, sympy.Symbol("x")]], dtype=object)
    b = np.array([[1, 0], [0, 4], [0, Fraction(1, 3)]], dtype=object)
    product = arrays.matmul(a, b)
    assert product.tolist() == (a @ b).tolist() == [[0, 2], [2, sympy.Symbol("x") / 3]]
    assert type(product[0, 0]) is int
    assert arrays.matmul(a[:, :0], b[:0]).tolist() == [[0, 0], [0, 0]]
