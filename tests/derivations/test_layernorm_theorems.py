"""Theorems 2 and 3 in their corrected form: every named piece against autograd, the whole against the compact forms."""

from __future__ import annotations

import pytest
import torch
from second_order_reference import derivatives, random_point, relative_error

from derivations.layernorm_theorems import LayerNormTheorems, theorem2_jacobian, theorem3_hessian
from derivations.normalization import LayerNormAt

L, d = 3, 4


def centre(X):
    return X - X.mean(1, keepdim=True)


def norms(X):
    return centre(X).square().sum(1).sqrt()


def sigma(X):
    return norms(X) / d**0.5


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def lift(n):
    return torch.stack([torch.diag(row).reshape(-1) for row in eye(n)], 1)


def B2(X):
    C = eye(d) - 1 / d
    return torch.block_diag(*[(row @ C).reshape(1, d) for row in centre(X)])


VALUES = {  # the matrix that a name ``d<key>`` is the derivative of, written out by hand
    "dM": centre,
    "dsigma": sigma,
    "dD": lambda X: torch.diag(sigma(X)),
    "dP": lambda X: torch.diag(1 / sigma(X)),
    "dA1": lambda X: -torch.kron(torch.diag(1 / sigma(X)), torch.diag(1 / sigma(X))),
    "dA2": lambda X: torch.diag(1 / norms(X)),
    "dA3": lambda X: torch.diag(centre(X).reshape(-1)),
    "dB2": B2,
    "dB1": lambda X: lift(L) @ torch.diag(1 / norms(X)) @ B2(X),
    "dPkron": lambda X: torch.kron(torch.diag(1 / sigma(X)), eye(d)),
    "dIMT": lambda X: torch.block_diag(*[centre(X).T] * L),
}


@pytest.mark.parametrize("name", VALUES)
def test_each_piece_is_the_derivative_of_what_it_names(name):
    point = random_point(10, X=(L, d))
    seen = getattr(LayerNormTheorems(point["X"]), name).dense()
    assert relative_error(seen, derivatives(lambda X: VALUES[name](X), point)[0]["X"]) <= 1e-12


@pytest.mark.parametrize("name", ["dM", "dP"])
def test_second_derivatives_of_the_pieces(name):
    point = random_point(11, X=(L, d))
    seen = getattr(LayerNormTheorems(point["X"]), name.replace("d", "d2")).dense(point["X"])
    assert relative_error(seen, derivatives(lambda X: VALUES[name](X), point)[1]["X", "X"]) <= 1e-12


@pytest.mark.parametrize("shape", [(3, 4), (1, 3)])
def test_theorems_equal_the_compact_forms_and_autograd(shape):
    point = random_point(13, X=shape)
    compact = LayerNormAt(point["X"])

    def layer_norm(X):
        return centre(X) / (centre(X).square().mean(1, keepdim=True)).sqrt()

    J, H = theorem2_jacobian(point["X"]).dense(), theorem3_hessian(point["X"]).dense()
    assert relative_error(J, compact.jacobian("X").dense()) <= 1e-12
    assert relative_error(H, compact.hessian("X", "X").dense()) <= 1e-12
    jacobians, hessians = derivatives(layer_norm, point)
    assert relative_error(J, jacobians["X"]) <= 1e-12
    assert relative_error(H, hessians["X", "X"]) <= 1e-12


def test_errors():
    with pytest.raises(ValueError, match="a row of X is constant"):
        LayerNormTheorems(torch.ones(2, 3))
    with pytest.raises(ValueError, match="one sequence"):
        LayerNormTheorems(torch.ones(3))
