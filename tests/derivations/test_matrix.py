"""Every node of a matrix expression beside the matrix that loops and torch.kron write out for it, and what is simplified."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor

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
    Product,
    SliceTranspose,
    Vec,
    VecIdentity,
    Zero,
    add,
    kron,
    product,
    scaled,
)
from derivations.rotary import Rotations
from derivations.row_blocks import Centring, RowBlocks
from derivations.selection import Selection

F64 = torch.float64


def integers(name: str, m: int, n: int) -> list[list[int]]:
    """A matrix of small integers that depends on its name alone: float64 and exact results must then be equal."""
    draw = random.Random(f"{name} {m} {n}")
    return [[draw.choice([-3, -2, -1, 1, 2, 3]) for _ in range(n)] for _ in range(m)]


def rational(x: Tensor) -> sympy.Matrix:
    return sympy.Matrix(*x.shape, [sympy.Rational(Fraction(v)) for v in x.reshape(-1).tolist()])


def tensor(name: str, m: int, n: int) -> Tensor:
    return torch.tensor(integers(name, m, n), dtype=F64).reshape(m, n)


def exact(name: str, m: int, n: int) -> Array:
    return np.array(integers(name, m, n), dtype=object).reshape(m, n)


Leaf = Callable[[str, int, int], Array]


@dataclass(frozen=True)
class Case:
    """A node over leaves of any arithmetic, the matrix it stands for, its LaTeX, and whether its norm bound is exact."""

    build: Callable[[Leaf], Matrix]
    reference: Callable[[], Tensor]
    latex: str
    sharp: bool = True


def commutation(m: int, n: int) -> Tensor:
    """K with K vec(A) = vec(A^T): entry A_ij stands at jm + i in vec(A) and at in + j in vec(A^T)."""
    K = torch.zeros(m * n, m * n, dtype=F64)
    for i in range(m):
        for j in range(n):
            K[i * n + j, j * m + i] = 1
    return K


def lift(n: int) -> Tensor:
    E = torch.zeros(n * n, n, dtype=F64)
    for i in range(n):
        basis = torch.zeros(n, dtype=F64)
        basis[i] = 1
        E[:, i] = torch.kron(basis, basis)
    return E


def sliced(H: Tensor, k: int) -> Tensor:
    return torch.cat([part.T for part in H.chunk(k)])


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=F64)


A, B, C = tensor("A", 3, 2), tensor("B", 4, 5), tensor("C", 3, 2)

CASES = {
    "dense": Case(lambda leaf: Dense(leaf("A", 3, 2), "A"), lambda: A, "A"),
    "identity": Case(lambda leaf: Identity(4), lambda: eye(4), "I_{4}"),
    "ones": Case(lambda leaf: Ones(3, 4), lambda: torch.ones(3, 4, dtype=F64), r"\mathbf{1}_{3\times 4}"),
    "ones column": Case(lambda leaf: Ones(3), lambda: torch.ones(3, 1, dtype=F64), r"\mathbf{1}_{3}"),
    "ones row": Case(lambda leaf: Ones(1, 3), lambda: torch.ones(1, 3, dtype=F64), r"\mathbf{1}_{3}^\top"),
    "zero": Case(lambda leaf: Zero(2, 5), lambda: torch.zeros(2, 5, dtype=F64), r"0_{2\times 5}"),
    "diagonal": Case(
        lambda leaf: Diagonal(leaf("v", 4, 1), "v"), lambda: torch.diag(tensor("v", 4, 1).reshape(-1)), r"\operatorname{diag}(v)"
    ),
    "block diagonal": Case(
        lambda leaf: BlockDiagonal([Dense(leaf("A", 3, 2), "A"), Identity(2), Dense(leaf("B", 4, 5), "B")]),
        lambda: torch.block_diag(A, eye(2), B),
        r"\operatorname{blockdiag}\left(A,\,I_{2},\,B\right)",
    ),
    "block diagonal with a name": Case(
        lambda leaf: BlockDiagonal([Dense(leaf("A", 3, 2)), Dense(leaf("B", 4, 5))], "A_i"),
        lambda: torch.block_diag(A, B),
        r"\operatorname{blockdiag}\left(A_i\right)",
    ),
    "lift": Case(lambda leaf: DiagonalLift(3), lambda: lift(3), "E_{3}"),
    "take": Case(lambda leaf: DiagonalTake(3), lambda: lift(3).T, r"E_{3}^\top"),
    "commutation": Case(lambda leaf: Commutation(2, 3), lambda: commutation(2, 3), "K_{2,3}"),
    "vec of the identity": Case(lambda leaf: VecIdentity(3), lambda: eye(3).reshape(-1, 1), r"\operatorname{vec}_r(I_{3})"),
    "vec": Case(lambda leaf: Vec(Dense(leaf("A", 3, 2), "A")), lambda: A.reshape(-1, 1), r"\operatorname{vec}_r(A)"),
    "vec of structure": Case(
        lambda leaf: Vec(Commutation(2, 3)), lambda: commutation(2, 3).reshape(-1, 1), r"\operatorname{vec}_r(K_{2,3})"
    ),
    "slice transpose": Case(
        lambda leaf: SliceTranspose(Dense(leaf("H", 12, 2), "H"), 4),
        lambda: sliced(tensor("H", 12, 2), 4),
        r"\mathcal{T}_{4}[H]",
        sharp=False,
    ),
    "kronecker": Case(
        lambda leaf: kron(Dense(leaf("A", 3, 2), "A"), Dense(leaf("B", 4, 5), "B")), lambda: torch.kron(A, B), r"A\otimes B"
    ),
    "kronecker, growing": Case(
        lambda leaf: kron(Dense(leaf("A", 3, 2), "A"), Dense(leaf("G", 5, 2), "G")),
        lambda: torch.kron(A, tensor("G", 5, 2)),
        r"A\otimes G",
    ),
    "kronecker, shrinking": Case(
        lambda leaf: kron(Dense(leaf("S", 2, 5), "S"), Dense(leaf("T", 1, 4), "T")),
        lambda: torch.kron(tensor("S", 2, 5), tensor("T", 1, 4)),
        r"S\otimes T",
    ),
    "identity on the left": Case(
        lambda leaf: kron(Identity(3), Dense(leaf("B", 4, 5), "B")), lambda: torch.kron(eye(3), B), r"I_{3}\otimes B"
    ),
    "identity on the right": Case(
        lambda leaf: kron(Dense(leaf("B", 4, 5), "B"), Identity(3)), lambda: torch.kron(B, eye(3)), r"B\otimes I_{3}"
    ),
    "three factors": Case(
        lambda leaf: kron(Identity(2), Commutation(3, 2), Dense(leaf("A", 3, 2), "A")),
        lambda: torch.kron(torch.kron(eye(2), commutation(3, 2)), A),
        r"I_{2}\otimes K_{3,2}\otimes A",
    ),
    "product": Case(
        lambda leaf: Dense(leaf("A", 3, 2), "A") @ Dense(leaf("D", 2, 6), "D") @ Commutation(3, 2),
        lambda: A @ tensor("D", 2, 6) @ commutation(3, 2),
        r"A\,D\,K_{3,2}",
        sharp=False,
    ),
    "sum": Case(
        lambda leaf: Dense(leaf("A", 3, 2), "A") + Ones(3, 2) - Dense(leaf("C", 3, 2), "C"),
        lambda: A + 1 - C,
        r"A+\mathbf{1}_{3\times 2}-C",
        sharp=False,
    ),
    "scaled": Case(lambda leaf: Fraction(-1, 2) * Dense(leaf("A", 3, 2), "A"), lambda: -A / 2, r"-\frac{1}{2}\,A"),
    "negative of a sum": Case(
        lambda leaf: -(Dense(leaf("A", 3, 2), "A") + Dense(leaf("C", 3, 2), "C")),
        lambda: -A - C,
        r"-\left(A+C\right)",
        sharp=False,
    ),
    "selection": Case(
        lambda leaf: Selection([3, 0, 3, 1, 3], 5),
        lambda: torch.nn.functional.one_hot(torch.tensor([3, 0, 3, 1, 3]), 5).double(),
        "P",
    ),
    "row blocks": Case(
        lambda leaf: RowBlocks(leaf("A", 3, 2)),
        lambda: torch.block_diag(*[row.reshape(-1, 1) for row in A]),
        r"\operatorname{blockdiag}_i(a_i)",
    ),
    "centring": Case(lambda leaf: Centring(4), lambda: eye(4) - 0.25, "C_{4}"),
    "all together": Case(
        lambda leaf: (kron(Dense(leaf("A", 3, 2), "A"), Identity(2)) + 2 * Ones(6, 4)) @ kron(VecIdentity(2), Identity(1)),
        lambda: (torch.kron(A, eye(2)) + 2) @ eye(2).reshape(-1, 1),
        r"\left(A\otimes I_{2}+2\,\mathbf{1}_{6\times 4}\right)\,\operatorname{vec}_r(I_{2})",
        sharp=False,
    ),
}


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


class TestArithmetics:
    def test_exact_and_floating_point_do_not_mix(self) -> None:
        for node in (Dense(exact("A", 3, 2)), Diagonal(exact("v", 2, 1)), Vec(Dense(exact("A", 1, 2))).T):
            with pytest.raises(TypeError, match="do not mix"):
                node @ torch.ones(2, 2, dtype=F64)
        with pytest.raises(TypeError, match="do not mix"):
            (Dense(exact("A", 3, 2)) @ Dense(tensor("V", 2, 3))).dense()

    @pytest.mark.parametrize("types", [(F64, torch.complex128), (torch.complex128, F64), (torch.int64, F64), (F64, torch.int64)])
    def test_numbers_of_two_types_are_multiplied_in_order(self, types: tuple[torch.dtype, torch.dtype]) -> None:
        first, second = (tensor(name, 3, 3).to(kind) for name, kind in zip(("S", "T"), types, strict=True))
        wide = torch.promote_types(*types)
        if wide.is_complex:
            first, second = (x * (1 + 2j) if x.is_complex() else x for x in (first, second))
        expected = first.to(wide) @ second.to(wide)
        assert not torch.equal(expected, second.to(wide) @ first.to(wide))
        assert torch.equal(Dense(first) @ second, expected)
        assert torch.equal((Dense(first) @ Dense(second)).dense(second), expected)
        assert torch.equal(Diagonal(first[0]) @ second, torch.diag(first[0]).to(wide) @ second.to(wide))

    def test_floats_do_not_spoil_exact_numbers(self) -> None:
        with pytest.raises(TypeError, match="Fraction"):
            (0.5 * Dense(exact("A", 3, 2))).dense()
        with pytest.raises(TypeError, match="floats"):
            Dense(np.array([[Fraction(1), 0.5]], dtype=object))


LETTERS: list[tuple[Matrix, str, str]] = [
    (Selection([2, 0], 3, "S"), "S", r"S^\top"),
    (RowBlocks(A, "b_i"), r"\operatorname{blockdiag}_i(b_i)", r"\operatorname{blockdiag}_i(b_i)^\top"),
    (Rotations(A, A, symbol="Q_l"), r"\operatorname{blockdiag}_l(Q_l)", r"\operatorname{blockdiag}_l(Q_l^\top)"),
    (Dense(A, "D"), "D", r"D^\top"),
]


@pytest.mark.parametrize(("matrix", "latex", "turned"), LETTERS, ids=[latex for _, latex, _ in LETTERS])
def test_a_transpose_keeps_the_letter(matrix: Matrix, latex: str, turned: str) -> None:
    assert [matrix.latex(), matrix.T.latex(), matrix.T.T.latex()] == [latex, turned, latex]


def test_slice_transposes_need_equal_slices() -> None:
    with pytest.raises(ValueError, match="slices of equal height"):
        SliceTranspose(Zero(7, 2), 3)


W, V, Q, Z = Dense(A, "W"), Dense(tensor("V", 2, 3), "V"), Dense(tensor("Q", 4, 5), "Q"), Zero(2, 7)
J, P, R, Y = (Dense(tensor(name, *shape), name) for name, shape in (("J", (5, 4)), ("P", (4, 3)), ("R", (3, 2)), ("Y", (4, 5))))
K, L = Commutation(2, 3), Commutation(3, 2)
SIMPLIFIED: list[tuple[Matrix, str]] = [
    # what is built, and how it is printed: what a person would simplify
    (product(Identity(3), W, Identity(2)), "W"),
    (product(Identity(3), Identity(3)), "I_{3}"),
    (product(Commutation(1, 3), W, Commutation(2, 1)), "W"),
    (K @ L, "I_{6}"),
    (K @ K, r"K_{2,3}\,K_{2,3}"),
    (V.T @ V @ Commutation(3, 1) @ Commutation(1, 3), r"V^\top\,V"),
    ((2 * W) @ (Fraction(1, 4) * V), r"\frac{1}{2}\,W\,V"),
    (product(Product([W, scaled(3, V)]), Dense(tensor("U", 3, 4), "U")), r"3\,W\,V\,U"),
    (kron(2 * W, Fraction(1, 2) * V), r"W\otimes V"),
    (3 * (2 * W), r"6\,W"),
    (scaled(Fraction(1), W), "W"),
    (0 * W, r"0_{3\times 2}"),
    (product(W, Z), r"0_{3\times 7}"),
    (kron(W, Z), r"0_{6\times 14}"),
    (2 * Z, r"0_{2\times 7}"),
    (add(Zero(3, 2), W, Zero(3, 2)), "W"),
    (add(Zero(3, 2), Zero(3, 2)), r"0_{3\times 2}"),
    (kron(Identity(2), Identity(3), Identity(4)), "I_{24}"),
    (kron(Identity(1), W), "W"),
    (kron(W, Commutation(1, 1)), "W"),
    (kron(W, Identity(2), Commutation(1, 3)), r"W\otimes I_{6}"),
    (kron(Identity(4), W) @ kron(Q, Identity(2)), r"Q\otimes W"),
    (kron(W, V) @ kron(V, W) @ kron(W, V), r"W\,V\,W\otimes V\,W\,V"),
    (kron(J, Identity(6)) @ kron(P, R, Identity(2)), r"J\,P\otimes R\otimes I_{2}"),
]


@pytest.mark.parametrize(("matrix", "latex"), SIMPLIFIED, ids=[latex for _, latex in SIMPLIFIED])
def test_simplified(matrix: Matrix, latex: str) -> None:
    assert matrix.latex() == latex
    assert tuple(matrix.dense().shape) == matrix.shape


def test_random_products_keep_their_value() -> None:
    draw = random.Random(0)
    joined = 0
    for trial in range(60):
        widths = [draw.choice([1, 2, 3, 4, 6]) for _ in range(4)]
        factors: list[Matrix] = []
        reference = eye(12 * widths[0])
        for i in range(3):  # 12 w_i x 12 w_{i+1}, in two or three factors, in either order of the widths
            wide = Dense(tensor(f"{trial}{i}", widths[i], widths[i + 1]), "W")
            square = [Dense(tensor(f"s{trial}{i}", 12, 12), "S")], [Identity(3), Dense(tensor(f"q{trial}", 4, 4), "Q")]
            parts = [wide, *draw.choice(square)]
            draw.shuffle(parts)
            factors.append(kron(*parts))
            written = eye(1)
            for part in parts:
                written = torch.kron(written, part.dense())
            reference = reference @ written
        result = product(*factors)
        joined += len(result.children()) < 3 or not isinstance(result, Product)
        assert torch.equal(result.dense(), reference)
    assert joined > 20


class TestScalars:
    W = Dense(A, "W")

    @pytest.mark.parametrize(
        ("c", "latex"),
        [
            (2, r"2\,W"),
            (-1, "-W"),
            (0.5, r"0.5\,W"),
            (-2.5e-7, r"-2.5\cdot 10^{-7}\,W"),
            (Fraction(3, 4), r"\frac{3}{4}\,W"),
            (sympy.sqrt(2), r"\sqrt{2}\,W"),
            (-1 / sympy.sqrt(2), r"-\frac{\sqrt{2}}{2}\,W"),
            (1 + sympy.sqrt(2), r"\left(1 + \sqrt{2}\right)\,W"),
            (np.float64(0.25), r"0.25\,W"),
            (torch.tensor(0.25, dtype=F64), r"0.25\,W"),
        ],
    )
    def test_every_kind_of_scalar(self, c: object, latex: str) -> None:
        for expression in (c * self.W, self.W * c):  # type: ignore[operator]
            assert expression.latex() == latex
            assert torch.allclose(expression.dense(), float(c) * A, rtol=1e-15, atol=0)  # type: ignore[arg-type]
            assert expression.norm_bound() == pytest.approx(abs(float(c)) * self.W.norm_bound())  # type: ignore[arg-type]


class TestNames:
    """Symbols under transposition."""

    @pytest.mark.parametrize(
        ("symbol", "transposed"),
        [
            ("W_Q", r"W_Q^\top"),
            (r"\hat{X}_{i}", r"\hat{X}_{i}^\top"),
            (r"\lambda^\top", r"\lambda"),
            ("XW_Q", r"\left(XW_Q\right)^\top"),
            (r"A B^\top", r"\left(A B^\top\right)^\top"),
        ],
    )
    def test_transposed_symbol(self, symbol: str, transposed: str) -> None:
        W = Dense(A, symbol)
        assert W.T.latex() == transposed
        assert W.T.T.latex() == symbol

    def test_a_known_norm_is_used(self) -> None:
        assert Dense(A, "W", norm=7.0).T.norm_bound() == 7.0

    def test_what_is_no_matrix_or_no_scalar(self) -> None:
        with pytest.raises(ValueError, match="expected a matrix"):
            Dense(torch.zeros(3))
        with pytest.raises(TypeError):
            Dense(A) * Dense(A)  # type: ignore[operator]
        with pytest.raises(TypeError):
            Dense(A) + 1  # type: ignore[operator]

    def test_brackets(self) -> None:
        W, V = Dense(A, "W"), Dense(A, "V")
        assert ((W + V) @ V.T).latex() == r"\left(W+V\right)\,V^\top"
        assert kron(W + V, W @ V.T).latex() == r"\left(W+V\right)\otimes W\,V^\top"
        assert (2 * kron(W, V)).latex() == r"2\,\left(W\otimes V\right)"
        assert (-kron(W, V)).latex() == r"-W\otimes V"
        assert (2 * (W + V)).latex() == r"2\,\left(W+V\right)"
