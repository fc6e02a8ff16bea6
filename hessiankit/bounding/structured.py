"""Bounds from a problem's own intermediate values, for any module that can be traced: see ``hessiankit.bounding.sites``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    found = sites(task)
    slices = task.slices
    plus, minus = _gram(found, "plus"), _gram(found, "minus")
    by_sign = max(_largest(plus), _largest(minus))
    everything = slice(0, plus.shape[0])
    floor = ROUNDING * by_sign
    names = list(slices)
    pairs: dict[tuple[str, str], float] = {}
    for a, i in enumerate(names):
        for j in names[a:]:
            signs = _by_sign(plus, minus, slices[i], slices[j])
            shares = _sum_of_shares(found, slices[i], slices[j], signs)
            rounding = floor + sum(site.rounding_of(slices[i], slices[j]) for site in found)
            pairs[i, j] = pairs[j, i] = min(shares, signs) * SLACK + rounding
    table = torch.tensor([[pairs[i, j] for j in names] for i in names], dtype=torch.float64)
    rounding = floor + sum(site.rounding_of(everything, everything) for site in found)
    return Structured(min(by_sign, _largest(table)) * SLACK + rounding, pairs, tuple(site.name for site in found))


def _sum_of_shares(found: list[Site], rows: slice, columns: slice, enough: float) -> float:
    """The sum of the norms of the sites' shares of a block, as far as it is below ``enough``."""
    total = 0.0
    for site in found:
        share = _share(site, rows, columns)
        total += 0.0 if share is None else _norm(share)
        if total > enough:
            break
    return total


def _share(site: Site, rows: slice, columns: slice) -> Tensor | None:
    """One site's share of a block; None if it does not read one of the two parameters."""
    if not all(bool(site.reads[at].any()) for at in (rows, columns)):
        return None
    return site.plus[:, rows].T @ site.plus[:, columns] - site.minus[:, rows].T @ site.minus[:, columns]


def _by_sign(plus: Tensor, minus: Tensor, rows: slice, columns: slice) -> float:
    """The bound of a block by the signs of the sites."""
    if rows == columns:
        return max(_largest(plus[rows, rows]), _largest(minus[rows, rows]))
    return sum((_largest(part[rows, rows]) * _largest(part[columns, columns])) ** 0.5 for part in (plus, minus))


def _gram(found: list[Site], sign: str) -> Tensor:
    roots = torch.cat([getattr(site, sign) for site in found])
    return roots.T @ roots


def _largest(A: Tensor) -> float:
    return max(float(torch.linalg.eigvalsh(A)[-1]), 0.0) if A.numel() else 0.0


def _norm(A: Tensor) -> float:
    """The spectral norm, from the smaller Gram matrix."""
    scale = float(A.abs().max()) if A.numel() else 0.0
    if scale == 0.0:
        return 0.0
    A = A / scale
    return scale * _largest(A @ A.T if A.shape[0] <= A.shape[1] else A.T @ A) ** 0.5
