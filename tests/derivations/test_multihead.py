"""Multi-head attention: against reverse-over-reverse autograd, and against the packed form that frameworks use."""

from __future__ import annotations

import pytest
import torch
from second_order_reference import random_point
from transformer_reference import attention, check_every_block

from derivations.matrix import Zero
from derivations.multihead import MultiHeadAttentionAt, split_heads

L, d, d_K, d_v, d_out = 3, 4, 2, 3, 4


def draw(n_heads, projected=True):
    shapes = {"W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, d_v), "W_O": (d_v, d_out)}
    shapes = shapes if projected else {name: shape for name, shape in shapes.items() if name != "W_O"}
    return random_point(0, X=(L, d))["X"], [random_point(1 + h, **shapes) for h in range(n_heads)]


def named(X, heads):
    return {"X": X, **{f"{name}[{h}]": W for h, head in enumerate(heads) for name, W in head.items()}}


def by_heads(n_heads, causal=False):
    def f(X, **weights):
        heads = [{name[:3]: W for name, W in weights.items() if name.endswith(f"[{h}]")} for h in range(n_heads)]
        return sum(attention(X, **head, causal=causal) for head in heads)

    return f


@pytest.mark.parametrize("projected", [False, True])
def test_every_block_against_autograd(projected):
    X, heads = draw(2, projected)
    check_every_block(MultiHeadAttentionAt(X, heads), by_heads(2), named(X, heads))


def test_causal_mask():
    X, heads = draw(2)
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    check_every_block(MultiHeadAttentionAt(X, heads, mask=mask), by_heads(2, causal=True), named(X, heads))


def test_blocks_across_heads_are_zero():
    operation = MultiHeadAttentionAt(*draw(3))
    for i in ("W_Q[0]", "W_V[0]", "W_O[0]"):
        for j in ("W_Q[1]", "W_K[2]", "W_V[2]"):
            assert isinstance(operation.hessian(i, j), Zero)


def test_split_heads_is_the_packed_attention_of_torch():
    n_heads = 2
    point = random_point(5, X=(1, L, d), in_proj=(3 * d, d), out_proj=(d, d))
    packed = torch.nn.MultiheadAttention(d, n_heads, bias=False, batch_first=True, dtype=torch.float64)
    packed.load_state_dict({"in_proj_weight": point["in_proj"], "out_proj.weight": point["out_proj"]})
    W_Q, W_K, W_V = point["in_proj"].T.split(d, dim=1)
    operation = MultiHeadAttentionAt(point["X"][0], split_heads(W_Q, W_K, W_V, point["out_proj"].T, n_heads))
    expected = packed(point["X"], point["X"], point["X"], need_weights=False)[0][0]
    assert torch.allclose(operation.value, expected, rtol=0, atol=1e-12)


def test_errors():
    X, heads = draw(2)
    with pytest.raises(ValueError, match="0 heads"):
        MultiHeadAttentionAt(X, [])
    with pytest.raises(ValueError, match="one output shape"):
        MultiHeadAttentionAt(X, [heads[0], {**heads[1], "W_O": heads[1]["W_O"][:, :2]}])
    with pytest.raises(ValueError, match="do not divide into 3 heads"):
        split_heads(*(torch.ones(4, 4) for _ in range(4)), n_heads=3)
    with pytest.raises(ValueError, match="no argument is called 'W_Q'"):
        MultiHeadAttentionAt(X, heads).jacobian("W_Q")
