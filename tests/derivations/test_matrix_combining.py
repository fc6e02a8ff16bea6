"""Products, sums, Kronecker products and scalars: what is simplified, what is printed, and that no value changes."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from matrix_cases import F64, A, commutation, exact, eye, integers, tensor

from derivations.matrix import (
    Commutation,
    Dense,
    DiagonalLift,
    DiagonalTake,
    Identity,
    Matrix,
    Product,
    Scaled,
    Vec,
    Zero,
    add,
    kron,
    product,
    scaled,
)


class TestSimplification:
    """What a person would simplify, and nothing that changes the value."""

    W, V = Dense(A, "W"), Dense(tensor("V", 2, 3), "V")

    def test_scalars_inside_a_product_come_out_of_it(self) -> None:
        inner = Product([self.W, scaled(3, self.V)])
        found = product(inner, Dense(tensor("U", 3, 4), "U"))
        assert isinstance(found, Scaled)
        assert torch.equal(found.dense(F64), 3 * A.to(F64) @ tensor("V", 2, 3).to(F64) @ tensor("U", 3, 4).to(F64))

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

    def test_kronecker_of_identities(self) -> None:
        assert kron(Identity(2), Identity(3), Identity(4)).latex() == "I_{24}"
        assert kron(Identity(1), self.W) is self.W
        assert kron(self.W, Commutation(1, 1)) is self.W
        assert kron(self.W, Identity(2), Commutation(1, 3)).latex() == r"W\otimes I_{6}"

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

    def test_brackets(self) -> None:
        W, V = Dense(A, "W"), Dense(A, "V")
        assert ((W + V) @ V.T).latex() == r"\left(W+V\right)\,V^\top"
        assert kron(W + V, W @ V.T).latex() == r"\left(W+V\right)\otimes W\,V^\top"
        assert (2 * kron(W, V)).latex() == r"2\,\left(W\otimes V\right)"
        assert (-kron(W, V)).latex() == r"-W\otimes V"
        assert (2 * (W + V)).latex() == r"2\,\left(W+V\right)"
