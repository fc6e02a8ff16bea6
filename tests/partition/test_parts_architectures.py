"""Block types of real architectures, against tables written by hand and against the flow of data, which reads no names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from parts_models import CASES, L, every_case
from torch import Tensor, nn

from hessiankit.partition import Part, model_parts
from hessiankit.partition.flow_findings import flow

KEYLESS = {"Llama", "Qwen3", "Phi-3", "OLMo-2", "Gemma", "MPT", "CodeGen", "GPT-J", "T5", "Mixtral", "DBRX", "DeepSeek-V3"}
"""Architectures without biases in their attention."""


@cache
def built(name: str) -> nn.Module:
    return CASES[name].build().eval()


@cache
def parts_of(name: str) -> tuple[Part, ...]:
    return model_parts(built(name))


def entries_by_type(parts: Any, name: str, p: Tensor) -> dict[str, Tensor]:
    """Return how many parts of each type every entry of a parameter lies in."""
    counts: dict[str, Tensor] = {}
    for part in parts:
        if part.parameter == name:
            count = counts.setdefault(part.type, torch.zeros(p.shape, dtype=torch.int64))
            for view in part.of(count):
                view += 1
    return counts


@every_case
def test_every_entry_lies_in_exactly_one_part(name: str) -> None:
    model, parts = built(name), parts_of(name)
    for key, p in model.named_parameters():
        covered = torch.stack(list(entries_by_type(parts, key, p).values())).sum(0)
        assert bool((covered == 1).all()), key
    assert sum(part.size for part in parts) == sum(p.numel() for p in model.parameters())
    for part in parts:
        assert sum(view.numel() for view in part.of(model.get_parameter(part.parameter))) == part.size
    order = list(dict.fromkeys(part.parameter for part in parts))
    assert order == [key for key, _ in model.named_parameters()]
    assert len({part.name for part in parts}) == len(parts)


@every_case
def test_types_are_those_of_the_table(name: str) -> None:
    table, parts = CASES[name].types, parts_of(name)
    for key, p in built(name).named_parameters():
        patterns = [pattern for pattern in table if fnmatchcase(key, pattern)]
        assert patterns, f"the table has no row for {key}"
        expected = table[max(patterns, key=len)]
        sizes: dict[str, int] = {}
        for part in parts:
            if part.parameter == key:
                sizes[part.type] = sizes.get(part.type, 0) + part.size
        assert sizes == ({expected: p.numel()} if isinstance(expected, str) else expected), key


@every_case
def test_the_flow_of_data_says_the_same_of_every_entry(name: str) -> None:
    model, parts = built(name), parts_of(name)
    found = flow(model, CASES[name].inputs)
    seen = 0
    for key, p in model.named_parameters():
        modules = entries_by_type(parts, key, p)
        for f in found.get(key, []):
            if f.type == "?":  # Falcon's own linear layers add their biases to one sum of attention and feed-forward layer
                assert (name, f.role) == ("Falcon, grouped", "bias")
                continue
            if CASES[name].tied and f.type == "Head" and set(modules) == {"Emb"}:
                continue  # the tied head, which counts as the embedding
            size = p.numel() if f.axis is None else p.numel() // p.shape[f.axis] * sum(b - a for a, b in f.segments)
            part = Part(key, f.type, f.role, None, "", size, f.axis, f.segments)
            for view in part.of(modules.get(f.type, torch.zeros(p.shape))):
                assert bool((view == 1).all()), f"{part.name}: {f.type} by the flow, {sorted(modules)} by the modules"
            seen += size
    assert seen > 0.85 * sum(p.numel() for p in model.parameters())
    attention = {part.parameter for part in parts if part.role.split()[0] in ("query", "key", "value", "output")}
    assert attention <= set(found), "every weight of attention is seen"


@every_case
def test_both_together(name: str) -> None:
    both, alone = model_parts(built(name), inputs=CASES[name].inputs), parts_of(name)
    assert [(part.name, part.type) for part in both] == [(part.name, part.type) for part in alone]
    for one, other in zip(both, alone, strict=True):  # which layer of a block is up and which down, only the flow knows
        assert one.role == other.role or (other.role.startswith("feed-forward") and one.role.split()[0] in ("up", "down")), one


@pytest.mark.parametrize("name", ["GPT-2", "GPT-NeoX", "Falcon, one key head", "CodeGen", "T5", "Mixtral", "BERT", "ViT"])
def test_attention_in_plain_products(name: str) -> None:
    """The flow of data through torch.matmul and softmax instead of one fused operation."""
    model = built(name)
    before = model.config._attn_implementation
    if name != "CodeGen":  # which has no other
        model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    found = flow(model, CASES[name].inputs)
    if name != "CodeGen":
        model.set_attn_implementation(before)
    for part in parts_of(name):
        if part.type in ("QK", "VO"):
            said = {(f.type, f.role, f.axis, f.segments) for f in found[part.parameter]}
            assert (part.type, part.role, part.axis, part.segments) in said, part.name


@every_case
def test_blocks_are_numbered(name: str) -> None:
    stacks = {"T5": 2, "nn.Transformer": 2, "nn.TransformerEncoderLayer": 0}.get(name, 1)
    parts = parts_of(name)
    assert {part.layer for part in parts} - {None} == set(range(L * stacks))
    for part in parts:
        if part.type in ("QK", "VO", "FFN") and stacks:
            assert part.layer is not None, part.name
        if part.type in ("Emb", "Head") and part.role != "relative position bias":
            assert part.layer is None, part.name


@every_case
def test_key_biases_can_be_left_out(name: str) -> None:
    biases = [part for part in parts_of(name) if part.role == "key bias"]
    assert (not biases) is (name in KEYLESS or name in ("Falcon, one key head", "Falcon, every head"))
    assert all(part.type == "QK" and part.parameter.endswith("bias") for part in biases)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "timm ViT"])
def test_key_biases_of_softmax_without_rotary_embedding_have_no_gradient(name: str) -> None:
    model, inputs = built(name).double(), CASES[name].inputs
    if name == "timm ViT":
        for block in model.blocks:
            block.attn.q_norm, block.attn.k_norm = nn.Identity(), nn.Identity()
    given = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()} if isinstance(inputs, dict) else None
    out = model(**given) if given is not None else model(inputs[0].double())
    logits = out if isinstance(out, Tensor) else out.logits
    logits.square().sum().backward()
    for part in model_parts(model):
        if part.role in ("key bias", "query bias"):
            gradient = model.get_parameter(part.parameter).grad
            assert gradient is not None
            norm = float(part.squared_norm(gradient)) ** 0.5
            assert (norm < 1e-12) is (part.role == "key bias"), part.name
    built.cache_clear()
    parts_of.cache_clear()
