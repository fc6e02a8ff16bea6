"""Blockwise learning rates of generated parameters, parts and options: the steps of split tensors, each with its own rate."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from blockwise_reference import Lion
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.training.optim import blockwise_lr
from hessiankit.training.partition import TYPES, Part

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda s: s[: 1 + bool(s[1])]), min_size=1, max_size=5)
RATIOS = st.fixed_dictionaries({}, optional={kind: st.sampled_from([0.5, 1.0, 3.0, 8.0]) for kind in TYPES})
DECAY = st.one_of(
    st.sampled_from(["matrices", "all"]),
    st.dictionaries(st.sampled_from(TYPES), st.sampled_from([0.0, 0.05, 0.3])),
)


class Numbers(nn.Module):
    """Parameters w0, w1, ..."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for k, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(k)
            self.register_parameter(f"w{k}", nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)))


def parts_of(model: nn.Module, draw: random.Random, types: tuple[str, ...] = TYPES) -> list[Part]:
    """Whole parameters, and others cut along an axis into segments, of one type in several places."""
    parts = []
    for name, p in model.named_parameters():
        axis = draw.randrange(p.ndim)
        n = p.shape[axis]
        if draw.random() < 0.4 or n < 2:
            parts.append(Part(name, draw.choice(types), "", 0, "", p.numel()))
            continue
        kinds = draw.sample(types, draw.randrange(1, len(types)))
        ends = sorted({n, *draw.sample(range(1, n), draw.randrange(n))})
        segments: dict[str, list[tuple[int, int]]] = {}
        for start, stop in zip([0, *ends], ends, strict=False):
            segments.setdefault(draw.choice(kinds), []).append((start, stop))
        for kind, own in segments.items():
            size = sum(stop - start for start, stop in own) * p.numel() // n
            parts.append(Part(name, kind, "", 0, "", size, axis, tuple(own)))
    draw.shuffle(parts)
    return parts


def pieces(model: nn.Module, parts: list[Part]) -> list[tuple[str, str, int, int, int]]:
    """(parameter, type, axis, start, stop) of every segment; a whole parameter is its rows."""
    found = []
    for part in parts:
        n = model.get_parameter(part.parameter).shape[0]
        found += [(part.parameter, part.type, part.axis or 0, *ends) for ends in part.segments or ((0, n),)]
    return found


def slope(step: int, p: Tensor) -> Tensor:
    """A gradient that depends on the parameter's place alone."""
    return torch.sin(torch.arange(p.numel(), dtype=p.dtype) * (step + 1) + p.numel()).reshape(p.shape)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "lion": Lion}


@settings(max_examples=30, deadline=None)
@given(
    SHAPES, RATIOS, DECAY, st.sampled_from([0.0, 0.1]), st.booleans(), st.sampled_from([*OPTIMIZERS]), st.booleans(), st.randoms()
)
def test_every_entry_takes_the_step_of_a_tensor_of_its_own(
    shapes: list[tuple[int, ...]],
    ratios: dict[str, float],
    decay: str | dict[str, float],
    weight_decay: float,
    couple: bool,
    optimizer: str,
    applied: bool,
    draw: random.Random,
) -> None:
    model = Numbers(shapes)
    parts, lr = parts_of(model, draw), 0.01
    options: dict[str, Any] = {"optimizer": optimizer, "weight_decay": weight_decay, "decay": decay, "couple_decay": couple}
    groups = blockwise_lr(model, lr, ratios, parts=parts, **options)
    make = OPTIMIZERS[optimizer]
    if applied:  # by groups that something else has made, in an order of its own
        bare = groups.bare()
        draw.shuffle(bare)
        for group in bare:
            draw.shuffle(group["params"])
        own = groups.apply(make([{"params": group["params"]} for group in bare]))
    else:
        own = make(groups)

    split = []
    for name, kind, axis, start, stop in pieces(model, parts):
        p, ratio = model.get_parameter(name), ratios.get(kind, 1.0)
        at = (slice(None),) * axis + (slice(start, stop),)
        base = weight_decay if decay == "all" or p.ndim == 2 else 0.0
        base = base if isinstance(decay, str) else decay.get(kind, base)
        leaf = nn.Parameter(p.detach()[at].clone())
        split.append((leaf, name, at, {"params": [leaf], "lr": lr * ratio, "weight_decay": base if couple else base / ratio}))
    plain = make([group for *_, group in split])
    for step in range(3):
        for _, p in model.named_parameters():
            p.grad = slope(step, p)
        for leaf, name, at, _ in split:
            leaf.grad = slope(step, model.get_parameter(name))[at].clone()
        own.step()
        plain.step()
    for leaf, name, at, _ in split:
        torch.testing.assert_close(model.get_parameter(name)[at], leaf, rtol=1e-12, atol=1e-14)


@settings(max_examples=30, deadline=None)
@given(SHAPES, RATIOS, DECAY, st.sampled_from([0.0, 0.1]), st.randoms())
def test_muon_has_matrices_of_hidden_types_only(
    shapes: list[tuple[int, ...]],
    ratios: dict[str, float],
    decay: str | dict[str, float],
    weight_decay: float,
    draw: random.Random,
) -> None:
    model = Numbers(shapes)
    parts = parts_of(model, draw, ("FFN", "QK", "Norm"))
    groups = blockwise_lr(model, 0.01, ratios, optimizer="muon", muon_lr=0.5, parts=parts, decay=decay, weight_decay=weight_decay)
    place = {id(p): g for g in groups for p in g["params"]}
    assert len(place) == sum(len(g["params"]) for g in groups) == len(shapes)
    for name, p in model.named_parameters():
        kinds = {part.type for part in parts if part.parameter == name}
        takes_muon = p.ndim == 2 and kinds <= {"QK", "VO", "FFN"}
        group = place[id(p)]
        assert any(p is q for g in (groups.muon if takes_muon else groups.adamw) for q in g["params"])
        assert group["lr"] == (0.5 if takes_muon else 0.01) * max(ratios.get(kind, 1.0) for kind in kinds)
        assert set(group["block_type"].split("+")) == kinds


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.randoms(), st.integers(0, 6))
def test_parts_that_do_not_cover_every_entry_once_are_refused(
    shapes: list[tuple[int, ...]], draw: random.Random, way: int
) -> None:
    model = Numbers(shapes)
    parts = parts_of(model, draw)
    k = draw.randrange(len(parts))
    part = parts.pop(k)
    p = model.get_parameter(part.parameter)
    axis = 0 if part.axis is None else part.axis
    segments = list(part.segments or ((0, p.shape[axis]),))
    start, stop = segments.pop(draw.randrange(len(segments)))
    changed: list[tuple[int, tuple[tuple[int, int], ...]]] = [
        (axis, ()),
        (axis, (*segments, (start, stop - 1))),
        (axis, (*segments, (start, stop + 1))),
        (axis, (*segments, (start, stop), (start, stop))),
        (p.ndim, (*segments, (start, stop))),
        (axis, (*segments, (start, stop + 1), (stop + 1, stop))),
        (axis, (*segments, (start, stop), (stop, start))),
    ]
    axis, others = changed[way]
    parts.append(replace(part, axis=axis, segments=others))
    with pytest.raises(hk.InputError, match="exactly once"):
        blockwise_lr(model, 1.0, parts=parts)


def test_a_part_of_an_unknown_type_is_refused() -> None:
    parts = [Part("w0", "Attention", "", 0, "", 3)]
    with pytest.raises(hk.InputError, match="type of part 'w0'='Attention' is not known"):
        blockwise_lr(Numbers([(3,)]), 1.0, parts=parts)
