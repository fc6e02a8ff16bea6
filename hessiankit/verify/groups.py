"""Directions for models whose matrix does not fit: one for each group of parameters of the same role, drawn when needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.verify.probes import OWN_STREAM

MOST_GROUPS = 12
EVERYTHING = "all parameters"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def roles(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group parameters by the module that owns them, the same in every layer; coarser where there are too many groups.

    >>> roles(["h.0.ln.weight", "h.0.ln.bias", "h.1.ln.weight", "wte.weight"])
    {'h.*.ln': ('h.0.ln.weight', 'h.0.ln.bias', 'h.1.ln.weight'), 'wte': ('wte.weight',)}
    """
    listed = list(names)
    paths = [_NUMBER.sub("*", name).split(".") for name in listed]
    longest = max(len(path) for path in paths)
    for length in range(longest, 0, -1):
        groups: dict[str, list[str]] = {}
        for name, path in zip(listed, paths, strict=True):
            groups.setdefault(".".join(path[:-1][:length]) or path[-1], []).append(name)
        if len(groups) <= MOST_GROUPS:
            break
    else:
        groups = {EVERYTHING: listed}
    return {label: tuple(group) for label, group in groups.items()}


@dataclass(frozen=True)
class Direction:
    """A generic direction of unit length on some parameters, drawn anew each time it is asked for.

    Args:
        label: What a report calls it.
        names: The parameters that it lies on.
        seed: Of the draw.
    """

    label: str
    names: tuple[str, ...]
    seed: int

    def parts(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return it by parameter; those left out are zero."""
        generator = torch.Generator().manual_seed(self.seed ^ OWN_STREAM)
        drawn = {n: torch.randn(params[n].shape, generator=generator).to(params[n]) for n in self.names}
        length = sum(float(x.double().square().sum()) for x in drawn.values()) ** 0.5
        for x in drawn.values():
            x.div_(length)
        return drawn


def directions(groups: Mapping[str, tuple[str, ...]], per_group: int, seed: int) -> list[Direction]:
    """Return directions on each group, and one on everything, which comes last."""
    found = []
    for at, (label, names) in enumerate(groups.items()):
        found += [Direction(label, names, 1000 * seed + 10 * at + k) for k in range(per_group)]
    everything = tuple(name for names in groups.values() for name in names)
    return [*found, Direction(EVERYTHING, everything, 1000 * seed + 999)]
