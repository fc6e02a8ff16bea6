"""Models of real size, made from their configurations with drawn parameters, and one batch each: nothing is downloaded.

A name ends in the number of tokens: ``gpt2-124M-L256``. ``attention-L2048`` and ``attention-causal-L2048`` are one layer of
attention (width 64, 4 heads), ``decoder-L8192`` a GPT-2 of two such layers and 256 tokens, all with torch's fused attention.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import problems
from benchmarks.architectures import quiet
from benchmarks.gpt2 import TinyGPT2
from benchmarks.problems import Case
from hessiankit.support.errors import InputError

WIDTH, HEADS, VOCABULARY = 64, 4, 256
CLASSES, LABELLED = 1000, 0.15
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
SMALL = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-0.1M": ("GPT2LMHeadModel", {**SPECIAL_TOKENS, **SMALL}),
    "gpt2-124M": ("GPT2LMHeadModel", SPECIAL_TOKENS),
    "llama-134M": ("LlamaForCausalLM", LLAMA),
    "bert-base": ("BertForMaskedLM", {}),
    "vit-b16": ("ViTForImageClassification", {"num_labels": CLASSES}),
}
"""Class of transformers, and what its configuration has besides the usual."""
OTHERS = ("attention", "attention-causal", "decoder")
_NAME = re.compile(r"(.+?)(?:-L(\d+))?")


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(inputs).logits  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Four linear layers around ``scaled_dot_product_attention``."""

    def __init__(self, d_model: int, n_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, d) to the same."""
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        heads = scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, heads, L, d/heads)
        return self.out(heads.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def read(name: str) -> tuple[str, int] | None:
    """Return the model of a name and its number of tokens (0: of an image); None if the name is not one of these.

    >>> read("gpt2-124M-L256"), read("vit-b16"), read("bert-base"), read("small")
    (('gpt2-124M', 256), ('vit-b16', 0), None, None)
    """
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in (*HUGGING_FACE, *OTHERS) or (found[1] == "vit-b16") != (found[2] is None):
        return None
    return found[1], int(found[2] or 0)


def make(name: str, batch: int, dtype: torch.dtype, device: str) -> Case:
    """Return a problem of this name, or one of :mod:`benchmarks.problems`, with a batch of so many sequences or images.

    Raises:
        InputError: There is no such problem.
    """
    known = read(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = problems.make(name, batch) if known is None else _made(*known, batch)
    module, where = case.module.to(device, dtype).eval(), torch.device(device)
    inputs, target = (x.to(where, dtype) if x.is_floating_point() else x.to(where) for x in (case.inputs, case.target))
    return replace(case, name=name, module=module, inputs=inputs, target=target)


def _made(model: str, length: int, batch: int) -> Case:
    if model.startswith("attention"):
        module = Attention(WIDTH, HEADS, causal=model.endswith("causal"))
        return Case(model, module, *(torch.randn(batch, length, WIDTH) for _ in range(2)), "mse")
    if model == "decoder":
        fused = TinyGPT2(VOCABULARY, length, d_model=WIDTH, n_heads=HEADS, fused=True)
        return Case(model, fused, *_next(VOCABULARY, batch, length), "cross_entropy")
    made = Logits(_of_transformers(model))
    config: Any = made.model.config
    if model == "vit-b16":
        pixels = torch.randn(batch, config.num_channels, config.image_size, config.image_size)
        return Case(model, made, pixels, torch.randint(CLASSES, (batch,)), "cross_entropy")
    if length > config.max_position_embeddings:
        raise InputError(f"benchmarks: {model} takes {config.max_position_embeddings} tokens, not {length}")
    tokens, following = _next(config.vocab_size, batch, length)
    if model == "bert-base":
        following = tokens.masked_fill(torch.rand(batch, length) > LABELLED, -100)
    return Case(model, made, tokens, following, "cross_entropy")


def _next(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _of_transformers(name: str) -> nn.Module:
    import transformers

    kind, options = HUGGING_FACE[name]
    made = getattr(transformers, kind)
    with quiet():
        return made(made.config_class(**options))  # type: ignore[no-any-return]
