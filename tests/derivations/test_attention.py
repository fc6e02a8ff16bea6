"""Single-head attention in vec_r: its named objects, what vanishes and what does not, and how it prints."""

from __future__ import annotations

import torch
from second_order_reference import derivatives, random_point, relative_error
from transformer_reference import attention

from derivations.attention import AttentionAt
from derivations.matrix import Zero

SIZES = [(3, 4, 2, 4, None), (4, 3, 2, 5, 2)]  # L, d_V, d_K, d_v, d_out (None: no W_O)


def make_point(seed, L, d, d_K, d_v, d_out):
    point = random_point(seed, X=(L, d), W_Q=(d, d_K), W_K=(d, d_K), W_V=(d, d_v))
    return point if d_out is None else {**point, **random_point(seed + 1, W_O=(d_v, d_out))}


def test_named_objects_are_derivatives_of_what_they_claim():
    point = make_point(4, *SIZES[0])
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


def test_linear_weights_have_zero_blocks_that_are_not_computed():
    at = AttentionAt(**make_point(6, *SIZES[1]))
    assert isinstance(at.Phi("V", "V"), Zero)
    assert isinstance(at.Phi("O", "O"), Zero)
    assert isinstance(AttentionAt(**make_point(6, *SIZES[0])).Phi("V", "V"), Zero)


def test_latex_reads_like_the_paper():
    at = AttentionAt(**make_point(8, *SIZES[0]))
    assert at.G_V.latex() == r"A\,X\otimes I_{4}"
    assert at.T_Q.latex() == r"\frac{\sqrt{2}}{2}\,\left(X\otimes X\,W_K\right)"
