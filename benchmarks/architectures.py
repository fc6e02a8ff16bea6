"""Tiny instances of published architectures: one table of names, one set of sizes, and the exceptions of a few of them.

Every model is made from its configuration; nothing is downloaded. A configuration gets those of :data:`TINY` that it has.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ATTENTIONS = ("eager", "sdpa")
VOCABULARY = 13
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "lru_width"), 8),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "dff", "ffn_dim", "n_inner", "hidden_dim", "d_inner", "intermediate_size_mlp"), 6
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "mlp_hidden_size"), 6),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 5),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 5),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_key_value_heads", "linear_num_key_heads"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads", "mamba_num_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "mamba_d_state", "ssm_state_size", "sliding_window"), 3),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 3),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "time_step_rank", "mamba_dt_rank", "expand", "mamba_expand"), 2),
    **dict.fromkeys(
        ("chunk_size", "mamba_chunk_size", "attention_window", "relative_attention_num_buckets", "mamba_head_dim"), 4
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"), 16),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_sequence_length"), 16),
    "vocab_size": VOCABULARY,
    "mamba_d_head": 8,
    "type_vocab_size": 2,
    "multi_query": True,
    "relative_attention_max_distance": 8,
    "first_k_dense_replace": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
    "index_topk": 3,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 2,
    "in_channels": 2,
}

CAUSAL = """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert-generation bigbird_pegasus biogpt bitnet bloom
    codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    diffllama doge dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo
    flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2
    jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
    moshi mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rwkv seed_oss smollm3
    solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlnet xlstm youtu zaya
"""
MASKED = """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
    flaubert fnet gte ibert jina_embeddings_v3 longformer megatron-bert modernbert mpnet mra neomme nomic_bert nystromformer
    roberta roberta-prelayernorm roformer squeezebert ultrabert xlm-roberta xlm-roberta-xl xmod yoso
"""
SEQUENCES = """
    bart blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart seamless_m4t
    seamless_m4t_v2 switch_transformers t5 umt5
"""
IMAGES = "beit data2vec-vision deit dinov2 dinov2_with_registers focalnet ijepa swin swinv2 vit vit_msn"

LATENT = {"head_dim": 2, "num_key_value_heads": 2}  # of the rotary part alone; every head has keys of its own
SPARSE = {**LATENT, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
RELATIVE = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 4, "d_rel": 3, "rel_extent": 4}
TWO = {"num_hidden_layers": 2}
ALONE: dict[str, Any] = {"layer_types": None}  # the configuration makes the kinds of its layers from other entries
STARTED = {"decoder_start_token_id": 0}
WINDOWED = {"depths": [2], "num_heads": [2], "embed_dim": 4, "window_size": 2, "image_size": 8, "patch_size": 2}
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), SPARSE),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), ALONE),
    **dict.fromkeys(("inkling2_text", "inkling_text"), RELATIVE),
    **dict.fromkeys(("longt5", "marian", "switch_transformers", "t5"), STARTED),
    **dict.fromkeys(("swin", "swinv2"), WINDOWED),
    "bamba": {**ALONE, **TWO, "attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "n_embd": 16, "rotary_dim": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"}}},
    "deepseek_v2": {**LATENT, "kv_lora_rank": 4},  # complex views need an even stride
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 3,
    },
    "diffllama": {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 2},
    "dots3_note_text": {
        "num_key_value_heads": 2,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "per_layer_config": {},
        "shared_experts_intermediate_size": 5,
    },
    "esmc": {"num_key_value_heads": 2},
    "falcon_h1": {**ALONE, "mamba_d_ssm": 8, "mamba_d_head": 4},
    "focalnet": {
        "embed_dim": 4,
        "depths": [1, 1],
        "hidden_sizes": [4, 8],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "patch_size": 2,
        "mlp_ratio": 1.5,
        "drop_path_rate": 0.0,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 3, "intermediate_size": 6},
    "hrm_text": {"L_bp_cycles": [3, 3]},  # no cycle under no_grad, which would cut the gradient
    "jamba": {**ALONE, **TWO, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {**LATENT, "head_dim": 4, "linear_head_dim": 4, "linear_num_heads": 2},
    "lfm2_moe": {**TWO, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "longcat_flash": {**LATENT, "zero_expert_num": 1},
    "mamba2": {**ALONE, "num_heads": 4, "head_dim": 4},
    "mpnet": {"relative_attention_num_buckets": 32},
    "neomme": {"embedding_rank": 4, "head_dim": 16, "num_attention_heads": 2},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 3,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 4,
        "indexer_budget": 2,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {**ALONE, "num_hidden_layers": 3},
    "rwkv": {**TWO, "attention_hidden_size": 8, "rescale_every": 0},
    "squeezebert": dict.fromkeys(
        ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), 2
    ),
    "ultrabert": {"prediction_head_size": 6, "num_key_value_heads": 2},
    "xlstm": {"num_blocks": 1, "chunkwise_kernel": "chunkwise--native_autograd"},
    "xmod": {"default_language": "en_XX"},
    "zaya": {
        **TWO,
        "num_experts_per_tok": 1,
        "router_hidden_size": 6,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
}


class _KeepDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = torch.utils._pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class InDouble(nn.Module):
    """A model whose own casts to float32 (norms, rotary angles, softmax, logits) stay in float64, so that digits can be seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with _KeepDouble():
            return self.model(*args, **kwargs)


