"""Hugging Face transformers, from their configurations: tied heads, grouped queries, padding, experts, encoder and decoder.

Some of these models cast to float32 inside (norms, rotary angles, router, logits), whatever their parameters are;
``InDouble`` keeps those casts in float64, so that the agreement shows all digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import draw
from model_zoo import ATTENTIONS, QUICK, InDouble, checked, generic, images
from torch import nn

import hessiankit as hk

pytest.importorskip("transformers")

import transformers as hf

VOCABULARY = 6
TOKENS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
MASKS = {
    "padded right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "padded left": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
DECODER = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
ENCODER = {
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BERT = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 6, "pad_token_id": 0}
T5 = {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 4, "d_kv": 3, "d_ff": 5, "num_layers": 1, "num_heads": 2}
EXPERTS = {"experts_implementation": "eager", "num_experts_per_tok": 2}
GPT2 = {**SPECIAL, "vocab_size": VOCABULARY, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 5}

CAUSAL: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": lambda **o: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **o)),
    "Llama": lambda **o: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **o)),
    "Qwen2": lambda **o: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER, **o)),
    "Qwen3": lambda **o: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=2, **o)),
    "Mistral": lambda **o: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=3, **o)),
}
MIXTURES: dict[str, Callable[..., nn.Module]] = {
    "Mixtral": lambda **o: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=3, **{**EXPERTS, **o})),
    "Qwen3-MoE": lambda **o: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**DECODER, num_experts=3, moe_intermediate_size=5, head_dim=2, **{**EXPERTS, **o})
    ),
}
SPARSE = {"experts_implementation": "eager", "num_experts_per_tok": 1, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 3, "q_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2}
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def build(make: Callable[..., nn.Module], attention: str, **options: Any) -> nn.Module:
    return InDouble(generic(make(attn_implementation=attention, **options)))


def padded(side: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch with padding, and its labels, -100 where there is padding."""
    mask = MASKS[side]
    return {"input_ids": TOKENS * mask, "attention_mask": mask}, LABELS.masked_fill(mask == 0, -100)


@pytest.mark.parametrize(("name", "attention"), zip(CAUSAL, itertools.cycle(ATTENTIONS)))
def test_causal_model_with_padding(name, attention):
    side = "padded left" if name in ("GPT-2", "Qwen2") else "padded right"
    checked(build(CAUSAL[name], attention, use_cache=False), *padded(side), loss="cross_entropy")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), zip(CAUSAL, itertools.cycle(ATTENTIONS[::-1])))
def test_loss_of_a_causal_model(name, attention):
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": LABELS}
    report = checked(build(CAUSAL[name], attention, use_cache=False), batch, loss=None)
    tied = "model.lm_head.weight" not in report.hessian.names
    assert tied is (name == "GPT-2")


def test_cache():
    checked(build(CAUSAL["Llama"], "sdpa", use_cache=True), {"input_ids": TOKENS}, LABELS, loss="cross_entropy", directions=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), zip(MIXTURES, ATTENTIONS, strict=True))
def test_mixture_of_experts(name, attention):
    checked(build(MIXTURES[name], attention, use_cache=False), *padded("padded right"), loss="cross_entropy", directions=1)


@pytest.mark.slow
def test_latent_attention_that_fills_its_keys_piece_by_piece():
    sizes = {**DECODER, "num_attention_heads": 2, "moe_intermediate_size": 5, "first_k_dense_replace": 0, "n_shared_experts": 1}
    module = build(lambda **o: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**sizes, **SPARSE, **LATENT, **o})), "sdpa")
    checked(module, *padded("padded right"), loss="cross_entropy", directions=1)


def test_routing_loss():
    module = build(MIXTURES["Mixtral"], "sdpa", use_cache=False, output_router_logits=True)
    checked(module, {"input_ids": TOKENS, "labels": LABELS}, loss=None, directions=1)


def test_grouped_products_of_experts_have_no_float64():
    module = generic(MIXTURES["Mixtral"](experts_implementation="grouped_mm"))
    with pytest.raises(hk.InputError, match="Expected mat_a to be Float32"):
        hk.hessian(module, {"input_ids": TOKENS}, LABELS, loss="cross_entropy")


