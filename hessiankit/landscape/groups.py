"""Groups of parameters whose diagonal blocks have spectra of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.suboperators import Partition, groups_by, positions
from hessiankit.support.errors import InputError, check_name

WHO = "spectrum"
BY = ("parameter",)


def groups_of(by: str | Mapping[str, Any] | Partition, operator: Any, module: nn.Module | None) -> dict[str, Tensor]:
    """Return the rows of each group in an operator, ascending.

    ``by`` is one of :data:`BY`; or group -> names, patterns or slices; or name -> group; or a partition that gives one of these.

    >>> layer = nn.Linear(2, 1).double()
    >>> from hessiankit import hessian_operator
    >>> H = hessian_operator(layer, torch.ones(1, 2).double(), torch.zeros(1, 1).double())
    >>> {name: rows.tolist() for name, rows in groups_of({"first": ["weight[:, 0]"], "all": "*"}, H, None).items()}
    {'first': [0], 'all': [0, 1, 2]}
    >>> groups_of({"bias": "both", "weight": "both"}, H, None)
    {'both': tensor([0, 1, 2])}
    >>> groups_of(lambda module, names: {name.upper(): name for name in names}, H, layer)
    {'WEIGHT': tensor([0, 1]), 'BIAS': tensor([2])}
    """
    if not hasattr(operator, "slices"):
        raise InputError(f"{WHO}: by needs parameters by name, which a {type(operator).__name__} does not have; leave it out")
    if isinstance(by, str):
        check_name(WHO, "by", by, BY)
        return {name: torch.arange(rows.start, rows.stop, device="cpu") for name, rows in operator.slices.items()}
    members: dict[str, list[Tensor]] = {}
    for key, value in groups_by(WHO, by, module, operator.slices).items():
        if not isinstance(key, str):
            raise InputError(f"{WHO}: by has the key {key!r}; expected names of groups, or of parameters")
        of_names = isinstance(value, str) and (key in operator.shapes or key in operator.shapes.aliases or "[" in key)
        group, names = (value, key) if of_names else (key, value)
        members.setdefault(group, []).append(positions(WHO, names, operator.shapes, operator.slices))
    if not members:
        raise InputError(f"{WHO}: by has no group; name some")
    return {name: torch.cat(rows).unique() for name, rows in members.items()}
