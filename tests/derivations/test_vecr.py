"""The vec_r rules against reverse-mode autograd, symbolic differentiation and explicit sums, at unequal dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from derivations import vecr
from derivations.matrix import Commutation, Dense, Diagonal, Identity, Matrix, Ones, Zero, kron

F64 = torch.float64


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)


def jacobian(f: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """d vec_r f / d vec_r(X)^T, by reverse mode."""
    return torch.autograd.functional.jacobian(f, X).reshape(-1, X.numel())


def agrees(rule: Matrix, reference: Tensor) -> bool:
    return rule.shape == tuple(reference.shape) and torch.allclose(
        rule.dense(), reference, rtol=0, atol=1e-12 * float(reference.abs().max())
    )


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-13, atol=1e-13)


class TestDefinitions:
    def test_vec_r_stacks_rows(self, draw: Callable[..., Tensor]) -> None:
        A = draw(3, 5)
        entries = [A[i, j] for i in range(3) for j in range(5)]
        assert torch.equal(vecr.vec_r(A), torch.stack(entries))
        assert torch.equal(vecr.vec(A), torch.stack([A[i, j] for j in range(5) for i in range(3)]))
        assert torch.equal(vecr.vec_r(A), vecr.vec(A.T))  # Property 1
        assert torch.equal(vecr.unvec_r(vecr.vec_r(A), 3, 5), A)

    def test_commutation_between_the_two_orders(self, draw: Callable[..., Tensor]) -> None:
        A = draw(3, 5)
        assert torch.equal(vecr.vec_to_vec_r(3, 5) @ vecr.vec(A), vecr.vec_r(A))
        assert torch.equal(vecr.vec_to_vec_r(3, 5).T @ vecr.vec_r(A), vecr.vec(A))
        assert torch.equal(vecr.vec_to_vec_r(3, 5) @ vecr.vec(A), vecr.vec(A.T))  # Definition 3
        assert (vecr.vec_to_vec_r(5, 3) @ vecr.vec_to_vec_r(3, 5)).latex() == "I_{15}"

    @pytest.mark.parametrize("alpha", [2, -1, Fraction(1, 2), Fraction(-3, 2), 0])
    def test_hadamard_power(self, alpha: int | Fraction) -> None:
        A = torch.tensor([[1.0, 4.0, 2.25]], dtype=F64)
        exact = vecr.hadamard_power(np.array([[1, 4, Fraction(9, 4)]], dtype=object), alpha)
        assert close(vecr.hadamard_power(A, alpha), A ** float(alpha))
        assert all(isinstance(v, (int, Fraction)) for v in exact.reshape(-1))
        assert [float(v) for v in exact[0]] == pytest.approx((A[0] ** float(alpha)).tolist())
        assert close(vecr.hadamard_power(torch.tensor([8.0], dtype=F64), Fraction(1, 3)), torch.tensor([2.0], dtype=F64))


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


A, B, X, D, E, POSITIVE, SCALES = (
    normal(2, 3), normal(4, 5), normal(3, 4), normal(4, 4), normal(3, 5, seed=4), normal(3, 4).abs() + 0.5, normal(3, 1)
)  # fmt: skip


def of_two_factors(rule: Callable[..., Matrix]) -> Matrix:
    """A rule at sin(X) and (X^{o2})^T E."""
    a, b = torch.sin, lambda X: (X**2).T @ E
    return rule(Dense(a(X)), Dense(jacobian(a, X)), Dense(b(X)), Dense(jacobian(b, X)))


RULES: dict[str, tuple[Matrix, Callable[[Tensor], Tensor], Tensor]] = {
    # the rule, what it is the derivative of, and where: Properties 2 and 5, Propositions 3 to 9
    "sandwich": (vecr.sandwich(Dense(A), Dense(B)), lambda X: A @ X @ B, X),
    "hadamard": (vecr.hadamard(POSITIVE), lambda X: POSITIVE * X, X),
    "row scaling": (kron(vecr.row_scaling(SCALES), Identity(4)), lambda X: X / SCALES, X),
    "a differential": (vecr.identify(lambda dX: (X.cos() * dX) @ X.T + X.sin() @ dX.T, X), lambda X: X.sin() @ X.T, X),
    "product": (of_two_factors(vecr.product_rule), lambda X: X.sin() @ (X**2).T @ E, X),
    "kronecker": (of_two_factors(vecr.kronecker_rule), lambda X: torch.kron(X.sin(), (X**2).T @ E), X),
    "inverse": (vecr.inverse_rule(Dense(D.inverse())), torch.linalg.inv, D),
    "diag": (vecr.diag_rule(4), torch.diag, normal(4)),
    "hadamard square": (vecr.hadamard_square_rule(Dense(POSITIVE)), torch.square, POSITIVE),
    "hadamard root": (vecr.hadamard_sqrt_rule(POSITIVE), torch.sqrt, POSITIVE),
    "transpose": (vecr.transpose_rule(3, 5), lambda E: E.T, E),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_the_derivative(name: str) -> None:
    rule, f, at = RULES[name]
    assert agrees(rule, jacobian(f, at))


def test_shapes_and_zeros_are_checked() -> None:
    A, B = Dense(torch.ones(2, 3)), Dense(torch.ones(4, 5))
    for call, message in (
        (lambda: vecr.product_rule(A, Zero(6, 1), B, Zero(20, 1)), "A B does not conform"),
        (lambda: vecr.kronecker_rule(A, Zero(6, 1), B, Zero(6, 1)), "dB/dX must have one row for each of the 20 entries"),
        (lambda: vecr.inverse_rule(A), "square"),
        (lambda: vecr.unvec_r(torch.zeros(5), 2, 3), "has 6 entries"),
        (lambda: vecr.hadamard_power(np.array([8], dtype=object), Fraction(1, 3)), "half-integer"),
        (lambda: vecr.row_scaling(torch.tensor([1.0, 0.0]), "sigma"), "sigma has a zero entry"),
        (lambda: vecr.slice_transpose(Zero(12, 5), 3, 5, 4), "slice_transpose"),
        (lambda: vecr.contract(torch.zeros(3), Zero(12, 5), 5), "contract"),
        (lambda: vecr.hadamard_sqrt_rule(torch.tensor([[1.0, 0.0]])), "positive entries"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class TestKroneckerDerivative:
    """Property 6 for every kind of constant factor: the entry of X (x) Y at ((i, a), (j, b)) is X_ij Y_ab."""

    def factors(self, draw: Callable[..., Tensor]) -> Iterator[Matrix]:
        yield from (Dense(draw(4, 5), "Y"), Identity(3), Ones(2, 3), Ones(3), Commutation(2, 3), Zero(2, 3))
        yield from (Diagonal(draw(3), "v"), 2 * Dense(draw(2, 2), "Y"), kron(Identity(2), Dense(draw(2, 3), "W")))

    @pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 1)])
    def test_both_sides(self, draw: Callable[..., Tensor], shape: tuple[int, int]) -> None:
        X = draw(*shape)
        for Y in self.factors(draw):
            left = vecr.kron_derivative_left(shape, Y), jacobian(partial(torch.kron, other=Y.dense()), X)
            right = vecr.kron_derivative_right(Y, shape), jacobian(partial(torch.kron, Y.dense()), X)
            for rule, reference in (left, right):
                assert rule.shape == tuple(reference.shape)
                assert torch.equal(rule.dense(), reference)


class TestSecondDerivatives:
    """N = (X Y) o (X Y) with X 2 x 3, Y 3 x 4: out = 8, n_X = 6, n_Y = 12."""

    def second(self, X: Tensor, Y: Tensor, first: str) -> Tensor:
        """d vec_r(dN/d first) / d vec_r(the other)^T, row by row, reverse over reverse."""
        rows = []
        for output in range(8):

            def entry(X: Tensor, Y: Tensor, output: int = output) -> Tensor:
                return ((X @ Y) ** 2).reshape(-1)[output]

            blocks = torch.autograd.functional.hessian(entry, (X, Y))
            rows.append(blocks[0][1].reshape(6, 12) if first == "X" else blocks[1][0].reshape(12, 6))
        return torch.cat(rows)

    def test_slice_transpose(self, draw: Callable[..., Tensor]) -> None:
        X, Y = draw(2, 3), draw(3, 4)
        XY, YX = Dense(self.second(X, Y, "X")), self.second(X, Y, "Y")
        turned = vecr.slice_transpose(XY, 8, 6, 12)
        assert agrees(turned, YX)
        shuffle = kron(Identity(8), Commutation(12, 6))
        assert close(shuffle @ vecr.vec_r(XY.dense()), vecr.vec_r(YX))  # claim sym-agree
        assert vecr.slice_transpose(turned, 8, 12, 6) is XY
        v = draw(12 * 8)
        assert close(turned.T @ v, YX.T @ v)

    def test_contract(self, draw: Callable[..., Tensor]) -> None:
        X, Y, weight = draw(2, 3), draw(3, 4), draw(2, 4)
        reference = torch.autograd.functional.hessian(lambda X, Y: (weight * (X @ Y) ** 2).sum(), (X, Y))[0][1]
        H = Dense(self.second(X, Y, "X"))
        row = Dense(weight.reshape(1, -1), r"\lambda^\top")
        assert agrees(vecr.contract(weight, H, 6), reference.reshape(6, 12))
        assert agrees(vecr.contract(row, H, 6), reference.reshape(6, 12))
        assert vecr.contract(row, H, 6).latex().startswith(r"\left(\lambda^\top\otimes I_{6}\right)")
