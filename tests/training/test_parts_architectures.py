"""Block types of real architectures, against tables written by hand and against the flow of data, which reads no names."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from parts_models import CASES, L, every_case
from torch import Tensor, nn

from hessiankit.training.partition import Part, model_parts
from hessiankit.training.partition.flow_findings import flow


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
def test_every_entry_lies_in_one_part_of_the_type_in_the_table_and_of_its_layer(name: str) -> None:
    table, parts = CASES[name].types, parts_of(name)
    assert list(dict.fromkeys(part.parameter for part in parts)) == [key for key, _ in built(name).named_parameters()]
    assert len({part.name for part in parts}) == len(parts)
    stacks = 2 if name in ("T5", "nn.Transformer") else 1
    assert {part.layer for part in parts} - {None} == set(range(L * stacks))
    for part in parts:
        if part.type != "Norm" and part.role != "relative position bias":
            assert (part.layer is None) is (part.type in ("Emb", "Head")), part.name
    for key, p in built(name).named_parameters():
        covered = torch.stack(list(entries_by_type(parts, key, p).values())).sum(0)
        assert bool((covered == 1).all()), key
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
            if CASES[name].tied and f.type == "Head" and set(modules) == {"Emb"}:
                continue  # the tied head, which counts as the embedding
            size = p.numel() if f.axis is None else p.numel() // p.shape[f.axis] * sum(b - a for a, b in f.segments)
            part = Part(key, f.type, f.role, None, "", size, f.axis, f.segments)
            for view in part.of(modules.get(f.type, torch.zeros(p.shape))):
                assert bool((view == 1).all()), f"{part.name}: {f.type} by the flow, {sorted(modules)} by the modules"
            seen += size
    assert seen > 0.85 * sum(p.numel() for p in model.parameters())
    for part in parts:
        if part.role in ("query", "key", "value", "output"):
            said = {(f.type, f.role, f.axis, f.segments) for f in found[part.parameter]}
            assert (part.type, part.role, part.axis, part.segments) in said, part.name


@every_case
def test_both_together(name: str) -> None:
    both, alone = model_parts(built(name), inputs=CASES[name].inputs), parts_of(name)
    assert [(part.name, part.type) for part in both] == [(part.name, part.type) for part in alone]
    for one, other in zip(both, alone, strict=True):  # which layer of a block is up and which down, only the flow knows
        assert one.role == other.role or (other.role.startswith("feed-forward") and one.role.split()[0] in ("up", "down")), one


UNTYPED = {
    "causal/deepseek_v32": {"*.indexer.w*": ("Other", "indexer"), "*.indexer.k_norm.*": ("Norm", None)},
    "causal/dots3_note_text": {"*.indexer.w*": ("Other", "indexer"), "*.self_attn.g_proj.weight": ("Other", "attention gate")},
    "causal/hy_v4": {
        "*.indexer.w*": ("Other", "indexer"),
        "*.self_attn.gate_proj.weight": ("Other", "attention gate"),
        "*_hc.fn": ("Other", "hyper-connection"),
        "model.hc_head.hc_fn": ("Other", "hyper-connection"),
    },
    "images/focalnet": {
        "*.modulation.*": ("Other", None),
        "*.downsample.projection.*": ("Other", None),
        "*.mlp.*": ("FFN", None),
        "classifier.*": ("Head", None),
    },
}
"""Weights of recent families that are none of the paper's types, or lie beside such: type, and role where it is one."""


@pytest.mark.parametrize("name", UNTYPED)
def test_families_with_weights_of_no_type(name: str) -> None:
    """Modules and names, and the flow of data, give the same type for every part."""
    pytest.importorskip("transformers")
    from benchmarks.architectures import build

    one = build(name)
    inputs = {key: x for key, x in one.batch.items() if key != "labels"}
    for given in (None, inputs):
        parts = model_parts(one.model, inputs=given)
        assert sum(part.size for part in parts) == sum(p.numel() for p in one.model.parameters())
        for pattern, (kind, role) in UNTYPED[name].items():
            found = [part for part in parts if fnmatchcase(part.parameter, pattern)]
            assert found, pattern
            assert {part.type for part in found} == {kind}, pattern
            assert role is None or given is not None or {part.role for part in found} == {role}
    types = [[(part.name, part.type) for part in model_parts(one.model, inputs=given)] for given in (None, inputs)]
    assert types[0] == types[1]
