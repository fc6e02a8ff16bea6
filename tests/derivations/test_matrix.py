"""One suite for every node of a matrix expression, and for the sizes and arithmetics that trip one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from matrix_cases import CASES, F64, Case, exact, rational, tensor

from derivations.arrays import Array
from derivations.matrix import (
    BlockDiagonal,
    Commutation,
    Dense,
    Diagonal,
    DiagonalLift,
    DiagonalTake,
    Identity,
    Matrix,
    Ones,
    SliceTranspose,
    Vec,
    VecIdentity,
    Zero,
    kron,
)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestEveryNode:
    """What the base class promises."""

    def test_dense(self, case: Case) -> None:
        node = case.build(tensor)
        assert node.shape == tuple(case.reference().shape)
        assert torch.equal(node.dense(), case.reference())

    def test_transpose(self, case: Case) -> None:
        node = case.build(tensor)
        assert node.T.shape == node.shape[::-1]
        assert torch.equal(node.T.dense(), case.reference().T)
        assert torch.equal(node.T.T.dense(), case.reference())
        assert node.T.T.latex() == node.latex()

    def test_actions(self, case: Case) -> None:
        """On columns, a vector, rows, strides and no columns."""
        node, dense = case.build(tensor), case.reference()
        m, n = dense.shape
        y, wide = tensor("y", n, 3), tensor("wide", 4, 2 * n)
        assert torch.equal(node @ y, dense @ y)
        assert torch.equal(node @ y[:, 0], dense @ y[:, 0])
        assert torch.equal(node.T @ (node @ y), dense.T @ dense @ y)
        assert torch.equal(tensor("y", 3, m) @ node, tensor("y", 3, m) @ dense)
        assert torch.equal(node @ wide.T[::2], dense @ wide.T[::2])
        assert (case.build(exact) @ exact("wide", 4, 2 * n).T[::2] == (dense @ wide.T[::2]).numpy()).all()
        assert (node @ torch.zeros(n, 0, dtype=F64)).shape == (m, 0)
        assert torch.equal(torch.func.vmap(node.__matmul__)(y.T), y.T @ dense.T)

    def test_exact_arithmetic(self, case: Case) -> None:
        value = case.build(exact).dense(np.zeros(0, dtype=object))
        assert value.dtype == object
        assert all(isinstance(entry, (int, Fraction)) for entry in value.reshape(-1))
        assert (value == case.reference().numpy()).all()
        assert case.build(exact).sympy() == rational(case.reference())

    def test_symbols(self, case: Case) -> None:
        numbers: dict[sympy.Symbol, int] = {}

        def leaf(name: str, m: int, n: int) -> Array:
            letters = np.array(sympy.symarray(name, (m, n)).tolist(), dtype=object)
            numbers.update(zip(letters.flat, exact(name, m, n).flat, strict=True))
            return letters

        assert case.build(leaf).sympy().subs(numbers) == rational(case.reference())

    def test_norm_bound(self, case: Case) -> None:
        node, true = case.build(tensor), float(torch.linalg.matrix_norm(case.reference(), 2))
        assert node.norm_bound() >= true * (1 - 1e-14)
        assert node.T.norm_bound() == pytest.approx(node.norm_bound(), rel=1e-14)
        assert case.build(exact).norm_bound() == pytest.approx(node.norm_bound(), rel=1e-14)
        if case.sharp:
            assert node.norm_bound() == pytest.approx(true, rel=1e-13)

    def test_latex(self, case: Case) -> None:
        node = case.build(tensor)
        assert node.latex() == case.latex
        assert case.latex in repr(node)
        assert case.latex in node._repr_latex_()

    def test_wrong_sizes_are_refused(self, case: Case) -> None:
        node = case.build(tensor)
        with pytest.raises(ValueError, match="matmul"):
            node @ torch.zeros(node.shape[1] + 1, dtype=F64)
        with pytest.raises(ValueError, match="matmul"):
            node @ torch.zeros(node.shape[1], 1, 1, dtype=F64)
        with pytest.raises(ValueError, match="product"):
            node @ Identity(node.shape[1] + 1)
        with pytest.raises(ValueError, match="add"):
            node + Zero(node.shape[0], node.shape[1] + 1)


class TestEmpty:
    """Sizes of zero, as a block without features or a sum over nothing has them."""

    @pytest.mark.parametrize(
        "node",
        [
            Dense(torch.zeros(0, 3, dtype=F64)),
            Dense(np.zeros((3, 0), dtype=object)),
            Identity(0),
            Ones(0, 3),
            Ones(3, 0),
            Zero(0, 2),
            Diagonal(torch.zeros(0, dtype=F64)),
            BlockDiagonal([]),
            BlockDiagonal([Zero(0, 2), Identity(1)]),
            DiagonalLift(0),
            DiagonalTake(0),
            Commutation(0, 3),
            VecIdentity(0),
            Vec(Zero(0, 3)),
            SliceTranspose(Zero(4, 0), 2),
            kron(Ones(0, 2), Ones(3, 2)),
            kron(Dense(torch.zeros(2, 0, dtype=F64)), Dense(torch.zeros(0, 2, dtype=F64))),
            Ones(2, 0) @ Ones(0, 3),
        ],
        ids=repr,
    )
    def test_dense_transpose_and_norm(self, node: Matrix) -> None:
        assert tuple(node.dense().shape) == node.shape
        assert tuple(node.T.dense().shape) == node.shape[::-1]
        assert not any(bool(v != 0) for v in node.dense().reshape(-1)) or isinstance(node, BlockDiagonal)
        assert node.norm_bound() >= 0


class TestArithmetics:
    def test_exact_kinds_mix(self) -> None:
        x = sympy.Symbol("x")
        mixed = Dense([[1, Fraction(1, 3)], [x, sympy.sqrt(2)]], "M")
        assert (mixed @ Dense([[3], [3]], "v")).sympy() == sympy.Matrix([[4], [3 * x + 3 * sympy.sqrt(2)]])
        assert (Fraction(1, 2) * mixed).sympy()[0, 1] == sympy.Rational(1, 6)

    def test_exact_and_floating_point_do_not_mix(self) -> None:
        for node in (Dense(exact("A", 3, 2)), Diagonal(exact("v", 2, 1)), Vec(Dense(exact("A", 1, 2))).T):
            with pytest.raises(TypeError, match="do not mix"):
                node @ torch.ones(2, 2, dtype=F64)
        with pytest.raises(TypeError, match="do not mix"):
            (Dense(exact("A", 3, 2)) @ Dense(tensor("V", 2, 3))).dense()

    def test_floats_do_not_spoil_exact_numbers(self) -> None:
        with pytest.raises(TypeError, match="Fraction"):
            (0.5 * Dense(exact("A", 3, 2))).dense()
        with pytest.raises(TypeError, match="floats"):
            Dense(np.array([[Fraction(1), 0.5]], dtype=object))

    def test_pure_structure_takes_any_arithmetic(self) -> None:
        node = kron(Commutation(2, 3), Ones(1, 2)) @ kron(VecIdentity(2), Identity(3))
        assert node.dense().dtype == torch.float64
        assert node.dense(torch.zeros(0, dtype=torch.float32)).dtype == torch.float32
        assert node.dense(np.zeros(0, dtype=object)).dtype == object
        assert node.sympy() == sympy.Matrix(node.dense().int().tolist())


def test_slice_transposes_need_equal_slices() -> None:
    with pytest.raises(ValueError, match="slices of equal height"):
        SliceTranspose(Zero(7, 2), 3)


def test_a_large_kronecker_action_is_never_formed() -> None:
    """A (x) B has 4e10 entries here; its action needs none of them, whichever side acts first."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(m, n, generator=generator, dtype=F64) for m, n in ((200, 500), (1000, 400)))
    X = torch.randn(500, 400, generator=generator, dtype=F64)
    y = kron(Dense(left), Dense(right)) @ X.reshape(-1)
    assert torch.allclose(y, (left @ X @ right.T).reshape(-1), rtol=1e-10, atol=1e-8)
