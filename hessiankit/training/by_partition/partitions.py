"""Partitions of a model's parameters by layer and by block type, as calls of the core take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from hessiankit.support.errors import InputError

if TYPE_CHECKING:
    from hessiankit.training.partition import Part

# hessiankit.training.partition is imported where a partition is read, since most calls have none


def translated(home: str, call: Callable[..., Any], option: str, translate: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a call under its own signature that passes on what ``translate`` makes of one keyword argument, or of None.

    ``home`` is the module that has it under the name of the call, where ``pickle`` looks for it.

    >>> def scaled(x, *, by):
    ...     return x * by
    >>> translated(__name__, scaled, "by", {"twice": 2, None: 1}.get)(3, by="twice")
    6
    """

    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, option: translate(kwargs.get(option))})

    called.__module__ = home
    return called


def types(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return block type -> the parameters, and slices of fused ones, that have it."""
    from hessiankit.training.partition import model_parts

    return members(model_parts(_given(module, "type")), names, lambda part: part.type)


def blocks(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return index of a block -> its parameters; ``"None"`` -> those outside the blocks."""
    from hessiankit.training.partition import model_parts

    return members(model_parts(_given(module, "layer")), names, lambda part: str(part.layer))


def layers(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return layer -> its parameters: a block, or where the model has no blocks with an attention a module."""
    from hessiankit.training.partition.findings import owners
    from hessiankit.training.partition.structure import structure

    places = owners(_given(module, "layer"))
    blocks_of_model, _ = structure(_given(module, "layer"), places)
    groups: dict[str, list[str]] = {}
    for name, (owner, *_) in places.items():
        if name in names:
            index = blocks_of_model.index(owner.path)
            block = "outside" if index is None else f"layer {index}"
            groups.setdefault(block if blocks_of_model.paths else owner.path or "outside", []).append(name)
    return groups


def members(parts: Iterable[Part], names: Collection[str], group: Callable[[Part], str]) -> dict[str, list[str]]:
    """Return group -> the parts of the named parameters that are in it."""
    groups: dict[str, list[str]] = {}
    for part in parts:
        if part.parameter in names:
            groups.setdefault(group(part), []).append(part.name)
    return groups


def _given(module: nn.Module | None, word: str) -> nn.Module:
    if module is None:
        raise InputError(f"spectrum: by={word!r} is read from the module; pass it with its data, or by=block_types(module)")
    return module
