"""The two arithmetics do the same, and neither turns silently into the other."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch

from derivations import arrays
from derivations.arrays import Array

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
