"""The post-norm block and its parts in vec_r, and LayerNorm's theorems: against autograd, and against composition."""

from __future__ import annotations

import pytest
import torch
from second_order_reference import assembled, check_all_blocks, derivatives, random_point, relative_error
from transformer_reference import attention, post_norm_block

from derivations.attention import AttentionAt
from derivations.composition import Composite, gauss_newton
from derivations.feedforward import FeedForwardAt
from derivations.layernorm_theorems import LayerNormTheorems, theorem2_jacobian, theorem3_hessian
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Zero
from derivations.normalization import LayerNormAt
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
    check_all_blocks(operation, post_norm_block(kind, causal=True, eps=(0.01, 0.3)), point, tolerance=1e-11)


def by_composition(point, kind, mask, eps):
    """The same block from its four chapters by the generic chain rule."""
    attention = AttentionAt(**{name: point[name] for name in ("X", "W_Q", "W_K", "W_V", "W_O")}, mask=mask)
    N = Total(Variable("X", point["X"]), attention)
    norm_1 = Renamed(
        LayerNormAt(N.value, point["gamma_1"], point["beta_1"], eps[0]), {"X": "N", "gamma": "gamma_1", "beta": "beta_1"}
    )
    Y = Composite(norm_1, {"N": N})
    S = Composite(FeedForwardAt(Y.value, *(point[name] for name in ("W_1", "W_2", "b_1", "b_2")), activation=kind), {"Y": Y})
    norm_2 = Renamed(
        LayerNormAt(S.value, point["gamma_2"], point["beta_2"], eps[1]), {"X": "S", "gamma": "gamma_2", "beta": "beta_2"}
    )
    return S, Composite(norm_2, {"S": S})


def test_named_objects_and_generic_composition_give_the_same_blocks():
    kind, L, eps = "gelu", SIZES[0][0], (0.01, 0.3)
    point = make_point(3, *SIZES[0], extra=(*BIASES, *NORMS, "W_O"))
    named = PostNormBlockAt(**point, activation=kind, mask=causal_mask(L), eps=eps)
    S, whole = by_composition(point, kind, causal_mask(L), eps)
    assert set(whole.arguments) == set(named.arguments)
    like = point["X"]
    for i in named.arguments:
        assert relative_error(named.jacobian(i).dense(like), whole.jacobian(i).dense(like)) <= 1e-12
        if i in S.arguments:
            assert relative_error(named.B(i).dense(like), S.jacobian(i).dense(like)) <= 1e-12
        for j in named.arguments:
            assert relative_error(named.H_tr(i, j).dense(like), whole.hessian(i, j).dense(like)) <= 1e-12, (i, j)
            if i in S.arguments and j in S.arguments:
                assert relative_error(named.xi(i, j).dense(like), S.hessian(i, j).dense(like)) <= 1e-12, (i, j)


def test_norm_bounds_bound():
    at = PostNormBlockAt(**make_point(10, *SIZES[0], extra=("gamma_1", "b_1")), activation="gelu")
    for i in at.arguments:
        assert torch.linalg.matrix_norm(at.jacobian(i).dense(), 2) <= at.jacobian(i).norm_bound() * (1 + 1e-12)
        for j in at.arguments:
            block = at.H_tr(i, j)
            assert torch.linalg.matrix_norm(block.dense(at.X), 2) <= block.norm_bound() * (1 + 1e-12), (i, j)


def test_loss_hessian_in_its_two_parts():
    L, d, *_ = SIZES[0]
    point = make_point(8, *SIZES[0], extra=(*BIASES, *NORMS))
    target = torch.linspace(-1, 1, L * d, dtype=torch.float64).reshape(L, d)
    at = PostNormBlockAt(**point, activation="gelu")
    block = post_norm_block("gelu")
    _, expected = derivatives(lambda **at: (block(**at) - target).square().mean(), point)
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


def centre(X):
    return X - X.mean(1, keepdim=True)


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


def test_errors_of_the_theorems():
    with pytest.raises(ValueError, match="a row of X is constant"):
        LayerNormTheorems(torch.ones(2, 3))
    with pytest.raises(ValueError, match="one sequence"):
        LayerNormTheorems(torch.ones(3))
