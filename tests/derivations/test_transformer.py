"""The chain rule to second order, and the post-norm block with its named objects in vec_r, against autograd."""

from __future__ import annotations

import pytest
import torch
from bound_problems import post_block
from second_order_reference import assembled, check_all_blocks, derivatives, random_point, relative_error
from transformer_reference import ACTIVATIONS, attention

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.attention import AttentionAt
from derivations.composition import Composite, gauss_newton
from derivations.layernorm_theorems import LayerNormTheorems
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Zero
from derivations.operation import Renamed, Total, Variable
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


def chain(X, V, W, tied=False):
    """tanh(tanh(X V) W + X), in which V may stand twice."""
    first = Renamed(AffineAt(X, V), {"W": "V"})
    bent = Composite(ActivationAt("tanh", first.value), {"X": first})
    times = AffineAt(bent.value, W)
    second = Composite(Renamed(times, {"W": "V"}) if tied else times, {"X": bent})
    residual = Total(Variable("X", X), second)
    return Composite(ActivationAt("tanh", residual.value), {"X": residual})


def formula(X, V, W):
    return torch.tanh(torch.tanh(X @ V) @ W + X)


def test_depth_four_with_a_residual_branch():
    point = random_point(0, X=(3, 2), V=(2, 4), W=(4, 2))
    check_all_blocks(chain(**point), formula, point)


def test_a_name_used_twice_is_one_parameter():
    point = random_point(1, X=(3, 2), V=(2, 2))
    check_all_blocks(chain(point["X"], point["V"], point["V"], tied=True), lambda X, V: formula(X, V, V), point)


def test_gauss_newton_splits_the_hessian_of_a_loss():
    point = random_point(4, X=(3, 2), V=(2, 4), W=(4, 2))
    target = torch.ones(3, 2, dtype=torch.float64)
    model = chain(**point)
    loss = MeanSquaredErrorAt(model.value, target)

    _, expected = derivatives(lambda **p: (formula(**p) - target).square().mean(), point)
    J = torch.cat([model.jacobian(name).dense() for name in point], 1)
    blocks = {(i, j): gauss_newton(loss, model, i, j) for i, j in expected}
    seen = assembled({pair: split.total.dense() for pair, split in blocks.items()}, point)
    outer = assembled({pair: split.outer.dense() for pair, split in blocks.items()}, point)
    assert relative_error(seen, assembled(expected, point)) <= 1e-12
    assert relative_error(outer, J.T @ J * 2 / 6) <= 1e-12
    assert float((seen - outer).abs().max()) > 0.01  # the functional part is there


def test_errors_say_what_does_not_fit():
    point = random_point(6, X=(3, 2), W=(2, 4))
    times = AffineAt(**point)
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), the operation put in for it \(3, 4\)"):
        Composite(AffineAt(**point), {"X": times})
    with pytest.raises(ValueError, match="Build the outer operation at that operation's"):
        Composite(ActivationAt("tanh", times.value + 1), {"X": times})
    with pytest.raises(ValueError, match="argument 'X' occurs with shapes"):
        Composite(
            AffineAt(times.value, torch.ones(4, 4)),
            {"X": Renamed(times, {"X": "Y", "W": "X"}), "W": Variable("X", torch.ones(4, 4))},
        )
    with pytest.raises(ValueError, match="no argument is called 'Z'"):
        Composite(times, {"Z": times})
    with pytest.raises(ValueError, match="no argument is called 'Z'"):
        Composite(times, {}).jacobian("Z")
    with pytest.raises(ValueError, match="one name"):
        Renamed(times, {"X": "W"})
    with pytest.raises(ValueError, match="one output shape"):
        Total(times, ActivationAt("tanh", point["X"]))
    with pytest.raises(ValueError, match="scalar loss of one argument"):
        gauss_newton(times, times, "X", "W")
