"""One suite for every node of a matrix expression, against matrices that loops and torch.kron write out."""

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
    Scaled,
    SliceTranspose,
    Sum,
    Vec,
    VecIdentity,
    Zero,
    add,
    kron,
    product,
    scaled,
)

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
        lambda leaf: Diagonal(leaf("v", 4, 1), "v"),
        lambda: torch.diag(tensor("v", 4, 1).reshape(-1)),
        r"\operatorname{diag}(v)",
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
        lambda leaf: Vec(Commutation(2, 3)),
        lambda: commutation(2, 3).reshape(-1, 1),
        r"\operatorname{vec}_r(K_{2,3})",
    ),
    "slice transpose": Case(
        lambda leaf: SliceTranspose(Dense(leaf("H", 12, 2), "H"), 4),
        lambda: sliced(tensor("H", 12, 2), 4),
        r"\mathcal{T}_{4}[H]",
        sharp=False,
    ),
    "kronecker": Case(
        lambda leaf: kron(Dense(leaf("A", 3, 2), "A"), Dense(leaf("B", 4, 5), "B")),
        lambda: torch.kron(A, B),
        r"A\otimes B",
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

    def test_action_on_columns_and_on_a_vector(self, case: Case) -> None:
        node, y = case.build(tensor), tensor("y", case.reference().shape[1], 3)
        assert torch.equal(node @ y, case.reference() @ y)
        assert torch.equal(node @ y[:, 0], case.reference() @ y[:, 0])
        assert torch.equal(node.T @ (node @ y), case.reference().T @ case.reference() @ y)

    def test_action_from_the_left(self, case: Case) -> None:
        node, y = case.build(tensor), tensor("y", 3, case.reference().shape[0])
        assert torch.equal(y @ node, y @ case.reference())

    def test_action_on_strided_arrays(self, case: Case) -> None:
        n = case.reference().shape[1]
        wide = tensor("wide", 4, 2 * n)
        assert torch.equal(case.build(tensor) @ wide.T[::2], case.reference() @ wide.T[::2])
        strided = exact("wide", 4, 2 * n).T[::2]
        assert (case.build(exact) @ strided == (case.reference() @ wide.T[::2]).numpy()).all()

    def test_action_on_no_columns(self, case: Case) -> None:
        node = case.build(tensor)
        assert (node @ torch.zeros(node.shape[1], 0, dtype=F64)).shape == (node.shape[0], 0)

    def test_exact_arithmetic(self, case: Case) -> None:
        value = case.build(exact).dense(np.zeros(0, dtype=object))
        assert value.dtype == object
        assert all(isinstance(entry, (int, Fraction)) for entry in value.reshape(-1))
        assert (value == case.reference().numpy()).all()

    def test_sympy(self, case: Case) -> None:
        value = case.build(exact).sympy()
        assert isinstance(value, sympy.ImmutableDenseMatrix)
        assert all(entry.is_Rational for entry in value)
        assert value == rational(case.reference())

    def test_symbols(self, case: Case) -> None:
        def leaf(name: str, m: int, n: int) -> Array:
            return np.array(sympy.symarray(name, (m, n)).tolist(), dtype=object)

        symbolic = case.build(leaf).sympy()
        sizes = {
            "A": (3, 2),
            "B": (4, 5),
            "C": (3, 2),
            "D": (2, 6),
            "G": (5, 2),
            "H": (12, 2),
            "S": (2, 5),
            "T": (1, 4),
            "v": (4, 1),
        }
        numbers = {}
        for symbol in symbolic.free_symbols:
            name, row, column = str(symbol).split("_")
            numbers[symbol] = integers(name, *sizes[name])[int(row)][int(column)]
        assert symbolic.subs(numbers) == rational(case.reference())

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

    def test_precision_is_kept(self, case: Case) -> None:
        node = case.build(lambda name, m, n: tensor(name, m, n).float())
        y = tensor("y", node.shape[1], 3).float()
        assert (node @ y).dtype == torch.float32
        assert torch.equal(node @ y, (case.reference() @ y.double()).float())

    def test_real_matrix_on_complex_columns(self, case: Case) -> None:
        y = torch.complex(tensor("re", case.reference().shape[1], 2), tensor("im", case.reference().shape[1], 2))
        assert torch.equal(case.build(tensor) @ y, case.reference().to(y.dtype) @ y)

    def test_vmap(self, case: Case) -> None:
        y = tensor("y", 3, case.reference().shape[1])
        assert torch.equal(torch.func.vmap(case.build(tensor).__matmul__)(y), y @ case.reference().T)

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

    def test_gradients_flow_through_the_leaves(self, case: Case) -> None:
        found: list[Tensor] = []

        def leaf(name: str, m: int, n: int) -> Tensor:
            found.append(tensor(name, m, n).requires_grad_())
            return found[-1]

        value = case.build(leaf).dense()
        if found:
            assert torch.autograd.grad((value**2).sum(), found[0])[0].abs().sum() > 0


class TestSimplification:
    """What a person would simplify, and nothing that changes the value."""

    W, V = Dense(A, "W"), Dense(tensor("V", 2, 3), "V")

    def test_identities_are_dropped(self) -> None:
        assert product(Identity(3), self.W, Identity(2)) is self.W
        assert product(Identity(3), Identity(3)).latex() == "I_{3}"
        assert product(Commutation(1, 3), self.W, Commutation(2, 1)) is self.W

    def test_commutations_cancel(self) -> None:
        assert (Commutation(2, 3) @ Commutation(3, 2)).latex() == "I_{6}"
        assert (Commutation(2, 3) @ Commutation(2, 3)).latex() == r"K_{2,3}\,K_{2,3}"
        chain = self.V.T @ self.V @ Commutation(3, 1) @ Commutation(1, 3)
        assert chain.latex() == r"V^\top\,V"

    def test_reading_a_lifted_diagonal(self) -> None:
        assert (DiagonalTake(4) @ DiagonalLift(4)).latex() == "I_{4}"
        assert isinstance(DiagonalLift(4) @ DiagonalTake(4), Product)

    def test_what_cancels_uncovers_more(self) -> None:
        K, L = Commutation(2, 3), Commutation(3, 2)
        assert product(K, L, Identity(6), L, K).latex() == "I_{6}"
        assert ((L @ K) @ (L @ Dense(tensor("D", 6, 2), "D"))).latex() == r"K_{3,2}\,D"

    def test_scalars_come_first(self) -> None:
        expression = (2 * self.W) @ (Fraction(1, 4) * self.V)
        assert isinstance(expression, Scaled)
        assert expression.latex() == r"\frac{1}{2}\,W\,V"
        assert kron(2 * self.W, Fraction(1, 2) * self.V).latex() == r"W\otimes V"
        assert (3 * (2 * self.W)).latex() == r"6\,W"
        assert scaled(Fraction(1), self.W) is self.W
        assert isinstance(0 * self.W, Zero)
        assert isinstance(Fraction(0) * self.W, Zero)

    def test_zeros_swallow(self) -> None:
        assert product(self.W, Zero(2, 7)).shape == (3, 7)
        assert isinstance(product(self.W, Zero(2, 7)), Zero)
        assert isinstance(kron(self.W, Zero(2, 7)), Zero)
        assert isinstance(2 * Zero(2, 7), Zero)
        assert add(Zero(3, 2), self.W, Zero(3, 2)) is self.W
        assert isinstance(add(Zero(3, 2), Zero(3, 2)), Zero)

    def test_sums_are_flat(self) -> None:
        total = self.W + (self.W - (self.W + Ones(3, 2)))
        assert isinstance(total, Sum)
        assert len(total.terms) == 4
        assert torch.equal(total.dense(), A - 1)

    def test_kronecker_of_identities(self) -> None:
        assert kron(Identity(2), Identity(3), Identity(4)).latex() == "I_{24}"
        assert kron(Identity(1), self.W) is self.W
        assert kron(self.W, Commutation(1, 1)) is self.W
        assert kron(self.W, Identity(2), Commutation(1, 3)).latex() == r"W\otimes I_{6}"

    def test_kronecker_products_are_left_nested(self) -> None:
        nested = kron(self.W, kron(self.V, kron(self.W, Identity(2))))
        assert nested.latex() == r"W\otimes V\otimes W\otimes I_{2}"
        reference = torch.kron(A, torch.kron(tensor("V", 2, 3), torch.kron(A, eye(2))))
        assert torch.equal(nested.dense(), reference)

    def test_mixed_products_are_joined(self) -> None:
        expression = kron(Identity(4), self.W) @ kron(Dense(tensor("Q", 4, 5), "Q"), Identity(2))
        assert expression.latex() == r"Q\otimes W"
        assert torch.equal(expression.dense(), torch.kron(tensor("Q", 4, 5), A))
        longer = kron(self.W, self.V) @ kron(self.V, self.W) @ kron(self.W, self.V)
        assert longer.latex() == r"W\,V\,W\otimes V\,W\,V"
        assert torch.equal(longer.dense(), torch.kron(A @ tensor("V", 2, 3) @ A, tensor("V", 2, 3) @ A @ tensor("V", 2, 3)))

    def test_mixed_products_split_where_the_factors_conform(self) -> None:
        J, P, Q = Dense(tensor("J", 5, 4), "J"), Dense(tensor("P", 4, 3), "P"), Dense(tensor("Q", 3, 2), "Q")
        expression = kron(J, Identity(6)) @ kron(P, Q, Identity(2))
        assert expression.latex() == r"J\,P\otimes Q\otimes I_{2}"
        assert torch.equal(expression.dense(), torch.kron(torch.kron(J.value @ P.value, Q.value), eye(2)))
        apart = kron(Identity(2), Commutation(4, 3), Identity(5)) @ kron(Identity(6), Vec(Dense(tensor("Y", 4, 5), "Y")))
        assert isinstance(apart, Product)
        assert torch.equal(
            apart.dense(),
            torch.kron(torch.kron(eye(2), commutation(4, 3)), eye(5)) @ torch.kron(eye(6), tensor("Y", 4, 5).reshape(-1, 1)),
        )

    def test_a_mixed_product_may_come_to_an_identity(self) -> None:
        K, L = Commutation(2, 3), Commutation(3, 2)
        assert (kron(Identity(4), K, Identity(5)) @ kron(Identity(4), L, Identity(5))).latex() == "I_{120}"

    def test_random_products_keep_their_value(self) -> None:
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

    def test_negative_terms_of_a_sum(self) -> None:
        assert (self.W - Fraction(1, 2) * self.W).latex() == r"W-\frac{1}{2}\,W"

    def test_a_tensor_scalar_carries_its_gradient(self) -> None:
        c = torch.tensor(1.0, dtype=F64, requires_grad=True)
        (gradient,) = torch.autograd.grad((c * self.W).dense().sum(), c)
        assert gradient == A.sum()

    def test_a_matrix_is_no_scalar(self) -> None:
        with pytest.raises(TypeError):
            self.W * self.W  # type: ignore[operator]
        with pytest.raises(TypeError):
            self.W + 1  # type: ignore[operator]

    def test_symbolic_scalar(self) -> None:
        a = sympy.Symbol("a")
        assert (a * Dense(exact("A", 1, 1), "W")).sympy() == sympy.Matrix([[a * integers("A", 1, 1)[0][0]]])
        with pytest.raises(TypeError, match="Substitute"):
            (a * self.W).dense()
        with pytest.raises(TypeError, match="Substitute"):
            (a * self.W).norm_bound()


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

    def test_precisions_do_not_mix(self) -> None:
        for node in (Dense(tensor("A", 3, 2)), Diagonal(tensor("v", 2, 1))):
            with pytest.raises(TypeError, match="precision"):
                node @ torch.ones(2, 2)

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

    def test_numpy_arrays_are_taken(self) -> None:
        assert torch.equal(Dense(A.numpy()) @ np.ones(2), A.sum(1))
        assert torch.equal(np.ones((1, 3)) @ Dense(A), A.sum(0, keepdim=True))

    def test_symbolic_norms_are_refused(self) -> None:
        with pytest.raises(TypeError, match="Substitute"):
            Dense([[sympy.Symbol("x")]]).norm_bound()

    def test_half_precision_and_integers_have_norms(self) -> None:
        assert Dense(2 * torch.eye(2, dtype=torch.bfloat16)).norm_bound() == 2.0
        assert Diagonal(torch.tensor([1, -3])).norm_bound() == 3.0
        assert (Fraction(1, 2) * Dense(torch.tensor([[1]]))).dense().dtype == torch.float64


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

    def test_an_inner_size_of_zero_gives_zeros(self) -> None:
        for empty in (torch.zeros(2, 0, dtype=F64), np.zeros((2, 0), dtype=object)):
            value = (Dense(empty) @ Dense(empty.T)).dense()
            assert tuple(value.shape) == (2, 2)
            assert all(v == 0 for v in value.reshape(-1))

    def test_factors_that_conform_by_zero_only(self) -> None:
        left, right = kron(Ones(2, 0), Ones(1, 3)), kron(Ones(0, 2), Ones(5, 1))
        assert tuple((left @ right).dense().shape) == (2, 2)


class TestNames:
    """Symbols under transposition."""

    @pytest.mark.parametrize(
        ("symbol", "transposed"),
        [
            ("W", r"W^\top"),
            ("W_Q", r"W_Q^\top"),
            (r"\hat{X}_{i}", r"\hat{X}_{i}^\top"),
            (r"\bullet", r"\bullet^\top"),
            (r"\lambda^\top", r"\lambda"),
            ("XW_Q", r"\left(XW_Q\right)^\top"),
            (r"D^{-1}", r"\left(D^{-1}\right)^\top"),
            (r"A B^\top", r"\left(A B^\top\right)^\top"),
        ],
    )
    def test_transposed_symbol(self, symbol: str, transposed: str) -> None:
        W = Dense(A, symbol)
        assert W.T.latex() == transposed
        assert W.T.T.latex() == symbol

    def test_a_known_norm_is_used(self) -> None:
        assert Dense(A, "W", norm=7.0).T.norm_bound() == 7.0

    def test_a_vector_is_no_matrix(self) -> None:
        with pytest.raises(ValueError, match="expected a matrix"):
            Dense(torch.zeros(3))

    def test_brackets(self) -> None:
        W, V = Dense(A, "W"), Dense(A, "V")
        assert ((W + V) @ V.T).latex() == r"\left(W+V\right)\,V^\top"
        assert kron(W + V, W @ V.T).latex() == r"\left(W+V\right)\otimes W\,V^\top"
        assert (2 * kron(W, V)).latex() == r"2\,\left(W\otimes V\right)"
        assert (-kron(W, V)).latex() == r"-W\otimes V"
        assert (2 * (W + V)).latex() == r"2\,\left(W+V\right)"


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
