"""Modules with fused weights, and with separate ones, from torch and from the libraries that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROLES = ("query", "key", "value")
Model = tuple[nn.Module, tuple[Any, ...]]


class SelfAttention(nn.Module):
    """One linear layer for queries, keys and values, named and split as the small GPT implementations do."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """``qkv`` with fewer key heads than query heads."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.qkv(x).split(sizes, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class SelfCall(nn.Module):
    """nn.MultiheadAttention of one sequence with itself."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        memory = [F.pad(x, (0, width - x.shape[-1]), value=0.5) for width in (self.layer.kdim, self.layer.vdim)]
        return self.layer(x, *memory, need_weights=False)[0]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def attention(**options: Any) -> Model:
    return SelfCall(nn.MultiheadAttention(8, 4, batch_first=True, **options)), (rows(2, 3, 8),)


def imported(name: str, attribute: str) -> Any:
    """A library that may be missing."""
    pytest.importorskip(name.partition(".")[0])
    module = importlib.import_module(name)
    return module, getattr(module, attribute)


def hugging_face(family: str, **options: Any) -> Model:
    transformers, _ = imported("transformers", "GPT2Model")
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32, "attn_implementation": "sdpa", "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**(sizes | {"bos_token_id": 0, "eos_token_id": 0} | options))
    return transformers.AutoModel.from_config(config), (torch.tensor([[1, 4, 2], [7, 3, 9]]),)


def gpt2(**options: Any) -> Model:
    return hugging_face("GPT2", n_embd=16, n_layer=1, n_head=4, **options)


def timm_block() -> Model:
    _, block = imported("timm.models.vision_transformer", "Block")
    return block(8, 4, qkv_bias=True), (rows(2, 3, 8),)


FUSED: dict[str, Callable[[], Model]] = {
    "nn.MultiheadAttention": attention,
    "nn.TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), (rows(2, 3, 8),)),
    "small GPT": lambda: (SelfAttention(8, 4), (rows(2, 3, 8),)),
    "grouped qkv": lambda: (GroupedAttention(6, 4, 2, 3), (rows(2, 3, 6),)),
    "timm": timm_block,
    "GPT-2": gpt2,
    "Phi-3": lambda: hugging_face("Phi3", num_key_value_heads=2),
    "GPT-NeoX": lambda: hugging_face("GPTNeoX"),
    "StarCoder, one key head": lambda: hugging_face("GPTBigCode", multi_query=True),
    "DBRX": lambda: hugging_face(
        "Dbrx", d_model=16, n_heads=4, n_layers=1, max_seq_len=32, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e9},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    ),
    "Falcon, one key head": lambda: hugging_face("Falcon", multi_query=True, new_decoder_architecture=False),
    "Falcon, groups": lambda: hugging_face("Falcon", new_decoder_architecture=True, num_kv_heads=2),
}  # fmt: skip

SEPARATE: dict[str, Callable[[], Model]] = {
    "nn.MultiheadAttention of other keys": lambda: attention(kdim=10, vdim=9),
    "Llama": lambda: hugging_face("Llama", num_key_value_heads=2),
    "OPT": lambda: hugging_face("OPT", ffn_dim=24, word_embed_proj_dim=16),
}  # fmt: skip


def build(case: str) -> Model:
    torch.manual_seed(0)
    module, inputs = (FUSED | SEPARATE)[case]()
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) / 2)
    return module, inputs
