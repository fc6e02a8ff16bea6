"""Hugging Face transformers by dense Hessians: padding, caches, blocks, losses of other kinds (``test_architectures``: all by products).

Some of these models cast to float32 inside (norms, rotary angles, router, logits), whatever their parameters are;
``InDouble`` keeps those casts in float64, so that the agreement shows all digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import draw
from model_zoo import ATTENTIONS, InDouble, checked, generic
from torch import nn

import hessiankit as hk

pytest.importorskip("transformers")

import transformers as hf

VOCABULARY = 6
TOKENS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
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
EXPERTS = {"experts_implementation": "eager", "num_experts_per_tok": 2}
GPT2 = {**SPECIAL, "vocab_size": VOCABULARY, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 5}


def gpt2(**options: Any) -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **options))


def llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **options))


def mixtral(**options: Any) -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=3, **{**EXPERTS, **options}))


every_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def build(make: Callable[..., nn.Module], attention: str, **options: Any) -> nn.Module:
    return InDouble(generic(make(attn_implementation=attention, **options)))


def padded(mask: torch.Tensor = MASK) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch with padding, by default at the left, and its labels, -100 where there is padding."""
    return {"input_ids": TOKENS * mask, "attention_mask": mask}, LABELS.masked_fill(mask == 0, -100)


@pytest.mark.slow
@every_attention
def test_padding_at_the_left(attention):
    report = checked(build(gpt2, attention, use_cache=False), *padded(), loss="cross_entropy")
    assert "model.lm_head.weight" not in report.hessian.names  # tied


def test_cache():
    checked(build(llama, "sdpa", use_cache=True), {"input_ids": TOKENS}, LABELS, loss="cross_entropy", directions=1)


@pytest.mark.slow
def test_routing_loss():
    module = build(mixtral, "sdpa", use_cache=False, output_router_logits=True)
    checked(module, {"input_ids": TOKENS, "labels": LABELS}, loss=None, directions=1)


def test_grouped_products_of_experts_have_no_float64():
    module = generic(mixtral(experts_implementation="grouped_mm"))
    with pytest.raises(hk.InputError, match="Expected mat_a to be Float32"):
        hk.hessian(module, {"input_ids": TOKENS}, LABELS, loss="cross_entropy")


@pytest.mark.slow
def test_sequence_classification():
    module = build(lambda **o: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3, **o)), "eager")
    inputs, _ = padded(MASK.flip(1))
    checked(module, inputs, torch.tensor([0, 2]), loss="cross_entropy")


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


@pytest.mark.parametrize(
    ("name", "attention"),
    [("Llama", "eager"), *(pytest.param(name, "sdpa", marks=pytest.mark.slow) for name in ("GPT-2", "BERT"))],
)
def test_block(name, attention):
    width = 8 if name == "Llama" else 4
    x, fixed = draw(2, 5, width), {}
    if name == "Llama":
        rotary = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(hf.LlamaConfig(**DECODER)).double()
        fixed["position_embeddings"] = rotary(x, torch.arange(5)[None])
    checked(InDouble(generic(Alone(BLOCKS[name](attn_implementation=attention), fixed))), x, draw(2, 5, width, seed=7))


def test_the_loss_of_a_model_that_casts_to_float32():
    module = generic(llama(attn_implementation="sdpa", use_cache=False))
    report = hk.check(module, {"input_ids": TOKENS, "labels": LABELS}, loss=None)
    assert report, report.verdict
    assert report.hessian.matrix.dtype == torch.float64
    assert report.max_rel_error > 1e-10
    exact = [row.max_rel_error for row in report.rows if row.reference == "reverse-over-reverse"]
    assert max(exact) < 1e-5
    assert "tolerance 1e-03, as " in report.verdict
    assert "computes in torch.float32" in report.verdict
