"""Numbers of matrices known by their products, each with what is known of its error: extremes, traces, Frobenius norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """A number, and the standard error of its estimate: 0 where it is exact, NaN where one probe does not tell.

    >>> print(Measured(2.0), Measured(2.0, 0.5))
    2 2 ±0.5
    """

    value: float
    standard_error: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ±{self.standard_error:.1g}" if self.standard_error != 0 else "")


@dataclass(frozen=True)
class Ritz:
    """A largest eigenvalue, or a largest singular value by way of A^T A, found by Lanczos.

    Attributes:
        value: Never above the true one, rounding aside.
        residual: Some eigenvalue (singular value) of the matrix is that close to it: |H v - value v| of its unit vector v, or
            |A^T A v - value^2 v| / value. Not a proof that it is the largest.
        products: Products with H (A^T A) that it took.
        converged: Whether the residual is within the tolerance asked for.
    """

    value: float
    residual: float
    products: int
    converged: bool

    @property
    def relative(self) -> float:
        """The residual over the value; 0 where both are 0."""
        return self.residual / abs(self.value) if self.value else 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.converged else "?")


def first_vector(like: Tensor, seed: int) -> Tensor:
    """Return Lanczos's random first vector, which depends on the seed and the size only, not on device and dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def probes(like: Tensor, draws: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the unit vectors (draws=None), or vectors of random signs.

    The signs depend on the seed and the shape only, not on device and dtype.

    Args:
        like: A tensor of the shape, dtype and device of the vectors.
        draws: How many vectors of signs.
        seed: Of the signs.
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
    """Return the sum of the exact values, one a unit vector, or the mean of the probes' with its standard error."""
    if exact:
        return Measured(math.fsum(values))
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Measured(mean, math.nan)
    spread = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Measured(mean, math.sqrt(spread / len(values)))


def trace_of(product: Callable[[Tensor], Tensor], like: Tensor, draws: int | None, seed: int) -> Measured:
    """Return tr A from products with A: the sum of e_k^T A e_k, or the mean of z^T A z over random signs z (Hutchinson 1990).

    >>> A = torch.tensor([[1.0, 5.0], [5.0, 2.0]], dtype=torch.float64)
    >>> trace_of(A.matmul, A[0], None, 0)
    Measured(value=3.0, standard_error=0.0)
    """
    values = [float((z * product(z)).double().sum()) for z in probes(like, draws, seed)]
    return mean_of(values, exact=draws is None)


def square_of(product: Callable[[Tensor], Tensor], like: Tensor, draws: int | None, seed: int) -> Measured:
    """Return ||A||_F^2 from products with A: the sum of ||A e_k||^2, or the mean of ||A z||^2 over random signs z.

    >>> A = torch.tensor([[1.0, 5.0], [5.0, 2.0]], dtype=torch.float64)
    >>> square_of(A.matmul, A[0], None, 0).value
    55.0
    """
    values = [float(product(z).double().square().sum()) for z in probes(like, draws, seed)]
    return mean_of(values, exact=draws is None)


def root(square: Measured, size: float) -> Measured:
    """Return sqrt(square / size) with its standard error to first order.

    >>> root(Measured(8.0, 0.8), 2.0)
    Measured(value=2.0, standard_error=0.1)
    """
    value = math.sqrt(square.value / size)
    return Measured(value, square.standard_error / (2 * size * value) if value else square.standard_error)
