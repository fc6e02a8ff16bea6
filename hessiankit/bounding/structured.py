"""Bounds from a problem's own intermediate values, for any module that can be traced: see ``hessiankit.bounding.sites``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from hessiankit.bounding.certified import largest_eigenvalue, spectral_norm
from hessiankit.bounding.sites import Site, sites
from hessiankit.request.task import Task

SLACK, ROUNDING = 1 + 1e-9, 1e-12
"""For the rounding of eigenvalues, and of blocks that cancel, relative to the whole; bounds proved to the last bit are
``certified``."""


@dataclass(frozen=True)
class Structured:
    """Bounds on the norms of a Hessian and of its blocks.

    Attributes:
        whole: Bound on ||H||_2.
        pairs: Bound on each block, by its two names.
        sites: The sites that were kept apart.
    """

    whole: float
    pairs: Mapping[tuple[str, str], float]
    sites: tuple[str, ...]


def structured(task: Task) -> Structured:
    """Return the bounds of a traced loss.

    Each block is bounded twice, by the sum of the norms of the sites' shares and by the signs, and the whole by the norm of
    the matrix of block bounds and by the signs; the smaller counts.
    """
    found, slices = sites(task), task.slices
    plus, minus = (found[0].plus.new_zeros(task.size, task.size) for _ in range(2))
    own: dict[str, tuple[float, float]] = {}
    smaller: dict[tuple[str, str], float] = {}
    pairs = list(combinations_with_replacement(slices, 2))
    for i, j in sorted(pairs, key=lambda pair: pair[0] != pair[1]):  # the signs of a block need those of two diagonal ones
        rows, columns = slices[i], slices[j]
        shares = [_share(site, rows, columns) for site in found if site.reads[rows].any() and site.reads[columns].any()]
        for k, half in enumerate((plus, minus)):
            for share in shares:
                half[rows, columns] += share[k]
            if i != j:
                half[columns, rows] = half[rows, columns].T
        if i == j:
            own[i] = largest_eigenvalue(plus[rows, rows]), largest_eigenvalue(minus[rows, rows])
        signs = max(own[i]) if i == j else sum((p * q) ** 0.5 for p, q in zip(own[i], own[j], strict=True))
        smaller[i, j] = min(_sum_of_norms(shares, signs), signs)
    by_sign = max(largest_eigenvalue(plus), largest_eigenvalue(minus))
    bounds: dict[tuple[str, str], float] = {}
    for i, j in pairs:
        bounds[i, j] = bounds[j, i] = smaller[i, j] * SLACK + _rounding(found, by_sign, slices[i], slices[j])
    table = torch.tensor([[bounds[i, j] for j in slices] for i in slices], dtype=torch.float64)
    rounding = _rounding(found, by_sign, slice(None), slice(None))
    whole = min(by_sign, float(torch.linalg.eigvalsh(table)[-1])) * SLACK + rounding
    return Structured(whole, bounds, tuple(site.name for site in found))


def _share(site: Site, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """The two halves of one site's share of a block."""
    return site.plus[:, rows].T @ site.plus[:, columns], site.minus[:, rows].T @ site.minus[:, columns]


def _sum_of_norms(shares: list[tuple[Tensor, Tensor]], enough: float) -> float:
    """The sum of the norms of the sites' shares of a block, as far as it is below ``enough``."""
    total = 0.0
    for plus, minus in shares:
        total += spectral_norm(plus - minus)
        if total > enough:
            break
    return total


def _rounding(found: list[Site], by_sign: float, rows: slice, columns: slice) -> float:
    return ROUNDING * by_sign + sum(site.rounding_of(rows, columns) for site in found)
