"""Puts together what the modules and the flow of data say of one parameter, and finds where they contradict each other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hessiankit.parts.finding import Finding, segments_left

CONFLICT = "!"
"""Stands for the type of a part of which the modules say one thing and the flow of data another."""


def agreed(structural: list[Finding], flowing: list[Finding], p: Tensor, *, in_block: bool) -> list[Finding]:
    """Return what the two routes say together, or one finding of type :data:`CONFLICT` that says both.

    Of two firm statements the types must be the same wherever they overlap. A firm one goes before an inference. Of two
    inferences that of the modules counts within a block, that of the flow outside.

    Args:
        structural: By the modules.
        flowing: By the flow of data.
        p: The parameter.
        in_block: Whether it lies in one of the model's blocks.

    >>> import torch
    >>> norm, scale = Finding("Norm", "gain", "LayerNorm"), Finding("FFN", "up", "flow: ...")
    >>> agreed([norm], [scale], torch.ones(2), in_block=True)[0].reason
    'by its module Norm (LayerNorm), by the flow of data FFN (...)'
    """
    if not structural or not flowing:
        return _whole(structural or flowing, [], p)
    if {f.type for f in structural} == {"Emb", "Head"} or {f.type for f in flowing} == {"Emb", "Head"}:
        return structural if len(structural) > 1 else [*structural, *(f for f in flowing if f.type != structural[0].type)]
    firm, sure = structural[0].firm, flowing[0].firm
    if firm and sure:
        for one in structural:
            for other in flowing:
                if one.type != other.type and _overlap(one, other):
                    both = f"by its module {one.type} ({one.reason}), by the flow of data {other.type} ({_short(other)})"
                    return [Finding(CONFLICT, one.role, both)]
        return [replace(f, reason=f"{f.reason}; the flow of data agrees") for f in structural]
    if firm or sure:
        return structural if firm else _whole(flowing, structural, p)
    if in_block or {f.type for f in flowing} == {"FFN"}:  # which lies in blocks
        return structural
    return _whole(flowing, structural, p)


def _whole(found: list[Finding], rest: list[Finding], p: Tensor) -> list[Finding]:
    """Return findings that cover the parameter: what segments leave is filled by what else is known, or by nothing at all."""
    if not found or found[0].axis is None:
        return found
    free = segments_left(found, p)
    if not free:
        return found
    axis = found[0].axis
    if rest and rest[0].axis is None:
        return [*found, replace(rest[0], axis=axis, segments=free)]
    return [*found, Finding("?", "", "what the flow of data leaves of it", axis, free)]


def _overlap(one: Finding, other: Finding) -> bool:
    if one.axis is None or other.axis is None or one.axis != other.axis:
        return True
    return any(a < d and c < b for a, b in one.segments for c, d in other.segments)


def _short(finding: Finding) -> str:
    return finding.reason.removeprefix("flow: ")
