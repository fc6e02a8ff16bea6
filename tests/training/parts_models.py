"""Small models of real architectures, each with inputs, and the block types of its parameters written by hand.

A table gives, for every parameter by a pattern of its name (``*`` is any text), its type, or the entries of each type where it
is fused. The sizes below are unequal, so that no two slices have the same count by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

Types = Mapping[str, "str | dict[str, int]"]

V, D, F, L, T = 11, 24, 20, 2, 32  # vocabulary, width, feed-forward width, blocks, positions
H, G, W = 4, 2, 6  # query heads, key heads, width of a head
IDS = torch.tensor([[1, 4, 2, 6, 8], [7, 3, 9, 5, 1]])
IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)


@dataclass(frozen=True)
class Case:
    """One architecture."""

    build: Callable[[], nn.Module]
    types: Types
    inputs: Any
    tied: bool = False


def hugging_face(family: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        hf = pytest.importorskip("transformers")
        torch.manual_seed(0)
        return getattr(hf, family)(getattr(hf, f"{config}Config")(**{"bos_token_id": 0, "eos_token_id": 0} | options))

    return build


def timm_vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": D, "depth": L, "num_heads": H, "num_classes": 5}
    return timm.models.vision_transformer.VisionTransformer(**sizes, init_values=0.1, qk_norm=True, reg_tokens=1)


SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "pad_token_id": 0}
DECODER = {**SIZES, "intermediate_size": F, "max_position_embeddings": T}
GROUPED = {**DECODER, "num_key_value_heads": G}
GPT = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": T}
TOKENS = {"input_ids": IDS}

QKV, QKV_BIAS = {"QK": 2 * D * D, "VO": D * D}, {"QK": 2 * D, "VO": D}
SEPARATE = {"*q_proj.*": "QK", "*k_proj.*": "QK", "*v_proj.*": "VO"}
LLAMA: Types = {**SEPARATE, "*embed_tokens.*": "Emb", "*o_proj.*": "VO", "*.mlp.*": "FFN", "*norm.weight": "Norm"}
LM_HEAD = {"lm_head.*": "Head"}
MEGATRON: Types = {
    "*.query_key_value.weight": QKV,
    "*.query_key_value.bias": QKV_BIAS,
    "*attention.dense.*": "VO",
    "*.mlp.*": "FFN",
}
BERT: Types = {
    "*embeddings.*_embeddings.weight": "Emb",
    "*LayerNorm.*": "Norm",
    "*.self.query.*": "QK",
    "*.self.key.*": "QK",
    "*.self.value.*": "VO",
    "*.attention.output.dense.*": "VO",
    "*.intermediate.dense.*": "FFN",
    "*.layer.?.output.dense.*": "FFN",
}
MOE: Types = {k: t for k, t in LLAMA.items() if k != "*.mlp.*"} | {"*.mlp.gate.*": "Other", "*.mlp.experts.*": "FFN"}
TORCH_BLOCK: Types = {
    "*.in_proj_weight": QKV,
    "*.in_proj_bias": QKV_BIAS,
    "*.out_proj.*": "VO",
    "*linear?.*": "FFN",
    "*norm*": "Norm",
}

CASES: dict[str, Case] = {
    "GPT-2": Case(
        hugging_face("GPT2LMHeadModel", "GPT2", **GPT),
        {
            "*.wte.*": "Emb",
            "*.wpe.*": "Emb",
            "*.ln_*": "Norm",
            "*.c_attn.weight": QKV,
            "*.c_attn.bias": QKV_BIAS,
            "*.attn.c_proj.*": "VO",
            "*.mlp.*": "FFN",
        },
        TOKENS,
        tied=True,
    ),
    "Llama": Case(hugging_face("LlamaForCausalLM", "Llama", **GROUPED), LLAMA | LM_HEAD, TOKENS),
    "Phi-3": Case(
        hugging_face("Phi3ForCausalLM", "Phi3", **GROUPED),
        {k: t for k, t in LLAMA.items() if "q_proj" not in k and "k_proj" not in k and "v_proj" not in k}
        | {"*.qkv_proj.weight": {"QK": (H + G) * W * D, "VO": G * W * D}}
        | LM_HEAD,
        TOKENS,
    ),
    "GPT-NeoX": Case(
        hugging_face("GPTNeoXForCausalLM", "GPTNeoX", **DECODER),
        MEGATRON | {"*.embed_in.*": "Emb", "*norm.*": "Norm"} | LM_HEAD,
        TOKENS,
    ),
    "Bloom": Case(
        hugging_face("BloomForCausalLM", "Bloom", vocab_size=V, hidden_size=D, n_layer=L, n_head=H),
        MEGATRON | {"*.word_embeddings.*": "Emb", "*norm.*": "Norm", "*.ln_f.*": "Norm"},
        TOKENS,
        tied=True,
    ),
    "CodeGen": Case(
        hugging_face("CodeGenForCausalLM", "CodeGen", **GPT, rotary_dim=2, n_ctx=T),
        {"*.wte.*": "Emb", "*.qkv_proj.*": QKV, "*.out_proj.*": "VO", "*.mlp.*": "FFN", "*.ln_*": "Norm"} | LM_HEAD,
        TOKENS,
    ),
    "OPT": Case(
        hugging_face(
            "OPTForCausalLM",
            "OPT",
            **SIZES,
            ffn_dim=F,
            max_position_embeddings=T,
            word_embed_proj_dim=8,
            do_layer_norm_before=True,
        ),
        {**SEPARATE, "*.embed_tokens.*": "Emb", "*.embed_positions.*": "Emb", "*.project_in.*": "Emb", "*.project_out.*": "Head"}
        | {"*.out_proj.*": "VO", "*.fc?.*": "FFN", "*_norm.*": "Norm"},
        TOKENS,
        tied=True,
    ),
    "BERT": Case(
        hugging_face("BertForMaskedLM", "Bert", **DECODER),
        BERT | {"cls.predictions.bias": "Head", "cls.predictions.transform.dense.*": "Head"},
        TOKENS,
        tied=True,
    ),
    "T5": Case(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5",
            vocab_size=V,
            d_model=D,
            d_kv=W,
            d_ff=F,
            num_layers=L,
            num_heads=H + 1,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
        ),
        {"*.q.*": "QK", "*.k.*": "QK", "*.v.*": "VO", "*.o.*": "VO", "*.wi_?.*": "FFN", "*.wo.*": "FFN", "*layer_norm.*": "Norm"}
        | {"shared.*": "Emb", "*.relative_attention_bias.*": "Emb"},
        {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)},
        tied=True,
    ),
    "Mixtral": Case(
        hugging_face("MixtralForCausalLM", "Mixtral", **GROUPED, num_local_experts=3, experts_implementation="eager"),
        MOE | LM_HEAD,
        TOKENS,
    ),
    "DeepSeek-V3": Case(
        hugging_face(
            "DeepseekV3ForCausalLM",
            "DeepseekV3",
            **DECODER,
            q_lora_rank=6,
            kv_lora_rank=7,
            qk_rope_head_dim=2,
            qk_nope_head_dim=4,
            v_head_dim=3,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=5,
            first_k_dense_replace=1,
            experts_implementation="eager",
        ),
        {
            "*.q_?_proj.*": "QK",
            "*.kv_a_proj_with_mqa.*": {"Other": 7 * D, "QK": 2 * D},
            "*.kv_b_proj.*": {"QK": 4 * 4 * 7, "VO": 4 * 3 * 7},
        }
        | {"*.o_proj.*": "VO", "*.mlp.*": "FFN", "*.mlp.gate.*": "Other", "*embed_tokens.*": "Emb", "*norm.weight": "Norm"}
        | LM_HEAD,
        TOKENS,
    ),
    "timm ViT": Case(
        timm_vit,
        {"*_token": "Emb", "pos_embed": "Emb", "patch_embed.*": "Emb", "*.qkv.weight": QKV, "*.qkv.bias": QKV_BIAS}
        | {"*.attn.proj.*": "VO", "*.mlp.*": "FFN", "*norm*": "Norm", "*.ls?.gamma": "Norm", "head.*": "Head"},
        (IMAGE,),
    ),
    "nn.Transformer": Case(
        lambda: nn.Transformer(D, H, L, L, F, batch_first=True),
        TORCH_BLOCK,
        (torch.linspace(-1, 1, 2 * 5 * D).sin().reshape(2, 5, D), torch.linspace(-1, 1, 2 * 3 * D).cos().reshape(2, 3, D)),
    ),
}

every_case = pytest.mark.parametrize("name", CASES)
