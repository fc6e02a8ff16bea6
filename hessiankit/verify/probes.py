"""Directions along which products with a Hessian are compared: on each parameter, or on groups of parameters of one role."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.verify.problem import Problem

OWN_STREAM = 0x9E3779B9
"""Constant mixed into the seed of the directions."""


class Probes(NamedTuple):
    """Directions (k, P), each supported on one parameter, and the parameter that owns each."""

    V: Tensor
    owners: tuple[str, ...]
    rows: tuple[int, ...] | None = None  # which of another, larger set of directions they are, where they are some of it

    def first(self) -> Probes:
        """Return the first direction of each parameter."""
        rows = tuple(self.owners.index(name) for name in dict.fromkeys(self.owners))
        return Probes(self.V[list(rows)], tuple(self.owners[k] for k in rows), rows)


def normal(shape: Iterable[int], generator: torch.Generator, like: Tensor | None = None) -> Tensor:
    """Return normal numbers drawn in float64 on the CPU, of the dtype and on the device of another tensor."""
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers if like is None else numbers.to(like)


def probe_directions(problem: Problem, per_block: int = 2, seed: int = 0) -> Probes:
    """Draw ``per_block`` Gaussian directions (k, P) of unit length for every parameter, zero outside that parameter.

    The product H v of a direction v on parameter j shows in its rows i the block pair (i, j) alone, times a generic
    vector: an error in that block stays invisible only for directions of measure zero. With fewer entries in a parameter
    than ``per_block``, it gets one direction per entry.

    >>> problem = Problem(torch.nn.Linear(3, 2), torch.ones(1, 3), torch.ones(1, 2))
    >>> V, owners, _ = probe_directions(problem, per_block=1)
    >>> V.shape, owners, (V[0] != 0).sum().item()
    (torch.Size([2, 8]), ('weight', 'bias'), 6)
    """
    # A stream of its own: parameters drawn from the same seed would otherwise be directions themselves.
    generator = torch.Generator(device="cpu").manual_seed(seed ^ OWN_STREAM)
    rows, owners = [], []
    for name, part in problem.slices.items():
        for _ in range(min(per_block, part.stop - part.start)):
            numbers = normal((part.stop - part.start,), generator)
            row = torch.zeros(problem.size, dtype=torch.float64, device="cpu")
            row[part] = numbers / numbers.norm()
            rows.append(row)
            owners.append(name)
    return Probes(torch.stack(rows).to(problem.theta), tuple(owners))


MOST_GROUPS = 12
ALL_PARAMETERS = "all parameters"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def roles(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group parameters by the module that owns them, the same in every layer; coarser where there are too many groups.

    >>> roles(["h.0.ln.weight", "h.0.ln.bias", "h.1.ln.weight", "wte.weight"])
    {'h.*.ln': ('h.0.ln.weight', 'h.0.ln.bias', 'h.1.ln.weight'), 'wte': ('wte.weight',)}
    """
    parameters = list(names)
    paths = [_NUMBER.sub("*", name).split(".") for name in parameters]
    longest = max(len(path) for path in paths)
    for length in range(longest, 0, -1):
        groups: dict[str, list[str]] = {}
        for name, path in zip(parameters, paths, strict=True):
            groups.setdefault(".".join(path[:-1][:length]) or path[-1], []).append(name)
        if len(groups) <= MOST_GROUPS:
            break
    else:
        groups = {ALL_PARAMETERS: parameters}
    return {label: tuple(group) for label, group in groups.items()}


@dataclass(frozen=True)
class Direction:
    """A generic direction of unit length on some parameters, drawn again from its seed at each use."""

    label: str  # its name in a report
    names: tuple[str, ...]  # the parameters that it lies on
    seed: int

    def vector(self, problem: Problem) -> Tensor:
        """Return the direction as a flat vector (P,), zero outside its parameters."""
        generator = torch.Generator().manual_seed(self.seed ^ OWN_STREAM)
        v = torch.zeros_like(problem.theta)
        for n in self.names:
            part = problem.slices[n]
            v[part] = torch.randn(part.stop - part.start, generator=generator, device="cpu").to(v)
        return v.div_(v.norm())


def directions(groups: Mapping[str, tuple[str, ...]], per_group: int, seed: int) -> list[Direction]:
    """Return directions on each group, and one on everything, which comes last."""
    lines = []
    for at, (label, names) in enumerate(groups.items()):
        lines += [Direction(label, names, 1000 * seed + 10 * at + k) for k in range(per_group)]
    all_names = tuple(name for names in groups.values() for name in names)
    return [*lines, Direction(ALL_PARAMETERS, all_names, 1000 * seed + 999)]
