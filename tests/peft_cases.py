"""Small GPT-2 and Llama models with adapters of peft, at generic values in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as hf
from model_zoo import InDouble
from torch import nn

SPECIAL = {"vocab_size": 7, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
IDS = torch.tensor([[1, 4, 2, 6, 5], [3, 2, 5, 5, 1]])
LABELS = torch.tensor([[4, 2, -100, 5, 3], [2, 5, 5, -100, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": MASK}
DROPOUTS = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 6, **DROPOUTS, **options}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**SPECIAL, **sizes)).double()


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "max_position_embeddings": 6, **options}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SPECIAL, **sizes, **heads)).double()


def moved(model: nn.Module) -> nn.Module:
    """Move every trainable parameter to a generic value: a new adapter's B is zero, so that A has no effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.double().parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def config(base: nn.Module, *targets: str, r: int = 2, **options: Any) -> peft.LoraConfig:
    transposed = isinstance(base, hf.GPT2LMHeadModel)  # its Conv1D holds (in, out)
    return peft.LoraConfig(r=r, target_modules=list(targets), fan_in_fan_out=transposed, **options)


def lora(base: nn.Module, *targets: str, **options: Any) -> nn.Module:
    return moved(peft.get_peft_model(base, config(base, *targets, **options)))


def two_adapters() -> nn.Module:
    """Two adapters, of ranks 2 and 3, that are active together."""
    model = lora(gpt2(), "c_attn")
    model.add_adapter("second", config(gpt2(), "c_proj", "c_attn", r=3))
    model.base_model.set_adapter(["default", "second"])
    return moved(model)


def over_merged() -> nn.Module:
    """An adapter of weights that an earlier one was merged into."""
    return lora(lora(gpt2(), "c_attn").merge_and_unload(), "c_attn", "c_proj")


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "LoRA of fused weights": lambda: lora(gpt2(), "c_attn"),
    "LoRA of all weights": lambda: lora(gpt2(), "c_attn", "c_proj", "c_fc", lora_alpha=3, use_rslora=True),
    "LoRA with biases": lambda: lora(gpt2(), "c_attn", bias="lora_only"),
    "LoRA with modules to save": lambda: lora(gpt2(tie_word_embeddings=False), "c_attn", modules_to_save=["ln_f", "lm_head"]),
    "LoRA with a tied head to save": lambda: lora(gpt2(), "c_attn", modules_to_save=["lm_head"], ensure_weight_tying=True),
    "DoRA of fused weights": lambda: lora(gpt2(), "c_attn", use_dora=True),
    "LoRA over a merged one": over_merged,
    "two adapters": two_adapters,
    "LoRA of Llama": lambda: lora(llama(), "q_proj", "v_proj", "o_proj", "down_proj", "embed_tokens"),
    "DoRA of Llama": lambda: lora(llama(), "q_proj", "v_proj", use_dora=True),
    "biases of B of fused weights": lambda: lora(gpt2(), "c_attn", lora_bias=True),
    "biases of B": lambda: lora(llama(attention_bias=True), "q_proj", lora_bias=True),
}


def in_double(model: nn.Module) -> nn.Module:
    """Let no cast to float32 inside of a model of transformers round its values."""
    return InDouble(model)
