"""Partitions of a model's parameters by neuron, head, module, layer and block type, as calls of the core take them."""

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
    """Return a call with the same signature that applies ``translate`` to one keyword argument, also to None.

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
    """Return block type -> the parameters, and slices of fused ones, of that type."""
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


def modules(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return path of a module -> the parameters that it holds itself; a tied parameter belongs to the first."""
    from hessiankit.training.partition.findings import owners

    groups: dict[str, list[str]] = {}
    for name, (owner, *_) in owners(_given(module, "module")).items():
        if name in names:
            groups.setdefault(owner.path or "outside", []).append(name)
    return groups


def heads(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return attention and head -> queries, keys and values of that number; each other parameter is a group of its own.

    Entries of a parameter with heads that belong to no head, such as a fused output, are in no group.

    >>> groups = heads(nn.MultiheadAttention(4, 2, bias=False), ["in_proj_weight", "out_proj.weight"])
    >>> groups["head_1"], groups["out_proj.weight"]
    (['in_proj_weight[2:4]', 'in_proj_weight[6:8]', 'in_proj_weight[10:12]'], ['out_proj.weight'])
    """
    from hessiankit.training.partition import named_slices

    groups: dict[str, list[str]] = {}
    divided = set()
    for label, part in named_slices(_given(module, "head"), heads=True).items():
        *path, head, _ = label.split(".")
        parameter = part.partition("[")[0]
        if parameter in names and head.startswith("head_"):
            groups.setdefault(".".join([*path[:-1], head]), []).append(part)  # without the role
            divided.add(parameter)
    return groups | {name: [name] for name in names if name not in divided}


def neurons(module: nn.Module | None, names: Collection[str]) -> dict[str, list[str]]:
    """Return weight and number of an output -> the weights and the bias of that output, an entry of a norm, a row of a table.

    >>> neurons(nn.Linear(2, 3), ["weight", "bias"])["weight[1]"]
    ['weight[1]', 'bias[1]']
    """
    from hessiankit.training.partition.findings import owners
    from hessiankit.training.partition.modules import output_axis

    groups: dict[str, list[str]] = {}
    for name, (owner, *_) in owners(_given(module, "neuron")).items():
        if name in names:
            p = owner.module.get_parameter(owner.leaf)
            axis = output_axis(owner.module, owner.leaf)
            weight = name.removesuffix(owner.leaf) + owner.leaf.replace("bias", "weight").replace("b_", "W_")
            for k in range(p.shape[axis] if p.ndim else 1):
                part = f"{':, ' * axis}{k}"
                groups.setdefault(f"{weight}[{k}]", []).append(f"{name}[{part}]" if p.ndim else name)
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
