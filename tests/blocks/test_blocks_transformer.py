"""Whole models: embeddings, position encodings and heads, tied heads, padding, Admin's profile, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks_reference import norm_by_hand
from curvature_reference import draw, randomised

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS, TokenEmbedding, profile_admin

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


def test_published_parameter_counts():
    """HybridNorm, Table 6: 151M, 285M and 550M; The Curse of Depth: LLaMA-130M, which has 134M with its untied head."""
    with torch.device("meta"):
        options = {"norm": "rmsnorm", "activation": "swiglu", "rotary": True, "causal": True, "initialisation": None}

        def millions(*sizes, **more):
            return round(sum(p.numel() for p in hk.Transformer(*sizes, **options, **more).parameters()) / 1e6)

        assert millions(100_278, 768, 2048, 12, 16, "hybridnorm", n_kv_heads=4) == 151
        assert millions(100_278, 1024, 4096, 12, 16, "hybridnorm", n_kv_heads=4) == 285
        assert millions(100_278, 1536, 4096, 16, 16, "hybridnorm", n_kv_heads=4) == 550
        assert millions(32_000, 768, 2048, 12, 12, "lns", tied=False) == 134


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
        ({"placement": "lms"}, "Transformer: placement='lms' is not known; did you mean 'lns'"),
        ({"initialisation": "megatorn"}, "initialise: scheme='megatorn' is not known; did you mean 'megatron'?"),
        ({"n_layers": 0}, "Transformer: n_layers=0, expected at least 1"),
        ({"vocab_size": 0}, "TokenEmbedding: vocab_size=0, expected at least 1"),
        ({"max_len": 0}, "TokenEmbedding: max_len=0, expected at least 1"),
    ],
)
def test_what_cannot_be_built(options, message):
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


def test_block_types_of_a_language_model():
    types = hk.block_types(hk.Transformer(7, 4, 5, 1, 2, "hybridnorm", max_len=4, tied=False, activation="swiglu"))
    expected = {"embedding.W_E": "Emb", "embedding.P": "Emb", "head.W_C": "Head", "final_norm.weight": "Norm"}
    inside = {"attention.norm_q.weight": "Norm", "attention.W_O": "VO", "feedforward.W_G": "FFN", "norm_2.bias": "Norm"}
    expected |= {f"blocks.0.{name}": kind for name, kind in inside.items()}
    assert {name: types[name] for name in expected} == expected
    assert "head.W_E" not in hk.block_types(hk.Transformer(7, 4, 5, 1, placement="group-ln"))


def test_check_draws_token_ids():
    m = hk.Transformer(5, 4, 3, 1, 2, "hybridnorm", norm="rmsnorm", causal=True, seed=0, head="mean", n_classes=3, max_len=2)
    assert hk.check(m.double(), loss="mse", against=("reverse-over-reverse", "jvp(grad)"))


def test_what_a_model_prints():
    text = repr(hk.Transformer(7, 4, 5, 1, max_len=3))
    assert "(embedding): TokenEmbedding(7 tokens, d_model=4, 3 positions)" in text
    assert "(head): TokenHead(4 -> 7, tied)" in text
    assert "(head): TokenHead(4 -> 7)" in repr(hk.Transformer(7, 4, 5, 1, tied=False))
    assert "(head): MeanPoolHead(4 -> 2)" in repr(hk.Transformer(7, 4, 5, 1, head="mean", n_classes=2))
