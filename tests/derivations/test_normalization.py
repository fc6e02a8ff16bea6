"""LayerNorm and RMSNorm in vec_r: against reverse-over-reverse autograd, and exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from second_order_reference import at, check_all_blocks, exact_hessian, exact_jacobian, random_point, same, symbols

from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation
from derivations.row_blocks import Centring

L, d = 3, 4


def layer_norm(X, gamma=1.0, beta=0.0, eps=0.0):
    centred = X - X.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + beta


def rms_norm(X, gamma=1.0, eps=0.0):
    return X / (X.square().mean(-1, keepdim=True) + eps).sqrt() * gamma


def test_one_eps_for_each_row_as_a_list_or_a_tensor():
    X, eps = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), [0.1, 0.0, 2.0]
    for given in (eps, tuple(eps), torch.tensor(eps, dtype=torch.float64)):
        torch.testing.assert_close(
            LayerNormAt(X, eps=given).value,
            layer_norm(X, eps=torch.tensor(eps, dtype=torch.float64).unsqueeze(1)),
            rtol=1e-14,
            atol=0,
        )


@pytest.mark.slow
@pytest.mark.parametrize("eps", [0, 1e-5, 0.7])
@pytest.mark.parametrize("names", [("X",), ("X", "gamma"), ("X", "beta"), ("X", "gamma", "beta")])
def test_layernorm_blocks_against_autograd(names, eps):
    everything = random_point(0, X=(L, d), gamma=(d,), beta=(d,))
    point = {name: everything[name] for name in names}
    check_all_blocks(LayerNormAt(**point, eps=eps), lambda **p: layer_norm(**p, eps=eps), point)


@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (2, 5)])
def test_layernorm_at_other_sizes(shape):
    point = random_point(1, X=shape, gamma=shape[1:], beta=shape[1:])
    check_all_blocks(LayerNormAt(**point, eps=0.1), lambda **p: layer_norm(**p, eps=0.1), point)


@pytest.mark.slow
@pytest.mark.parametrize("eps", [0, 0.3])
@pytest.mark.parametrize("names", [("X",), ("X", "gamma")])
def test_rmsnorm_blocks_against_autograd(names, eps):
    everything = random_point(2, X=(L, d), gamma=(d,))
    point = {name: everything[name] for name in names}
    check_all_blocks(RMSNormAt(**point, eps=eps), lambda **p: rms_norm(**p, eps=eps), point)


@pytest.mark.slow
def test_eps_per_row():
    point = random_point(3, X=(L, d), gamma=(d,))
    eps = torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)
    for shaped in (eps, eps.reshape(L, 1)):
        check_all_blocks(LayerNormAt(**point, eps=shaped), lambda **p: layer_norm(**p, eps=eps.reshape(L, 1)), point)


def test_float32():
    point = {name: value.float() for name, value in random_point(4, X=(L, d), gamma=(d,), beta=(d,)).items()}
    operation = LayerNormAt(**point, eps=1e-5)
    exact = LayerNormAt(**{name: value.double() for name, value in point.items()}, eps=1e-5)
    for i, j in (("X", "X"), ("X", "gamma"), ("gamma", "X")):
        seen, expected = operation.hessian(i, j).dense(), exact.hessian(i, j).dense()
        assert seen.dtype == torch.float32
        assert (seen - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_scale_invariance_of_the_jacobian():
    X = random_point(5, X=(L, d))["X"]
    point = LayerNormAt(X)
    assert (point.jacobian("X") @ X.reshape(-1)).abs().max() < 1e-14  # homogeneous of degree 0
    against_x = point.hessian("X", "X") @ X.reshape(-1)  # so its Jacobian is homogeneous of degree -1
    assert torch.allclose(against_x, -point.jacobian("X").dense().reshape(-1), rtol=0, atol=1e-13)


# Exact arithmetic ----------------------------------------------------------------------------------------------------

X_EXACT = np.array([[Fraction(1), Fraction(-2), Fraction(4)], [Fraction(3, 2), Fraction(0), Fraction(1, 3)]], dtype=object)
GAMMA = np.array([Fraction(2), Fraction(-1, 3), Fraction(5)], dtype=object)
BETA = np.array([Fraction(1), Fraction(7, 2), Fraction(0)], dtype=object)
SCALES = np.array([[Fraction(3)], [Fraction(5, 4)]], dtype=object)


def symbolic_norm(centred: bool, eps: np.ndarray):
    X, gamma, beta = symbols("x", 2, 3), symbols("g", 3), symbols("b", 3)
    m = X - (X.sum(1) / sympy.Integer(3)).reshape(2, 1) if centred else X
    squares = (m * m).sum(1) / sympy.Integer(3)
    rows = [squares[i] + sympy.Rational(eps[i].numerator, eps[i].denominator) for i in range(2)]
    normalized = np.array([[m[i, j] / sympy.sqrt(rows[i]) * gamma[j] for j in range(3)] for i in range(2)], dtype=object)
    return normalized + beta if centred else normalized, {"X": X, "gamma": gamma, "beta": beta}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LayerNormAt, RMSNormAt])
def test_exact_rational_blocks_equal_symbolic_differentiation(kind):
    centred = kind is LayerNormAt
    means = X_EXACT.sum(1).reshape(2, 1) / Fraction(3) if centred else 0
    eps = SCALES**2 - ((X_EXACT - means) ** 2).sum(1).reshape(2, 1) / Fraction(3)
    point = {"X": X_EXACT, "gamma": GAMMA, "beta": BETA} if centred else {"X": X_EXACT, "gamma": GAMMA}
    operation = kind(**point, eps=eps)
    assert (operation.s == SCALES).all()
    assert all(isinstance(entry, (int, Fraction)) for entry in operation.hessian("X", "X").dense().reshape(-1))

    outputs, named = symbolic_norm(centred, eps.reshape(-1))
    values = {s: v for name in point for s, v in zip(named[name].reshape(-1), point[name].reshape(-1), strict=True)}
    for i in point:
        assert operation.jacobian(i).dense(X_EXACT).tolist() == at(exact_jacobian(outputs, named[i]), values).tolist()
        for j in point:
            expected = at(exact_hessian(outputs, named[i], named[j]), values)
            assert operation.hessian(i, j).dense(X_EXACT).tolist() == expected.tolist(), (i, j)


def test_symbolic_entries():
    X, gamma = symbols("x", 1, 2), symbols("g", 2)
    eps = sympy.Symbol("e", positive=True)
    operation = LayerNormAt(X, gamma, eps=eps)
    half = (X[0, 0] - X[0, 1]) / 2
    outputs = [gamma[0] * half / sympy.sqrt(half**2 + eps), -gamma[1] * half / sympy.sqrt(half**2 + eps)]
    assert same(operation.jacobian("X").sympy(), exact_jacobian(outputs, X))
    assert same(operation.hessian("X", "X").sympy(), exact_hessian(outputs, X, X))
    assert same(operation.hessian("gamma", "X").sympy(), exact_hessian(outputs, gamma, X))


# Structure and errors --------------------------------------------------------------------------------------------------


def test_named_objects():
    X = random_point(6, X=(L, d))["X"]
    point = LayerNormAt(X, torch.full((d,), 2.0, dtype=torch.float64))
    assert isinstance(point, Operation)
    assert point.s.shape == (L, 1)
    assert torch.equal(point.P.dense(), torch.diag(1 / point.s.reshape(-1)))
    assert torch.allclose(point.V.T @ point.X_hat.reshape(-1), torch.full((L,), float(d), dtype=torch.float64))
    assert torch.allclose(2 * point.J0.dense(), point.jacobian("X").dense())
    assert point.jacobian("X").norm_bound() >= torch.linalg.matrix_norm(point.jacobian("X").dense(), 2) - 1e-12
    assert r"\gamma" in point.hessian("X", "X").latex()
    projection = Centring(d).dense()
    assert torch.allclose(projection @ projection, projection)


def test_errors_name_what_is_wrong():
    X = random_point(7, X=(L, d))["X"]
    with pytest.raises(ValueError, match=r"LayerNormAt: gamma must have shape \(4,\)"):
        LayerNormAt(X, gamma=torch.ones(3))
    with pytest.raises(ValueError, match="one sequence"):
        RMSNormAt(X.reshape(1, L, d))
    with pytest.raises(ValueError, match=r"scale of row 1 is 0.*not constant"):
        _ = LayerNormAt(torch.tensor([[1.0, 2.0], [3.0, 3.0]])).value
    with pytest.raises(ValueError, match=r"scale of row 0 is 0.*not zero"):
        _ = RMSNormAt(torch.zeros(1, 2)).value
    with pytest.raises(ValueError, match="pass a Fraction"):
        _ = LayerNormAt(X_EXACT, eps=1e-5).s
    with pytest.raises(ValueError, match="one entry for each of its 3 rows"):
        _ = LayerNormAt(X, eps=torch.ones(2)).s
    with pytest.raises(ValueError, match="no argument is called 'gamma'"):
        LayerNormAt(X).jacobian("gamma")
    with pytest.raises(ValueError, match="no argument is called 'beta'"):
        RMSNormAt(X).hessian("X", "beta")
