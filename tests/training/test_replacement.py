"""replace_norms: the blocks of a library under another placement, beside the same equations written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessiankit as hk

hf = pytest.importorskip("transformers")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "vocab_size": 11}
SIZES = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
IDS = torch.tensor([[2, 5, 3, 7, 4], [9, 2, 2, 6, 8]])


def generic(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def llama() -> Any:
    torch.manual_seed(0)
    return generic(hf.LlamaForCausalLM(hf.LlamaConfig(**SPECIAL, **SIZES)))


def gpt2() -> Any:
    torch.manual_seed(0)
    return generic(hf.GPT2LMHeadModel(hf.GPT2Config(**SPECIAL, n_positions=16, n_embd=4, n_layer=2, n_head=2)))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_layernorm_scaling_is_that_of_the_gains() -> None:
    model, scaled = llama(), llama()
    assert hk.replace_norms(model, "lns", {"input_ids": IDS}) is model
    with torch.no_grad():
        for layer, block in enumerate(scaled.model.layers, 1):
            block.input_layernorm.weight /= layer**0.5
            block.post_attention_layernorm.weight /= layer**0.5
    assert torch.allclose(logits(model), logits(scaled), rtol=0, atol=1e-12)
    assert model.state_dict().keys() == llama().state_dict().keys()
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def by_hand(model: Any, placement: str) -> Tensor:
    """The logits of Llama with blocks written out."""
    inner = model.model
    with torch.no_grad():
        x = inner.embed_tokens(IDS)
        positions = inner.rotary_emb(x, torch.arange(5)[None])
        mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for block in inner.layers:
            options = {"position_embeddings": positions, "attention_mask": mask}

            def attention(z: Tensor, block: Any = block, options: dict[str, Any] = options) -> Tensor:
                return block.self_attn(hidden_states=z, **options)[0]

            one, two = block.input_layernorm, block.post_attention_layernorm
            if placement == "post":
                y = one(x + attention(x))
                x = two(y + block.mlp(y))
            elif placement == "sandwich":
                unit = type(one)(8, eps=one.variance_epsilon).double()
                y = x + unit(attention(one(x)))
                x = y + unit(block.mlp(two(y)))
            elif placement == "skipinit":
                y = x + attention(one(x)) / 3**0.5
                x = y + block.mlp(two(y)) / 3**0.5
            else:  # hybridnorm, with the norms of q, k and v in the projections
                y = two(x + attention(x))
                x = y + block.mlp(y)
        return model.lm_head(inner.norm(x))


@pytest.mark.parametrize("placement", ["post", "sandwich", "skipinit"])
def test_a_placement_is_its_equation(placement: str) -> None:
    model, plain = llama(), llama()
    hk.replace_norms(model, placement, IDS)
    assert torch.allclose(logits(model), by_hand(plain, placement), rtol=0, atol=1e-11)
    assert float((logits(model) - logits(plain)).abs().max()) > 0.01


class Normed(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(self.linear(x).unflatten(-1, (-1, 4)), (4,), eps=1e-6).flatten(-2)


def test_hybridnorm_normalises_queries_keys_and_values_of_each_head() -> None:
    model, plain = llama(), llama()
    hk.replace_norms(model, "hybridnorm", IDS)
    for block in plain.model.layers:
        for letter in "qkv":
            setattr(block.self_attn, f"{letter}_proj", Normed(getattr(block.self_attn, f"{letter}_proj")))
    assert torch.allclose(logits(model), by_hand(plain, "hybridnorm"), rtol=0, atol=1e-11)
    assert "model.layers.0.self_attn.q_proj.weight" in model.state_dict()


def test_gpt2_trains_and_has_a_hessian() -> None:
    model = hk.replace_norms(gpt2(), "layerscale", IDS)
    H = hk.hessian(model, {"input_ids": IDS, "labels": IDS}, params=["transformer.h.1.lambda_*"])
    assert H.names == ("transformer.h.1.lambda_1", "transformer.h.1.lambda_2")
    assert hk.check(model, {"input_ids": IDS, "labels": IDS}, loss=None, params=["transformer.h.1.lambda_*"])


REFUSED = {
    "no place for norms of queries": (gpt2, "hybridnorm", "a GPT2Attention, has no place for them; expected q_proj, k_proj"),
    "groups": (llama, "group-ln", "changes more than the blocks' places of norms"),
    "an unknown placement": (llama, "prenorm", "'prenorm' is not known"),
    "not pre-norm": (
        lambda: generic(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SPECIAL, **{**SIZES, "num_key_value_heads": 2}))),
        "lns",
        "GPTNeoXLayer is not pre-norm: as .* its model differs by",
    ),
    "other parts": (
        lambda: generic(hf.BertForMaskedLM(hf.BertConfig(**SPECIAL, **{**SIZES, "num_key_value_heads": 2}))),
        "lns",
        "is a BertLayer; expected two norms",
    ),
    "replaced already": (
        lambda: hk.replace_norms(llama(), "post", IDS),
        "lns",
        "block 'model.layers.0' is 'post' already; begin with",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_structure_is_refused_and_left_as_it_was(name: str) -> None:
    make, placement, message = REFUSED[name]
    model = make()
    before = logits(model)
    with pytest.raises(hk.InputError, match=f"^replace_norms: .*{message}"):
        hk.replace_norms(model, placement, IDS)
    assert torch.equal(logits(model), before)
