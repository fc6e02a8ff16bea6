"""Directions along which products with a Hessian are compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.errors import InputError
from hessiankit.verify.problem import Problem

OWN_STREAM = 0x9E3779B9
"""Mixed into the seed of the directions."""


class Probes(NamedTuple):
    """Directions (k, P), each supported on one parameter, and the parameter that owns each.

    ``rows``: which of another, larger set of directions they are, where they are some of it.
    """

    V: Tensor
    owners: tuple[str, ...]
    rows: tuple[int, ...] | None = None

    def first(self) -> Probes:
        """Return the first direction of each parameter."""
        rows = tuple(self.owners.index(name) for name in dict.fromkeys(self.owners))
        return Probes(self.V[list(rows)], tuple(self.owners[k] for k in rows), rows)


def probe_directions(problem: Problem, per_block: int = 2, seed: int = 0) -> Probes:
    """Draw ``per_block`` Gaussian directions of unit length for every parameter, zero outside that parameter.

    The product H v of a direction v on parameter j shows in its rows i the block pair (i, j) alone, times a generic
    vector: an error in that block stays invisible only for directions of measure zero. With fewer entries in a parameter
    than ``per_block``, it gets one direction per entry.

    Returns:
        The directions (k, P) and the name of the parameter that each lies on.

    >>> problem = Problem(torch.nn.Linear(3, 2), torch.ones(1, 3), torch.ones(1, 2))
    >>> V, owners, _ = probe_directions(problem, per_block=1)
    >>> V.shape, owners, (V[0] != 0).sum().item()
    (torch.Size([2, 8]), ('weight', 'bias'), 6)
    """
    if per_block < 1:
        raise InputError(f"probe_directions: per_block={per_block}; expected at least 1.")
    # A stream of its own: parameters drawn from the same seed would otherwise be directions themselves.
    generator = torch.Generator(device="cpu").manual_seed(seed ^ OWN_STREAM)
    rows, owners = [], []
    for name, where in problem.slices.items():
        for _ in range(min(per_block, where.stop - where.start)):
            drawn = torch.randn(where.stop - where.start, generator=generator, dtype=torch.float64)
            row = torch.zeros(problem.size, dtype=torch.float64)
            row[where] = drawn / drawn.norm()
            rows.append(row)
            owners.append(name)
    return Probes(torch.stack(rows).to(problem.theta), tuple(owners))


def products_along(products: Tensor, own: Probes | None, probes: Probes) -> Tensor:
    """Return products (k, P) along ``probes`` from those along every unit vector (``own`` None) or along more directions."""
    if own is None:
        return probes.V.to(products) @ products
    if own is probes:
        return products
    if probes.rows is None:
        raise InputError("products_along: the products belong to other directions.")
    return products[list(probes.rows)]
