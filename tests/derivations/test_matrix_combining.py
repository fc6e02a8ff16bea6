"""Products, sums, Kronecker products and scalars: what is simplified, what is printed, and that no value changes."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from matrix_cases import F64, A, commutation, eye, tensor

from derivations.matrix import (
    Commutation,
    Dense,
    Identity,
    Matrix,
    Ones,
    Product,
    Vec,
    Zero,
    add,
    kron,
    product,
    scaled,
)

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


def test_mixed_products_keep_their_value() -> None:
    a, v, q = A, V.value, Q.value
    assert torch.equal((W + (W - (W + Ones(3, 2)))).dense(), a - 1)
    assert torch.equal((kron(Identity(4), W) @ kron(Q, Identity(2))).dense(), torch.kron(q, a))
    assert torch.equal((kron(W, V) @ kron(V, W) @ kron(W, V)).dense(), torch.kron(a @ v @ a, v @ a @ v))
    found = (kron(J, Identity(6)) @ kron(P, R, Identity(2))).dense()
    assert torch.equal(found, torch.kron(torch.kron(J.value @ P.value, R.value), eye(2)))
    apart = kron(Identity(2), Commutation(4, 3), Identity(5)) @ kron(Identity(6), Vec(Y))
    assert isinstance(apart, Product)
    expected = torch.kron(torch.kron(eye(2), commutation(4, 3)), eye(5)) @ torch.kron(eye(6), Y.value.reshape(-1, 1))
    assert torch.equal(apart.dense(), expected)


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

    def test_negative_terms_of_a_sum(self) -> None:
        assert (self.W - Fraction(1, 2) * self.W).latex() == r"W-\frac{1}{2}\,W"

    def test_a_matrix_is_no_scalar(self) -> None:
        with pytest.raises(TypeError):
            self.W * self.W  # type: ignore[operator]
        with pytest.raises(TypeError):
            self.W + 1  # type: ignore[operator]


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