@pytest.mark.slow
def test_masked_language_model():
    module = build(lambda **o: hf.BertForMaskedLM(hf.BertConfig(**BERT, **o)), "sdpa")
    inputs, labels = padded("padded right")
    checked(module, inputs, labels, loss="cross_entropy")
    checked(module, {**inputs, "labels": labels}, loss=None)


@pytest.mark.slow
def test_sequence_classification():
    module = build(lambda **o: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3, **o)), "eager")
    inputs, _ = padded("padded right")
    checked(module, inputs, torch.tensor([0, 2]), loss="cross_entropy")


@pytest.mark.slow
def test_image_classification():
    sizes = {"image_size": 4, "patch_size": 2, "num_channels": 2, "num_labels": 3}
    module = build(lambda **o: hf.ViTForImageClassification(hf.ViTConfig(**ENCODER, **sizes, **o)), "sdpa")
    checked(module, {"pixel_values": images()}, torch.tensor([0, 2]), loss="cross_entropy")
    checked(module, {"pixel_values": images(), "labels": torch.tensor([0, 2])}, loss=None)


@pytest.mark.slow
def test_encoder_and_decoder():
    options = {"decoder_start_token_id": 0, "relative_attention_num_buckets": 4, "relative_attention_max_distance": 8}
    module = build(lambda **o: hf.T5ForConditionalGeneration(hf.T5Config(**T5, **options, **o)), "sdpa", use_cache=False)
    inputs, labels = padded("padded right")
    checked(module, {**inputs, "labels": labels}, loss=None)


BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": lambda **o: hf.models.gpt2.modeling_gpt2.GPT2Block(hf.GPT2Config(**GPT2, **o), layer_idx=0),
    "BERT": lambda **o: hf.models.bert.modeling_bert.BertLayer(hf.BertConfig(**BERT, **o)),
    "Llama": lambda **o: hf.models.llama.modeling_llama.LlamaDecoderLayer(hf.LlamaConfig(**DECODER, **o), layer_idx=0),
}


class Alone(nn.Module):
    """A block of a model by itself, with the rotary angles that the model would hand to it."""

    def __init__(self, block: nn.Module, fixed: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.fixed = block, fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x, **self.fixed)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(("name", "attention"), zip(BLOCKS, itertools.cycle(ATTENTIONS[::-1])))
def test_block(name, attention):
    width = 8 if name == "Llama" else 4
    x, fixed = draw(2, 5, width), {}
    if name == "Llama":
        rotary = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(hf.LlamaConfig(**DECODER)).double()
        fixed["position_embeddings"] = rotary(x, torch.arange(5)[None])
    checked(InDouble(generic(Alone(BLOCKS[name](attn_implementation=attention), fixed))), x, draw(2, 5, width, seed=7))


def test_report_names_the_precision_floor():
    module = generic(CAUSAL["Llama"](attn_implementation="sdpa", use_cache=False))
    report = hk.check(module, {"input_ids": TOKENS}, LABELS, loss="cross_entropy", against=QUICK, rtol=1e-4)
    assert report, report.verdict
    assert report.max_rel_error > 1e-10
    assert all("precision floor: to computes in torch.float32" in h.reason for h in report.health)


def test_the_loss_of_a_model_that_casts_to_float32():
    module = generic(CAUSAL["Llama"](attn_implementation="sdpa", use_cache=False))
    report = hk.check(module, {"input_ids": TOKENS, "labels": LABELS}, loss=None)
    assert report, report.verdict
    assert report.hessian.matrix.dtype == torch.float64
    assert report.max_rel_error > 1e-10
    exact = [row.max_rel_error for row in report.rows if row.reference == "reverse-over-reverse"]
    assert max(exact) < 1e-5
    assert "tolerance 1e-03, as " in report.verdict
    assert "computes in torch.float32" in report.verdict


@every_attention
def test_operator(attention):
    module, (inputs, labels) = build(CAUSAL["Llama"], attention, use_cache=False), padded("padded right")
    matrix = hk.hessian(module, inputs, labels, loss="cross_entropy").matrix
    operator = hk.hessian_operator(module, inputs, labels, loss="cross_entropy")
    vectors = draw(matrix.shape[0], 3, seed=4)
    assert (operator @ vectors - matrix @ vectors).abs().max() <= 1e-12 * (matrix @ vectors).abs().max()
