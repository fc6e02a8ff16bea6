"""Parameters of the models of Tables 1 and 3, whose names are round numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hessiankit.blocks import Transformer
from papers.claim import Evidence
from papers.evidence import readings
from papers.registry import claim


class Sizes(NamedTuple):
    """Sizes of a decoder with RMSNorm, SwiGLU, rotary positions and no biases."""

    d_model: int
    d_ff: int
    heads: int
    layers: int
    vocabulary: int = 32_000
    tied: bool = False


MODELS = {
    "LLaMA-350M": Sizes(1024, 2736, 16, 24),
    "LLaMA-1B": Sizes(2048, 5461, 32, 24),
    "OLMo-1B": Sizes(2048, 8192, 16, 16, 50_304, tied=True),
}
"""Released configurations: the paper's code for LLaMA, OLMo's for OLMo-1B."""


def parameters(sizes: Sizes) -> int:
    """Count the parameters of hessiankit's model, without memory."""
    with torch.device("meta"):
        model = Transformer(
            sizes.vocabulary, sizes.d_model, sizes.d_ff, sizes.layers, sizes.heads, "pre", norm="rmsnorm", activation="swiglu",
            rotary=True, tied=sizes.tied, causal=True, initialisation=None,
        )  # fmt: skip
    return sum(p.numel() for p in model.parameters())


def _counts(name: str, millions: float) -> Evidence:
    found = {"millions in the name": millions, "millions in the configuration": parameters(MODELS[name]) / 1e6}
    return readings(found, "no other count is printed", apart=0.04)


@claim("table1-llama-350m", "Table 1, LLaMA-350M", "VAGUE", uses=[Transformer])
def llama_350m(seed: int) -> Evidence:
    """a model of 350 M parameters
    Correct: the released configuration has 368 M"""
    return _counts("LLaMA-350M", 350)


@claim("table1-llama-1b", "Table 1, LLaMA-1B", "VAGUE", uses=[Transformer])
def llama_1b(seed: int) -> Evidence:
    """a model of 1 B parameters
    Correct: the released configuration has 1.34 B"""
    return _counts("LLaMA-1B", 1000)


@claim("table3-olmo-1b", "Table 3, OLMo-1B", "VAGUE", uses=[Transformer])
def olmo_1b(seed: int) -> Evidence:
    """a model of 1 B parameters
    Correct: the published configuration has 1.18 B"""
    return _counts("OLMo-1B", 1000)
