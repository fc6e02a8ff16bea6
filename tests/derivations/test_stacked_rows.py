"""Softmax, norms and activations on the stacked rows of all heads, and attention put together from its parts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from second_order_reference import check_all_blocks, random_point
from structured_reference import integers
from torch.nn.functional import silu

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.attention import AttentionAt
from derivations.composition import Composite
from derivations.gains import HadamardAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed, Variable, shape_of, size
from derivations.softmax import SoftmaxAt

H, L, W = 2, 3, 2
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


def test_softmax_of_all_heads_under_one_mask():
    mask = CAUSAL.repeat(H, 1)
    point = random_point(0, T=(H * L, L))

    def softmax(T):
        return T.reshape(H, L, L).masked_fill(~CAUSAL, -torch.inf).softmax(-1).reshape(H * L, L)

    check_all_blocks(SoftmaxAt(point["T"], mask=mask), softmax, point)


def test_norms_with_one_gain_for_the_rows_of_two_heads():
    point = random_point(1, X=(4, 3), gamma=(3,), beta=(3,))

    def layer_norm(X, gamma, beta):
        centred = X - X.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * gamma + beta

    check_all_blocks(LayerNormAt(**point, eps=0.1), layer_norm, point)
    del point["beta"]
    check_all_blocks(
        RMSNormAt(**point, eps=0.1), lambda X, gamma: X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * gamma, point
    )


def reshaped(operation: Operation, matrix, shape) -> Composite:
    return Composite(LinearMapAt(operation.value, matrix, shape), {"X": operation})


def projected(X: Operation, name: str, point) -> Composite:
    """X W with W under its own name."""
    return Composite(Renamed(AffineAt(X.value, point[name]), {"W": name}), {"X": X})


def product(P: Operation, R: Operation, heads: int, kind: str, scale=None) -> Composite:
    return Composite(HeadProductAt(P.value, R.value, heads, kind, scale), {"P": P, "R": R})


def test_grouped_query_attention_with_rotary_embeddings_and_normalised_queries():
    """Two query heads on one head of keys and values, causal, in all pairs of its arguments."""
    d = 3
    point = random_point(2, X=(L, d), W_Q=(d, H * W), W_K=(d, W), W_V=(d, W), W_O=(H * W, 2), gamma=(W,))
    X = Variable("X", point["X"])
    turn = rotary(L, W, H, 10.0)

    def stacked(name: str, heads: int) -> Composite:
        return reshaped(projected(X, name, point), split_heads(L, heads, W, H // heads), (H * L, W))

    Q, K, V = stacked("W_Q", H), stacked("W_K", 1), stacked("W_V", 1)
    Q = Composite(RMSNormAt(Q.value, point["gamma"], eps=0.2), {"X": Q})
    Q, K = (reshaped(rows, turn, (H * L, W)) for rows in (Q, K))
    T = product(Q, K, H, "scores")
    A = Composite(SoftmaxAt(T.value, mask=CAUSAL.repeat(H, 1)), {"T": T})
    heads = reshaped(product(A, V, H, "mix"), merge_heads(L, H, W), (L, H * W))
    out = projected(heads, "W_O", point)

    angles = torch.arange(L, dtype=torch.float64)[:, None]

    def turned(x):
        first, second = x.chunk(2, -1)
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)

    def attention(X, W_Q, W_K, W_V, W_O, gamma):
        q = (X @ W_Q).view(L, H, W).transpose(0, 1)
        q = q / (q.square().mean(-1, keepdim=True) + 0.2).sqrt() * gamma
        scores = turned(q) @ turned(X @ W_K).T / W**0.5
        weights = scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
        return (weights @ (X @ W_V)).transpose(0, 1).reshape(L, H * W) @ W_O

    check_all_blocks(out, attention, point)


def test_swiglu():
    point = random_point(3, X=(2, 3), W_1=(3, 2), W_3=(3, 2), W_2=(2, 3))
    X = Variable("X", point["X"])
    U = projected(X, "W_1", point)
    gate, value = Composite(ActivationAt("silu", U.value), {"X": U}), projected(X, "W_3", point)
    hidden = Composite(HadamardAt(gate.value, value.value), {"X": gate, "Y": value})
    out = projected(hidden, "W_2", point)
    check_all_blocks(out, lambda X, W_1, W_3, W_2: (silu(X @ W_1) * (X @ W_3)) @ W_2, point)


def test_one_head_put_together_is_the_attention_chapter_exactly():
    """The chain rule over the parts and the closed forms of the papers give one rational matrix, with ==."""
    shapes = {"X": (2, 2), "W_Q": (2, 3), "W_K": (2, 3), "W_V": (2, 2)}
    point = {name: integers(seed, *shapes[name]) for seed, name in enumerate(shapes)}
    weights = np.array([[Fraction(1, 3), Fraction(2, 3)], [Fraction(3, 4), Fraction(1, 4)]], dtype=object)
    closed = AttentionAt(**point, scale=Fraction(1, 2), weights=weights)
    X = Variable("X", point["X"])
    T = product(projected(X, "W_Q", point), projected(X, "W_K", point), 1, "scores", Fraction(1, 2))
    A = Composite(SoftmaxAt(T.value, weights=weights), {"T": T})
    out = product(A, projected(X, "W_V", point), 1, "mix")
    assert out.value.tolist() == closed.value.tolist()
    for i in shapes:
        assert out.jacobian(i).dense().tolist() == closed.jacobian(i).dense().tolist()
        for j in shapes:
            like = point["X"]
            assert out.hessian(i, j).shape == (size(shape_of(out.value)) * size(shapes[i]), size(shapes[j]))
            assert out.hessian(i, j).dense(like).tolist() == closed.hessian(i, j).dense(like).tolist(), (i, j)
