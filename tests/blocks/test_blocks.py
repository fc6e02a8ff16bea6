"""What a block consists of: attention and network by hand and as torch has them, parameters, errors, padding."""

from __future__ import annotations

import pytest
import torch
from blocks_reference import attention_by_hand, feedforward_by_hand, norm_by_hand
from curvature_reference import draw, randomised
from torch import nn

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS, GATED, PLACEMENTS, Attention, FeedForward, GroupNorm

PLAIN = [(1, 3, False), (1, None, True), (2, None, True), (3, 5, True), (2, 1, False)]


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "d_k", "project"), PLAIN)
def test_attention_by_hand(heads, d_k, project, bias, causal):
    attention = randomised(Attention(6, heads, d_k=d_k, output_projection=project, bias=bias, causal=causal))
    x = draw(4, 6)
    expected = attention_by_hand(x, parameters(attention), heads, causal)
    assert (attention(x) - expected).abs().max() < 1e-13


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("normed", "scope"), [("", "head"), ("qkvc", "head"), ("qkvc", "full"), ("kc", "head")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_everything_inside_the_attention_by_hand(heads, kv_heads, normed, scope, norm, rotary):
    options = {"d_k": 4, "d_v": 3, "norms": normed, "norm": norm, "norm_scope": scope, "eps": 0.3}
    options |= {"n_kv_heads": kv_heads, "bias": True, "causal": True, "output_projection": True}
    attention = randomised(Attention(5, heads, rotary=rotary, rotary_theta=7.0, **options))
    x = draw(4, 5)
    expected = attention_by_hand(
        x, parameters(attention), heads, True, kv_heads=kv_heads, kind=norm, normed=normed, scope=scope, eps=0.3,
        theta=7.0 if rotary else None,
    )  # fmt: skip
    assert (attention(x) - expected).abs().max() < 1e-13 * (1 + expected.abs().max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_padding_by_hand(heads, causal):
    attention = randomised(Attention(4, heads, output_projection=True, causal=causal))
    x, padding = draw(5, 4), torch.tensor([True, False, False, True, False])
    expected = attention_by_hand(x, parameters(attention), heads, causal, padded=(0, 3))
    assert (attention(x, padding) - expected).abs().max() < 1e-13
    assert (attention(x[None], padding[None])[0] - expected).abs().max() < 1e-13


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_feedforward_by_hand(activation):
    net, y = randomised(FeedForward(4, 5, activation=activation, bias=True)), draw(3, 4)
    expected = feedforward_by_hand(y, parameters(net), activation)
    assert (net(y) - expected).abs().max() < 1e-14 * expected.abs().max()
    gate = {"W_G"} if activation in GATED else set()
    assert set(parameters(FeedForward(4, 5, activation=activation))) == {"W_1", "W_2"} | gate


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_group_norm_by_hand(groups, affine, kind):
    norm, x = randomised(GroupNorm(6, groups, kind=kind, eps=0.3, affine=affine)), draw(2, 3, 6)
    parts = torch.cat([norm_by_hand(kind, part, eps=0.3) for part in x.tensor_split(groups, dim=-1)], -1)
    expected = parts if not affine else parts * norm.weight if kind == "rmsnorm" else parts * norm.weight + norm.bias
    assert (norm(x) - expected).abs().max() < 1e-14
    assert len(parameters(norm)) == affine * (2 if kind == "layernorm" else 1)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequences_are_treated_one_by_one(placement, heads):
    block = randomised(hk.TransformerBlock(4, 5, heads, placement, causal=True))
    x, padding = draw(2, 3, 4), torch.tensor([[False, False, False], [True, False, False]])
    out = block(x)
    assert out.shape == x.shape
    assert block(x[:1]).shape == (1, 3, 4)
    assert (out - torch.stack([block(x[0]), block(x[1])])).abs().max() < 1e-14 * (1 + out.abs().max())
    later = x.clone()
    later[:, 2] += 1
    assert torch.equal(block(later)[:, :2], out[:, :2])  # causal
    masked, without = block(x, padding), block(x[1:, 1:])
    assert torch.equal(masked[0], out[0])
    assert (masked[1, 1:] - without[0]).abs().max() < 1e-13 * (1 + out.abs().max())  # padding is as if not there


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
    gated = set(shapes(hk.TransformerBlock(4, 5, bias=True, activation="swiglu"))) - plain
    assert gated == {f"feedforward.{n}" for n in ("b_1", "b_2", "b_G", "W_G")}
    heads = shapes(hk.TransformerBlock(4, 5, 2, d_k=3, attention_bias=True))
    assert set(heads) - plain == {f"attention.{n}" for n in ("W_O", "b_Q", "b_K", "b_V", "b_O")}
    assert heads["attention.W_Q"] == (4, 6)
    assert heads["attention.b_K"] == (6,)
    grouped = shapes(hk.TransformerBlock(8, 5, 4, d_k=3, d_v=5, n_kv_heads=2, attention_bias=True))
    expected = {"W_Q": (8, 12), "W_K": (8, 6), "W_V": (8, 10), "W_O": (20, 8), "b_K": (6,), "b_V": (10,), "b_O": (8,)}
    assert {n: grouped[f"attention.{n}"] for n in expected} == expected
    assert "attention.W_O" not in shapes(hk.TransformerBlock(4, 5, 2, output_projection=False))
    assert "attention.W_O" in shapes(hk.TransformerBlock(4, 5, output_projection=True))
    assert plain - set(shapes(hk.TransformerBlock(4, 5, norm="rmsnorm"))) == {"norm_1.bias", "norm_2.bias"}
    assert not any("norm" in name for name in shapes(hk.TransformerBlock(4, 5, affine=False)))


def test_norms_inside_the_attention_share_one_gain_or_have_one_for_each_head():
    options = {"n_heads": 4, "n_kv_heads": 2, "d_k": 3, "placement": "qkvc-post", "norm": "rmsnorm"}
    shared, full = (shapes(hk.TransformerBlock(8, 5, norm_scope=scope, **options)) for scope in ("head", "full"))
    assert [shared[f"attention.norm_{letter}.weight"] for letter in "qkvc"] == [(3,), (3,), (2,), (2,)]
    assert [full[f"attention.norm_{letter}.weight"] for letter in "qkvc"] == [(12,), (6,), (4,), (8,)]


def test_slices_of_grouped_heads():
    slices = hk.named_slices(hk.TransformerBlock(8, 5, 4, d_k=3, n_kv_heads=2, attention_bias=True), heads=True)
    assert slices["attention.query.head_3.weight"] == "attention.W_Q[:, 9:12]"
    assert slices["attention.key.head_1.weight"] == "attention.W_K[:, 3:6]"
    assert slices["attention.value.head_1.bias"] == "attention.b_V[2:4]"
    assert "attention.key.head_2.weight" not in slices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "sandwhich"}, "TransformerBlock: placement='sandwhich' is not known; did you mean 'sandwich'? All "),
        ({"placement": "HybridNorm"}, "TransformerBlock: placement='HybridNorm' is not known; did you mean 'hybridnorm' or"),
        ({"placement": "xyz"}, "TransformerBlock: placement='xyz' is not known; all "),
        ({"norm": "batchnorm"}, "TransformerBlock: norm='batchnorm' is not known; did you mean 'layernorm'"),
        ({"norm": "l2", "placement": "qk-post"}, "Attention: norm='l2' is not known; choose one of layernorm, rmsnorm"),
        ({"activation": "swish"}, "FeedForward: activation='swish' is not known; did you mean 'swiglu'? Choose one of relu, "),
        ({"norm_scope": "heads"}, "Attention: norm_scope='heads' is not known; did you mean 'head'?"),
        ({"n_heads": 3}, "Attention: d_model=4 does not split into n_heads=3 equal heads"),
        ({"n_heads": 0}, "Attention: n_heads=0, expected at least 1"),
        ({"n_heads": 4, "n_kv_heads": 3}, "Attention: n_kv_heads=3 does not divide n_heads=4"),
        ({"n_heads": 4, "n_kv_heads": 0}, "Attention: n_kv_heads=0, expected at least 1"),
        ({"n_heads": 4, "rotary": True}, "Attention: rotary positions turn pairs of features, and d_k=1 is odd"),
        ({"d_v": 3}, "Attention: n_heads=1 values of d_v=3 do not make up d_model=4; pass output_projection=True"),
        ({"d_k": 0}, "Attention: d_k=0, expected at least 1"),
        ({"d_ff": -1}, "FeedForward: d_ff=-1, expected at least 1"),
        ({"eps": -1e-5}, "TransformerBlock: eps=-1e-05, expected 0 or more"),
        ({"eps": float("nan")}, "TransformerBlock: eps=nan, expected 0 or more"),
        ({"eps": None}, "TransformerBlock: eps=None, expected 0 or more"),
        ({"placement": "group-ln", "groups": 3}, "TransformerBlock: d_model=4 does not split into groups=3 equal groups"),
        ({"placement": "group-ln", "groups": 0}, "TransformerBlock: groups=0, expected at least 1"),
        ({"placement": "pre", "factor": 0.5}, "TransformerBlock: factor=0.5, and 'pre' has no such number; drop factor="),
        ({"placement": "lns", "scale_init": 0.5}, "TransformerBlock: scale_init=0.5, and 'lns' has no such number"),
        ({"placement": "lns", "layer": 0}, "TransformerBlock: layer=0, expected at least 1"),
        ({"placement": "mix-ln", "alpha": 1.5}, "TransformerBlock: alpha=1.5, expected the fraction of Post-Norm blocks"),
    ],
)  # fmt: skip
def test_what_cannot_be_built(options, message):
    with pytest.raises(hk.InputError) as caught:
        hk.TransformerBlock(**{"d_model": 4, "d_ff": 5, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("mask", [torch.zeros(2, 3), torch.zeros(3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)])
def test_a_padding_mask_is_boolean_and_has_an_entry_for_each_token(mask):
    with pytest.raises(hk.InputError, match=r"expected torch.bool \(2, 3\), True where a token is padding"):
        hk.TransformerBlock(4, 5).double()(draw(2, 3, 4), mask)


def test_what_a_block_prints():
    assert "placement=pre\n" in repr(hk.TransformerBlock(4, 5, placement="pre"))
    starred = repr(
        hk.TransformerBlock(4, 6, 2, placement="hybridnorm*", n_layers=3, rotary=True, causal=True, activation="swiglu")
    )
    assert "placement=hybridnorm*, layer 1 of 3 (pre-qkv-pre)\n" in starred
    assert "2 heads, d_k=2, d_v=2, causal, rotary theta=10000\n" in starred
    assert "(feedforward): FeedForward(4 -> 6, swiglu)" in starred
    assert repr(Attention(4, 4, n_kv_heads=2)) == "Attention(4 heads on 2, d_k=1, d_v=1)"
    assert "None" not in starred
    assert repr(GroupNorm(4, 2)) == "GroupNorm(2 x 2, layernorm, eps=1e-05)"


def test_norms_of_unknown_letters():
    with pytest.raises(hk.InputError, match="expected letters of 'qkvc'"):
        Attention(4, norms="qo")


def test_a_constant_row_without_eps_is_named_by_the_engine():
    block = randomised(hk.TransformerBlock(4, 5, eps=0.0, placement="pre"))
    x = draw(3, 4)
    x[1] = 2.0
    with pytest.raises(hk.HessiankitError, match="norm_1"):
        hk.hessian(block, x, draw(3, 4))
