"""Blocks and whole models: attention, network, embeddings and heads by hand, parameters, padding, Admin's profile, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks_reference import attention_by_hand, feedforward_by_hand, norm_by_hand
from curvature_reference import draw, randomised
from torch import nn

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS, GATED, PLACEMENTS, Attention, FeedForward, GroupNorm, TokenEmbedding, profile_admin

PLAIN = [(1, 3, False), (1, None, True), (3, 5, True)]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "sandwhich"}, "TransformerBlock: placement='sandwhich' is not known; did you mean 'sandwich'? All "),
        ({"norm": "batchnorm"}, "TransformerBlock: norm='batchnorm' is not known; did you mean 'layernorm'"),
        ({"norm": "l2", "placement": "qk-post"}, "Attention: norm='l2' is not known; choose one of layernorm, rmsnorm"),
        ({"activation": "swish"}, "FeedForward: activation='swish' is not known; did you mean 'swiglu'? Choose one of relu, "),
        ({"n_heads": 3}, "Attention: d_model=4 does not split into n_heads=3 equal heads"),
        ({"n_heads": 4, "n_kv_heads": 3}, "Attention: n_kv_heads=3 does not divide n_heads=4"),
        ({"n_heads": 4, "rotary": True}, "Attention: rotary positions turn pairs of features, and d_k=1 is odd"),
        ({"d_v": 3}, "Attention: n_heads=1 values of d_v=3 do not make up d_model=4; pass output_projection=True"),
        ({"d_ff": -1}, "FeedForward: d_ff=-1, expected at least 1"),
        ({"eps": -1e-5}, "TransformerBlock: eps=-1e-05, expected 0 or more"),
        ({"placement": "group-ln", "groups": 3}, "TransformerBlock: d_model=4 does not split into groups=3 equal groups"),
        ({"n_heads": 0}, "Attention: n_heads=0, expected at least 1"),
        ({"n_heads": 4, "n_kv_heads": 0}, "Attention: n_kv_heads=0, expected at least 1"),
        ({"norm_scope": "heads"}, "Attention: norm_scope='heads' is not known"),
        ({"d_k": 0}, "Attention: d_k=0, expected at least 1"),
        ({"eps": float("nan")}, "TransformerBlock: eps=nan, expected 0 or more"),
        ({"eps": None}, "TransformerBlock: eps=None, expected 0 or more"),
        ({"placement": "group-ln", "groups": 0}, "TransformerBlock: groups=0, expected at least 1"),
        ({"placement": "lns", "scale_init": 0.5}, "TransformerBlock: scale_init=0.5, and 'lns' has no such number"),
        ({"placement": "pre", "factor": 0.5}, "TransformerBlock: factor=0.5, and 'pre' has no such number; drop factor="),
        ({"placement": "lns", "layer": 0}, "TransformerBlock: layer=0, expected at least 1"),
        ({"placement": "mix-ln", "alpha": 1.5}, "TransformerBlock: alpha=1.5, expected the fraction of Post-Norm blocks"),
    ],
)  # fmt: skip
def test_what_cannot_be_built(options, message):
    with pytest.raises(hk.InputError) as caught:
        hk.TransformerBlock(**{"d_model": 4, "d_ff": 5, **options})
    assert str(caught.value).startswith(message)


def test_norms_of_unknown_letters():
    with pytest.raises(hk.InputError, match="expected letters of 'qkvc'"):
        Attention(4, norms="qo")


@pytest.mark.parametrize("mask", [torch.zeros(2, 3), torch.zeros(3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)])
def test_a_padding_mask_is_boolean_and_has_an_entry_for_each_token(mask):
    with pytest.raises(hk.InputError, match=r"expected torch.bool \(2, 3\), True where a token is padding"):
        hk.TransformerBlock(4, 5).double()(draw(2, 3, 4), mask)


IDS = torch.tensor([[3, 0, 6, 2], [1, 1, 5, 4]])
PADDING = torch.tensor([[False, False, False, False], [False, False, True, True]])


def model(placement="pre", n_layers=2, **options) -> hk.Transformer:
    return randomised(hk.Transformer(7, 4, 5, n_layers, 2, placement, **{"causal": True, **options}))


def layernorm(module, x):
    return norm_by_hand("layernorm", x, module.weight.detach(), module.bias.detach())


def stream(m, ids):
    x = m.embedding.W_E[ids]
    for block in m.blocks:
        x = block(x)
    return x.detach()


def test_vision_transformer_by_hand():
    m = randomised(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, n_blocks=2, placement="pre", d_k=2))
    patches = draw(2, 3, 5)
    tokens = patches @ m.embedding.W_E + m.embedding.b_E + m.embedding.P
    out = m.blocks[1](m.blocks[0](tokens))
    expected = sum(out[:, i] for i in range(3)) / 3 @ m.head.W_C + m.head.b_C
    assert m(patches).shape == (2, 2)
    assert (m(patches) - expected).abs().max() < 1e-13
    assert len(list(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, n_blocks=2).parameters())) == 3 + 2 * 9 + 2
    assert hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, placement="pre", final_norm=None).final_norm is not None


def test_token_head_by_hand_tied_and_not():
    tied, own = model(), model(tied=False)
    for m, matrix in ((tied, tied.embedding.W_E.T), (own, own.head.W_C)):
        assert (m(IDS) - layernorm(m.final_norm, stream(m, IDS)) @ matrix).abs().max() < 1e-13
    names = dict(own.named_parameters())
    assert set(names) - set(dict(tied.named_parameters())) == {"head.W_C"}
    assert names["head.W_C"].shape == (4, 7)


def test_a_tied_head_stays_one_parameter():
    m = model()
    for twin in (m, copy.deepcopy(m), m.float(), m.double()):
        assert twin.head.W_E is twin.embedding.W_E
    loaded = hk.Transformer(7, 4, 5, 2, 2, causal=True).double()
    loaded.load_state_dict(m.state_dict())
    assert torch.equal(loaded(IDS), m(IDS))
    assert loaded.head.W_E is loaded.embedding.W_E


def test_learned_positions_by_hand():
    m = model(max_len=5, n_layers=1, head=None, final_norm=False)
    assert (m(IDS) - m.blocks[0](m.embedding.W_E[IDS] + m.embedding.P[:4])).abs().max() < 1e-13


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", ["mean", "class"])
def test_class_heads_by_hand(head, causal):
    m = model(head=head, n_classes=3, causal=causal)
    rows = slice(0, 4) if head == "mean" else slice(3, 4) if causal else slice(0, 1)
    z = layernorm(m.final_norm, stream(m, IDS[:1])[0])
    expected = z[rows].mean(0) @ m.head.W_C + m.head.b_C
    assert (m(IDS[:1])[0] - expected).abs().max() < 1e-13
    padded = m(IDS, PADDING)
    assert (padded[0] - expected).abs().max() < 1e-13
    assert (padded[1] - m(IDS[1:, :2])[0]).abs().max() < 1e-13  # as if the padding were not there


def test_the_last_token_is_read_behind_padding_in_front():
    m = model(head="class", n_classes=3)
    for kept in (2, 1):
        padding = torch.arange(4) < torch.tensor([[0], [4 - kept]])
        assert (m(IDS, padding)[1] - m(IDS[1:, -kept:])[0]).abs().max() < 1e-13
    assert repr(m.head) == "ClassHead(4 -> 3, last token)"


FINAL = {"post": False, "deepnorm": False, "admin": False, "pre": True, "hybridnorm": True, "mix-ln": True, "post-shifted": True}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stack_of_every_placement(placement):
    m = hk.Transformer(7, 6, 5, 3, 2, placement, causal=True, rotary=False, seed=0).double()
    assert m(IDS).shape == (2, 4, 7)
    assert (m.final_norm is not None) == FINAL.get(placement, True)
    assert (m.embedding_norm is not None) == (placement == "embednorm-hybridnorm")
    assert [(block.layer, block.n_layers) for block in m.blocks] == [(1, 3), (2, 3), (3, 3)]
    expected = 6 * 7 + sum(p.numel() for block in m.blocks for p in block.parameters())
    assert sum(p.numel() for p in m.parameters()) == expected + 12 * ((m.final_norm is not None) + (m.embedding_norm is not None))
    assert hk.Transformer(7, 6, 5, 1, placement=placement, final_norm=False).final_norm is None
    assert hk.Transformer(7, 6, 5, 1, placement=placement, final_norm=True).final_norm is not None


def test_norm_of_the_embedding_by_hand():
    m = model("embednorm-hybridnorm", n_layers=1, head=None, final_norm=False)
    assert (m(IDS) - m.blocks[0](layernorm(m.embedding_norm, m.embedding.W_E[IDS].detach()))).abs().max() < 1e-13


def test_admins_profile_by_hand():
    m = hk.Transformer(7, 4, 5, 2, 2, "admin", seed=3).double()
    seen, x = [], m.embedding.W_E[IDS].detach()
    for block in m.blocks:
        f = block.attention(x).detach()
        y = layernorm(block.norm_1, x + f)
        g = block.feedforward(y).detach()
        x = layernorm(block.norm_2, y + g)
        seen += [f.numpy().var(), g.numpy().var()]
    expected = [(1 + sum(seen[:i])) ** 0.5 for i in range(4)]
    m.blocks[1].omega_1.data += 3  # what was there before does not matter
    found = profile_admin(m, IDS)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] == 1
    assert m.blocks[1].omega_2.tolist() == pytest.approx([expected[3]] * 4, rel=1e-15)
    assert profile_admin(m, {"inputs": IDS}) == pytest.approx(expected, rel=1e-12)
    assert not m.blocks[0].attention._forward_hooks
    with pytest.raises(hk.InputError, match="has no block with placement='admin'; build it with that placement"):
        profile_admin(model(), IDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "tokens"}, "Transformer: head='tokens' is not known; did you mean 'token'?"),
        ({"head": "mean"}, "Transformer: head='mean' needs n_classes="),
        ({"n_classes": 3}, "Transformer: head='token' has no classes; drop n_classes=3"),
        ({"head": "class", "n_classes": 0}, "ClassHead: n_classes=0, expected at least 1"),
        ({"initialisation": "megatorn"}, "initialise: scheme='megatorn' is not known; did you mean 'megatron'?"),
        ({"placement": "lms"}, "Transformer: placement='lms' is not known"),
        ({"vocab_size": 0}, "TokenEmbedding: vocab_size=0, expected at least 1"),
        ({"max_len": 0}, "TokenEmbedding: max_len=0, expected at least 1"),
        ({"n_layers": 0}, "Transformer: n_layers=0, expected at least 1"),
    ],
)
def test_models_that_cannot_be_built(options, message):
    with pytest.raises(hk.InputError) as caught:
        hk.Transformer(**{"vocab_size": 7, "d_model": 4, "d_ff": 5, "n_layers": 1, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 7]]), r"token ids from 0 to 7; expected 0 to 6 \(vocab_size - 1\)"),
        (torch.tensor([[-1, 3]]), r"token ids from -1 to 3; expected 0 to 6"),
        (torch.tensor([[0.0, 1.0]]), r"the token ids are torch.float32; expected torch.int64"),
        (torch.zeros(1, 4, dtype=torch.int64), r"the sequence has 4 tokens and there are 3 learned positions; pass max_len=4 or more"),
    ],
)  # fmt: skip
def test_ids_that_cannot_be_embedded(ids, message):
    with pytest.raises(hk.InputError, match=message):
        TokenEmbedding(7, 4, max_len=3)(ids)
