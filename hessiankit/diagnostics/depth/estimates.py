"""Largest eigenvalues, traces and Frobenius norms of matrices known by their products, each with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.diagnostics.depth.blocks import WHO
from hessiankit.support.errors import InputError
from hessiankit.support.lanczos import RitzValue, lanczos

Product: TypeAlias = "Callable[[Tensor], Tensor]"


@dataclass(frozen=True)
class Measured:
    """A number with the standard error of its estimate: 0 where it is exact, NaN for a single probe.

    >>> print(Measured(2.0), Measured(2.0, 0.5))
    2 2 ±0.5
    """

    value: float
    standard_error: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ±{self.standard_error:.1g}" if self.standard_error != 0 else "")


@dataclass(frozen=True)
class Estimator:
    """Lanczos for largest eigenvalues, random signs for traces and norms; the options of :func:`depth_diagnostics`."""

    draws: int = 8
    exact_below: int = 256
    tol: float = 1e-3
    products: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or self.exact_below < 0 or self.products < 2 or not self.tol > 0:
            raise InputError(
                f"{WHO}: draws={self.draws}, exact_below={self.exact_below}, products={self.products}, tol={self.tol}; expected "
                "at least 1, 0 and 2, and a positive tolerance"
            )

    def draws_for(self, size: int) -> int | None:
        """Return the number of probes of a matrix of that size; None for all unit vectors."""
        return None if size <= self.exact_below else self.draws

    def largest_eigenvalue(self, product: Product, like: Tensor, shift: int = 0) -> RitzValue:
        """Return the largest eigenvalue of the symmetric matrix of the products v -> H v, v of the shape (P,) of ``like``.

        The first vector depends on seed + shift and the size only, not on device and dtype.
        """
        generator = torch.Generator().manual_seed(self.seed + shift)
        start = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        return replace(lanczos(product, start, tol=self.tol, most=self.products), vector=None)

    def largest_singular_value(self, gram: Product, like: Tensor, shift: int = 0) -> RitzValue:
        """Return the largest singular value of A from the products v -> A^T A v."""
        square = self.largest_eigenvalue(gram, like, shift)
        value = math.sqrt(max(square.value, 0.0))
        return replace(square, value=value, residual=square.residual / value if value else 0.0)


def probes(like: Tensor, draws: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the unit vectors (draws=None), or vectors of random signs, of the shape, dtype and device of ``like``.

    The signs depend on the seed and the shape only, not on device and dtype.
    """
    if draws is None:
        for k in range(like.numel()):
            unit = torch.zeros_like(like)
            unit.view(-1)[k] = 1.0
            yield unit
        return
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8) * 2 - 1
        yield signs.to(like)


def mean_of(values: list[float], *, exact: bool) -> Measured:
    """Return the sum of the exact values, one a unit vector, or the mean of the probes' with its standard error.

    >>> mean_of([3.0, 5.0], exact=False), mean_of([3.0, 5.0], exact=True)
    (Measured(value=4.0, standard_error=1.0), Measured(value=8.0, standard_error=0.0))
    """
    if exact:
        return Measured(math.fsum(values))
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Measured(mean, math.nan)
    spread = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Measured(mean, math.sqrt(spread / len(values)))


def trace_of(product: Product, like: Tensor, draws: int | None, seed: int) -> Measured:
    """Return tr A from products with A: the sum of e_k^T A e_k, or the mean of z^T A z over random signs z (Hutchinson 1990)."""
    values = [float((z * product(z)).double().sum()) for z in probes(like, draws, seed)]
    return mean_of(values, exact=draws is None)


def root(square: Measured, size: float) -> Measured:
    """Return sqrt(square / size) with its standard error to first order.

    >>> root(Measured(8.0, 0.8), 2.0)
    Measured(value=2.0, standard_error=0.1)
    """
    value = math.sqrt(square.value / size)
    return Measured(value, square.standard_error / (2 * size * value) if value else square.standard_error)