@dataclass(frozen=True)
class Instance:
    """A model with generic parameters that bfloat16 holds exactly, in float64, and a batch that it takes with its labels."""

    model: nn.Module
    batch: dict[str, Tensor]


def generic(module: nn.Module, seed: int = 11) -> nn.Module:
    """Move every parameter to a generic value in float64, gains to about one, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.double().eval().parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (1.0 if p.ndim < 2 else 0.0)
    return module


def names() -> dict[str, str]:
    """Return the names: "causal/llama" -> the class that models it, as transformers calls it."""
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "causal": (CAUSAL, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "masked": (MASKED, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        "sequences": (SEQUENCES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        "images": (IMAGES, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    }
    found = {}
    for task, (kinds, classes) in tables.items():
        for kind in kinds.split():
            if kind not in classes:  # in an older transformers
                continue
            name = classes[kind]
            found[f"{task}/{kind}"] = name if isinstance(name, str) else name[0]
    return found


def configuration(kind: str, **options: Any) -> Any:
    """Return the tiny configuration of a ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    usual, aliases = cls(), getattr(cls, "attribute_map", {})
    known = {*usual.to_dict(), *aliases}
    given = {k: v for k, v in TINY.items() if k in known and not (k in aliases and aliases[k] in TINY)}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if kinds:  # one layer of each
        given |= {k: len(kinds) for k in ("num_hidden_layers", "n_layer", "num_layers") if k in given} | {"layer_types": kinds}
    if {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"} & known:
        given["experts_implementation"] = "eager"  # the others have no kernel for float64 or for so small a width
    given |= {**NEEDS.get(kind, {}), **options}
    if given.get("layer_types", "") is None:
        del given["layer_types"]
    return cls(**given)


def build(name: str, attention: str = "eager", **options: Any) -> Instance:
    """Return an instance of "causal/llama" and the like.

    Args:
        name: One of :func:`names`.
        attention: "eager" or "sdpa".
        options: Further entries of its configuration.
    """
    import transformers

    task, kind = name.split("/")
    labelled = {"num_labels": 3} if task == "images" else {}
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, names()[name])(configuration(kind, attn_implementation=attention, **labelled, **options))
    generic(model)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).double()
    taken = inspect.signature(model.forward).parameters
    return Instance(model, {k: x for k, x in batch_of(task).items() if k in taken or "kwargs" in taken})


def batch_of(task: str) -> dict[str, Tensor]:
    """Return two samples: images with their classes, or tokens with padding at the right and the label -100 there."""
    generator = torch.Generator().manual_seed(3)
    if task == "images":
        pixels = torch.randn(2, 2, 8, 8, generator=generator, dtype=torch.float64).to(torch.bfloat16).double()
        return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}
    tokens, labels = (torch.randint(2, VOCABULARY, (2, 5), generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {
        "input_ids": tokens.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of missing kernels and unusual settings."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
