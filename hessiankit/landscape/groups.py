"""Groups of parameters whose diagonal blocks have spectra of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.suboperators import positions
from hessiankit.partition.findings import owners
from hessiankit.partition.part import BlockTypes, Part
from hessiankit.partition.structure import structure
from hessiankit.partition.types import model_parts
from hessiankit.support.errors import InputError, check_name

WHO = "spectrum"
BY = ("parameter", "layer", "type")


def groups_of(by: str | Mapping[str, Any], operator: Any, module: nn.Module | None) -> dict[str, Tensor]:
    """Return the rows of each group in an operator, ascending.

    ``by`` is one of :data:`BY`, whose types and layers are those of the module; or group -> names, patterns or slices; or
    name -> group.

    >>> layer = nn.Linear(2, 1).double()
    >>> from hessiankit import hessian_operator
    >>> H = hessian_operator(layer, torch.ones(1, 2).double(), torch.zeros(1, 1).double())
    >>> {name: rows.tolist() for name, rows in groups_of({"first": ["weight[:, 0]"], "all": "*"}, H, None).items()}
    {'first': [0], 'all': [0, 1, 2]}
    >>> groups_of({"bias": "both", "weight": "both"}, H, None)
    {'both': tensor([0, 1, 2])}
    """
    if not hasattr(operator, "slices"):
        raise InputError(
            f"{WHO}: by={by!r} needs parameters by name, which a {type(operator).__name__} does not have; leave it out"
        )
    members: dict[str, list[Tensor]] = {}
    if isinstance(by, str):
        check_name(WHO, "by", by, BY)
        if by == "parameter":
            return {name: torch.arange(rows.start, rows.stop, device="cpu") for name, rows in operator.slices.items()}
        if module is None:
            raise InputError(f"{WHO}: by={by!r} is read from the module; pass it with its data, or by=block_types(module)")
        by = BlockTypes(model_parts(module)) if by == "type" else _layers(module, operator)
    assert isinstance(by, Mapping)
    if isinstance(by, BlockTypes):
        by = {part: part.type for part in by.parts}  # type: ignore[misc]
    for key, value in by.items():
        if isinstance(key, Part):
            if key.parameter in operator.slices:
                rows = operator.slices[key.parameter]
                places = torch.arange(rows.start, rows.stop, device="cpu").reshape(operator.shapes[key.parameter])
                members.setdefault(value, []).append(torch.cat([view.reshape(-1) for view in key.of(places)]))
            continue
        if not isinstance(key, str):
            raise InputError(f"{WHO}: by has the key {key!r}; expected names of groups, or of parameters")
        of_names = isinstance(value, str) and (key in operator.shapes or key in operator.shapes.also or "[" in key)
        group, names = (value, key) if of_names else (key, value)
        members.setdefault(group, []).append(positions(WHO, names, operator.shapes, operator.slices))
    if not members:
        raise InputError(f"{WHO}: by has no group; name some")
    return {name: torch.cat(rows).unique() for name, rows in members.items()}


def _layers(module: nn.Module, operator: Any) -> dict[str, str]:
    """Return the layer of each parameter: its block, or where the model has no blocks with an attention the module it is of."""
    places = owners(module)
    layers, _ = structure(module, places)
    paths = {name: of_one[0].path for name, of_one in places.items() if name in operator.slices}
    if not layers.paths:
        return {name: path or "outside" for name, path in paths.items()}
    layer_of = {name: layers.index(path) for name, path in paths.items()}
    return {name: "outside" if index is None else f"layer {index}" for name, index in layer_of.items()}
