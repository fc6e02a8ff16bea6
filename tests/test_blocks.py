"""Transformer blocks against formulas written by hand and against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS, NORMS, PLACEMENTS, Attention, FeedForward

BY_HAND = {
    "relu": lambda x: x.clamp_min(0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    "identity": lambda x: x,
}


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter to a generic value, gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.double().parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return module


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attention_by_hand(x: torch.Tensor, p: dict[str, torch.Tensor], heads: int, causal: bool) -> torch.Tensor:
    """softmax(x_i W_Q^h . x_j W_K^h / sqrt(d_K)) over j, head by head and token by token, for one sequence."""
    length, width = x.shape
    q, k, v = (x @ p[f"W_{c}"] + p.get(f"b_{c}", 0) for c in "QKV")
    dk, dv = q.shape[1] // heads, width // heads
    out = torch.zeros(length, width, dtype=x.dtype)
    for h in range(heads):
        for i in range(length):
            seen = range(i + 1) if causal else range(length)
            score = torch.stack([q[i, h * dk : (h + 1) * dk] @ k[j, h * dk : (h + 1) * dk] / math.sqrt(dk) for j in seen]).exp()
            out[i, h * dv : (h + 1) * dv] = sum(
                s * v[j, h * dv : (h + 1) * dv] for s, j in zip(score / score.sum(), seen, strict=True)
            )
    return out @ p["W_O"] + p.get("b_O", 0) if "W_O" in p else out


def norm_by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else x
    y = centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    return y + module.bias if isinstance(module, nn.LayerNorm) else y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "d_k", "project"), [(1, 3, False), (1, None, True), (2, None, True), (3, 5, True), (2, 1, False)]
)
def test_attention_by_hand(heads, d_k, project, bias, causal):
    attention = randomised(Attention(6, heads, d_k=d_k, output_projection=project, bias=bias, causal=causal))
    x = draw(4, 6)
    expected = attention_by_hand(x, dict(attention.named_parameters()), heads, causal)
    assert (attention(x) - expected).abs().max() < 1e-13


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(causal):
    attention = randomised(Attention(6, 2, output_projection=True, bias=True, causal=causal))
    theirs = nn.MultiheadAttention(6, 2, batch_first=True).double()
    theirs.in_proj_weight.data = torch.cat([attention.W_Q.T, attention.W_K.T, attention.W_V.T])
    theirs.in_proj_bias.data = torch.cat([attention.b_Q, attention.b_K, attention.b_V])
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = attention.W_O.T, attention.b_O
    x = draw(3, 5, 6)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    assert (attention(x) - theirs(x, x, x, attn_mask=mask, need_weights=False)[0]).abs().max() < 1e-13
    single = randomised(Attention(6, d_k=3, causal=causal))
    fused = nn.functional.scaled_dot_product_attention(x @ single.W_Q, x @ single.W_K, x @ single.W_V, is_causal=causal)
    assert (single(x) - fused).abs().max() < 1e-13


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feedforward_by_hand(activation):
    net, y = randomised(FeedForward(4, 5, activation=activation, bias=True)), draw(3, 4)
    expected = BY_HAND[activation](y @ net.W_1 + net.b_1) @ net.W_2 + net.b_2
    assert (net(y) - expected).abs().max() < 1e-14 * expected.abs().max()
    assert set(dict(FeedForward(4, 5, activation=activation).named_parameters())) == {"W_1", "W_2"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_block_by_hand(placement, norm):
    block = randomised(hk.TransformerBlock(4, 5, placement=placement, norm=norm, bias=True, d_k=3, causal=True, eps=1e-3))
    x, net = draw(3, 4), block.feedforward
    p = dict(block.attention.named_parameters())
    if placement == "post":
        y = norm_by_hand(block.norm_1, x + attention_by_hand(x, p, 1, True))
        expected = norm_by_hand(block.norm_2, y + BY_HAND["relu"](y @ net.W_1 + net.b_1) @ net.W_2 + net.b_2)
    else:
        y = x + attention_by_hand(norm_by_hand(block.norm_1, x), p, 1, True)
        n = norm_by_hand(block.norm_2, y)
        expected = y + BY_HAND["relu"](n @ net.W_1 + net.b_1) @ net.W_2 + net.b_2
    assert (block(x) - expected).abs().max() < 1e-13
    assert block.norm_1.eps == 1e-3


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequences_are_treated_one_by_one(placement, heads):
    block = randomised(hk.TransformerBlock(4, 5, heads, placement, causal=True))
    x = draw(2, 3, 4)
    out = block(x)
    assert out.shape == x.shape
    assert block(x[:1]).shape == (1, 3, 4)
    assert (out - torch.stack([block(x[0]), block(x[1])])).abs().max() < 1e-14
    later = x.clone()
    later[:, 2] += 1
    assert torch.equal(block(later)[:, :2], out[:, :2])  # causal


def test_vision_transformer_by_hand():
    model = randomised(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, n_blocks=2, placement="pre", d_k=2))
    patches = draw(2, 3, 5)
    tokens = patches @ model.embedding.W_E + model.embedding.b_E + model.embedding.P
    out = model.blocks[1](model.blocks[0](tokens))
    expected = sum(out[:, i] for i in range(3)) / 3 @ model.head.W_C + model.head.b_C
    assert model(patches).shape == (2, 2)
    assert (model(patches) - expected).abs().max() < 1e-13


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_parameters_of_the_papers_block():
    assert shapes(hk.TransformerBlock(4, 5, d_k=2)) == {
        "attention.W_Q": (4, 2), "attention.W_K": (4, 2), "attention.W_V": (4, 4),
        "norm_1.weight": (4,), "norm_1.bias": (4,),
        "feedforward.W_1": (4, 5), "feedforward.W_2": (5, 4),
        "norm_2.weight": (4,), "norm_2.bias": (4,),
    }  # fmt: skip


def test_parameters_that_options_add_and_remove():
    plain = set(shapes(hk.TransformerBlock(4, 5)))
    assert set(shapes(hk.TransformerBlock(4, 5, bias=True))) - plain == {"feedforward.b_1", "feedforward.b_2"}
    heads = shapes(hk.TransformerBlock(4, 5, 2, d_k=3, attention_bias=True))
    assert set(heads) - plain == {f"attention.{n}" for n in ("W_O", "b_Q", "b_K", "b_V", "b_O")}
    assert heads["attention.W_Q"] == (4, 6)
    assert heads["attention.b_K"] == (6,)
    assert "attention.W_O" not in shapes(hk.TransformerBlock(4, 5, 2, output_projection=False))
    assert "attention.W_O" in shapes(hk.TransformerBlock(4, 5, output_projection=True))
    assert plain - set(shapes(hk.TransformerBlock(4, 5, norm="rmsnorm"))) == {"norm_1.bias", "norm_2.bias"}
    assert not any("norm" in name for name in shapes(hk.TransformerBlock(4, 5, affine=False)))
    assert len(shapes(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, n_blocks=2))) == 3 + 2 * 9 + 2


def test_a_seed_fixes_the_parameters():
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, bias=True, n_heads=2).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["head.W_C"], states[2]["head.W_C"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "sandwich"}, "TransformerBlock: placement='sandwich' is not known; choose one of post, pre"),
        ({"norm": "batchnorm"}, "TransformerBlock: norm='batchnorm' is not known; choose one of layernorm, rmsnorm"),
        ({"activation": "swish"}, "FeedForward: activation='swish' is not known; choose one of relu, leaky_relu"),
        ({"n_heads": 3}, "Attention: d_model=4 does not split into n_heads=3 equal heads"),
        ({"n_heads": 0}, "Attention: n_heads=0, expected at least 1"),
        ({"d_k": 0}, "Attention: d_k=0, expected at least 1"),
        ({"d_ff": -1}, "FeedForward: d_ff=-1, expected at least 1"),
    ],
)
def test_what_cannot_be_built(options, message):
    with pytest.raises(hk.InputError) as caught:
        hk.TransformerBlock(**{"d_model": 4, "d_ff": 5, **options})
    assert str(caught.value).startswith(message)


def test_what_a_block_prints():
    assert "placement=pre" in repr(hk.TransformerBlock(4, 5, placement="pre"))
