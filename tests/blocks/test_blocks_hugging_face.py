"""Llama, Qwen3, OLMo 2 and GPT-2 as settings of ``Transformer``: their values after copying their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import InDouble, generic
from torch import Tensor, nn

import hessiankit as hk

pytest.importorskip("transformers")

import transformers as hf

VOCABULARY, LAYERS, D, FF, HEADS, KV_HEADS, LENGTH = 13, 2, 12, 10, 4, 2, 7
IDS = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
PADDING = torch.zeros(3, LENGTH, dtype=torch.bool)
PADDING[1, 5:] = True
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager", "use_cache": False}
THETA = 65536.0
"""With heads of width 4, the frequencies are 1 and 1/256: exact in the float32 that Hugging Face makes them in."""
DECODER = {
    **SPECIAL, "vocab_size": VOCABULARY, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 16, "rms_norm_eps": 1e-3,
    "head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip
MODERN = {
    "n_kv_heads": KV_HEADS, "d_k": 4, "d_v": 4, "norm": "rmsnorm", "activation": "swiglu", "causal": True, "rotary": True,
    "rotary_theta": THETA, "eps": 1e-3,
}  # fmt: skip


def copied(model: hk.Transformer, names: dict[str, Tensor]) -> hk.Transformer:
    """Fill every parameter of our model from that of Hugging Face, each used once."""
    own = dict(model.double().named_parameters())
    assert set(own) == set(names)
    for name, p in own.items():
        assert p.shape == names[name].shape, name
        p.data = names[name].detach().clone()
    return model


def of_decoder(hugging: nn.Module, **norms: str) -> dict[str, Tensor]:
    """Our names of the weights of a Llama-like model; ``norms`` maps our norms to its own."""
    names = {"embedding.W_E": hugging.model.embed_tokens.weight, "final_norm.weight": hugging.model.norm.weight}
    if hugging.lm_head.weight is not hugging.model.embed_tokens.weight:
        names["head.W_C"] = hugging.lm_head.weight.T
    for i, layer in enumerate(hugging.model.layers):
        for letter in "QKVO":
            names[f"blocks.{i}.attention.W_{letter}"] = getattr(layer.self_attn, f"{letter.lower()}_proj").weight.T
        for letter, part in (("1", "up"), ("G", "gate"), ("2", "down")):
            names[f"blocks.{i}.feedforward.W_{letter}"] = getattr(layer.mlp, f"{part}_proj").weight.T
        for ours, name in norms.items():
            names[f"blocks.{i}.{ours.replace('__', '.')}.weight"] = layer.get_submodule(name).weight
    return names


def assert_same_values(own: hk.Transformer, hugging: nn.Module) -> None:
    hugging = InDouble(hugging)
    for padding in (None, PADDING):
        attention_mask = torch.ones_like(IDS) if padding is None else (~padding).long()
        expected = hugging(input_ids=IDS, attention_mask=attention_mask).logits
        found, kept = own(IDS, padding), ~PADDING if padding is not None else slice(None)
        assert expected.dtype == found.dtype == torch.float64
        assert (found - expected)[kept].abs().max() < 1e-10 * expected.abs().max()
    shuffled = own(IDS.flip(1)) - hugging(input_ids=IDS).logits
    assert shuffled.abs().max() > 1e-3 * expected.abs().max()


def pre_norms(**inside: str) -> dict[str, str]:
    return {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", **inside}


INSIDE = {"attention__norm_q": "self_attn.q_norm", "attention__norm_k": "self_attn.k_norm"}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    hugging = generic(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=tied)))
    own = hk.Transformer(VOCABULARY, D, FF, LAYERS, HEADS, "pre", tied=tied, **MODERN)
    assert_same_values(copied(own, of_decoder(hugging, **pre_norms())), hugging)


def test_qwen3():
    hugging = generic(hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, tie_word_embeddings=False)))
    own = hk.Transformer(VOCABULARY, D, FF, LAYERS, HEADS, "pre-qk-pre", tied=False, **MODERN)
    assert_same_values(copied(own, of_decoder(hugging, **pre_norms(**INSIDE))), hugging)


def test_gpt2():
    config: dict[str, Any] = {
        **SPECIAL, "vocab_size": VOCABULARY, "n_positions": 9, "n_embd": D, "n_layer": LAYERS, "n_head": HEADS,
    }  # fmt: skip
    hugging = generic(hf.GPT2LMHeadModel(hf.GPT2Config(**config, n_inner=FF, layer_norm_epsilon=1e-3)))
    own = hk.Transformer(
        VOCABULARY, D, FF, LAYERS, HEADS, "pre", max_len=9, activation="gelu_tanh", bias=True, attention_bias=True, causal=True, eps=1e-3
    )  # fmt: skip
    body = hugging.transformer
    names = {"embedding.W_E": body.wte.weight, "embedding.P": body.wpe.weight}
    names |= {"final_norm.weight": body.ln_f.weight, "final_norm.bias": body.ln_f.bias}
    for i, layer in enumerate(body.h):
        for letter, weight, bias in zip(
            "QKV", layer.attn.c_attn.weight.chunk(3, 1), layer.attn.c_attn.bias.chunk(3), strict=True
        ):
            names |= {f"blocks.{i}.attention.W_{letter}": weight, f"blocks.{i}.attention.b_{letter}": bias}
        linear = {"attention.{}_O": layer.attn.c_proj, "feedforward.{}_1": layer.mlp.c_fc, "feedforward.{}_2": layer.mlp.c_proj}
        for ours, part in linear.items():  # GPT-2 multiplies from the right, too
            names |= {f"blocks.{i}.{ours.format('W')}": part.weight, f"blocks.{i}.{ours.format('b')}": part.bias}
        for ours, part in (("norm_1", layer.ln_1), ("norm_2", layer.ln_2)):
            names |= {f"blocks.{i}.{ours}.weight": part.weight, f"blocks.{i}.{ours}.bias": part.bias}
    assert_same_values(copied(own, names), hugging)
