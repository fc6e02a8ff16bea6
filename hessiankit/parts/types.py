"""The block type of every parameter of a model (provisional rules)."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hessiankit.errors import InputError
from hessiankit.fused import named_slices
from hessiankit.optim import block_types as own_types
from hessiankit.parts.part import Part
from hessiankit.request.selection import parse_part

_RULES = (
    (r"(^|\.)(wte|wpe|embed_tokens|embedding|embeddings)\b", "Emb"),
    (r"(lm_head|head|classifier)\b", "Head"),
    (r"(ln_\w+|norm\w*|\w+norm)\.(weight|bias)$", "Norm"),
    (r"\.(mlp|feedforward)\.", "FFN"),
    (r"(q_proj|k_proj)\.", "QK"),
    (r"(v_proj|o_proj|c_proj|out_proj)\.", "VO"),
)


class BlockTypes(dict[str, str]):
    """Block types by part name."""

    parts: tuple[Part, ...] = ()


def model_parts(model: nn.Module, **_: Any) -> tuple[Part, ...]:
    """Return the parts of a model (provisional)."""
    try:
        own = own_types(model)
    except InputError:
        own = {}
    slices: dict[str, list[tuple[str, Any]]] = {}
    for role, where in named_slices(model).items():
        name, index = parse_part(where)
        slices.setdefault(name, []).append((role.split(".")[-2], index))
    found = []
    for name, p in model.named_parameters():
        number = re.search(r"\.(\d+)\.", "." + name)
        layer = int(number[1]) if number else None
        kind = own.get(name)
        if kind is None and name in slices:
            for role, index in slices[name]:
                axis = len(index[0]) - 1
                segments = tuple((i[-1].start, i[-1].stop) for i in index)
                size = sum(b - a for a, b in segments) * p.numel() // p.shape[axis]
                kind = {"query": "QK", "key": "QK", "value": "VO"}.get(role, "FFN")
                found.append(Part(name, kind, role, layer, "fused", size, axis, segments))
            continue
        if kind is None:
            kind = next((t for rule, t in _RULES if re.search(rule, name)), None)
        if kind is None:
            raise InputError(f"block_types: {name!r} is not recognised")
        found.append(Part(name, kind, name.split(".")[-1], layer, "name", p.numel()))
    return tuple(found)


def block_types(model: nn.Module, **options: Any) -> BlockTypes:
    """Return the block type of every part (provisional)."""
    parts = model_parts(model, **options)
    found = BlockTypes({part.name: part.type for part in parts})
    found.parts = parts
    return found
