"""The post-norm block and its named objects in vec_r, against autograd."""

from __future__ import annotations

import pytest
import torch
from bound_problems import post_block
from second_order_reference import assembled, check_all_blocks, derivatives, random_point, relative_error
from transformer_reference import ACTIVATIONS, attention

from derivations.attention import AttentionAt
from derivations.composition import gauss_newton
from derivations.layernorm_theorems import LayerNormTheorems
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Zero
from derivations.transformer import PostNormBlockAt

SIZES = [(3, 4, 2, 5), (4, 3, 2, 6)]  # L, d_V, d_K, d_ff
BIASES, NORMS = ("b_1", "b_2"), ("gamma_1", "beta_1", "gamma_2", "beta_2")


def make_point(seed, L, d, d_K, d_ff, extra=(), d_v=None):
    shapes = {"X": (L, d), "W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, d_v or d), "W_1": (d, d_ff), "W_2": (d_ff, d)}
    shapes |= {"b_1": (d_ff,), "b_2": (d,)} | dict.fromkeys(NORMS, (d,)) | {"W_O": (d_v or d, d)}
    point = random_point(seed, **shapes)
    return {name: value for name, value in point.items() if name not in (*BIASES, *NORMS, "W_O") or name in extra}


def causal_mask(L):
    return torch.ones(L, L, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("kind", "extra", "sizes"),
    [(kind, (*BIASES, *NORMS, "W_O"), sizes) for kind, sizes in zip(("relu", "silu"), SIZES, strict=True)]
    + [("gelu", (), SIZES[1])],
)
def test_against_autograd_with_a_causal_mask_and_two_eps(kind, extra, sizes):
    point = make_point(2, *sizes, extra=extra, d_v=2 if extra else None)
    operation = PostNormBlockAt(**point, activation=kind, mask=causal_mask(sizes[0]), eps=(0.01, 0.3))
    check_all_blocks(
        operation,
        lambda **p: post_block(p["X"], p, eps=(0.01, 0.3), act=ACTIVATIONS[kind], mask=causal_mask(sizes[0])),
        point,
        tolerance=1e-11,
    )


def test_loss_hessian_in_its_two_parts():
    L, d, *_ = SIZES[0]
    point = make_point(8, *SIZES[0], extra=(*BIASES, *NORMS))
    target = torch.linspace(-1, 1, L * d, dtype=torch.float64).reshape(L, d)
    at = PostNormBlockAt(**point, activation="gelu")
    _, expected = derivatives(lambda **p: (post_block(p["X"], p, act=ACTIVATIONS["gelu"]) - target).square().mean(), point)
    blocks = {(i, j): at.loss_hessian(target, i, j) for i, j in expected}
    seen = {pair: split.total.dense() for pair, split in blocks.items()}
    assert relative_error(assembled(seen, point), assembled(expected, point)) <= 1e-11
    generic = MeanSquaredErrorAt(at.value, target)
    for i, j in (("W_1", "W_Q"), ("W_V", "gamma_2"), ("b_1", "b_1")):
        split = gauss_newton(generic, at, i, j)
        assert relative_error(blocks[i, j].outer.dense(), split.outer.dense()) <= 1e-13
        assert relative_error(blocks[i, j].functional.dense(), split.functional.dense()) <= 1e-12
    with pytest.raises(ValueError, match="needs the output's shape"):
        at.loss_hessian(target[:1], "1", "1")


def test_errors_name_the_argument():
    at = PostNormBlockAt(**make_point(9, *SIZES[0]))
    with pytest.raises(ValueError, match="no argument is called 'b_1'"):
        at.H_tr("b_1", "1")
    with pytest.raises(ValueError, match="no argument is called 'W_1'"):
        at.G("1")
    with pytest.raises(ValueError, match="no argument is called 'O'"):
        at.xi("O", "Q")


def test_named_objects_are_derivatives_of_what_they_claim():
    point = random_point(4, X=(3, 4), W_Q=(4, 2), W_K=(4, 2), W_V=(4, 4))
    at, d = AttentionAt(**point), 4
    X = point["X"]

    def averaged(N):  # A X as a function of the product c W_Q W_K^T
        return torch.softmax(X @ N @ X.T, 1) @ X

    N = point["W_Q"] @ point["W_K"].T / 2**0.5
    jacobians, hessians = derivatives(averaged, {"N": N})
    assert relative_error(at.Z_1.dense(), jacobians["N"]) <= 1e-12
    assert relative_error(at.Z_2.dense(), hessians["N", "N"]) <= 1e-12
    shuffled, _ = derivatives(lambda x: torch.kron(x.reshape(1, d), torch.eye(d, dtype=x.dtype)), {"x": X[0]})
    assert relative_error(at.S.dense(X), shuffled["x"]) == 0.0
    averages, _ = derivatives(
        lambda **p: attention(**p, W_V=torch.eye(d, dtype=torch.float64)), {k: point[k] for k in ("X", "W_Q", "W_K")}
    )
    for name, block in averages.items():
        assert relative_error(at.averaged_jacobian(name).dense(), block) <= 1e-12
    logits, _ = derivatives(lambda X, W_Q, W_K: X @ W_Q @ W_K.T @ X.T / 2**0.5, {k: point[k] for k in ("X", "W_Q", "W_K")})
    for name, block in logits.items():
        assert relative_error(at.logits_jacobian(name).dense(), block) <= 1e-12
    assert isinstance(at.logits_jacobian("W_V"), Zero)
    assert isinstance(at.averaged_jacobian("W_V"), Zero)


def test_errors_of_the_theorems():
    with pytest.raises(ValueError, match="a row of X is constant"):
        LayerNormTheorems(torch.ones(2, 3))
    with pytest.raises(ValueError, match="one sequence"):
        LayerNormTheorems(torch.ones(3))
