"""The eigenvalue of largest magnitude of several symmetric matrices at once, from one block product a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.support.lanczos import LanczosBasis


@dataclass(frozen=True)
class Extreme:
    """An eigenvalue of largest magnitude.

    Args:
        value: The Ritz value.
        residual: |A v - value v| of its unit vector v, so that an eigenvalue lies within it.
        products: Products with A that it took.
    """

    value: float
    residual: float
    products: int


def extremes(
    product: Callable[[Tensor], Tensor], size: int, groups: dict[str, Tensor], *, tol: float = 1e-3, most: int = 80, seed: int = 0
) -> dict[str, Extreme]:
    """Return the eigenvalue of largest magnitude of the diagonal block of every group of rows.

    Args:
        product: Matrix (size, k) -> symmetric matrix times it.
        size: Rows of the symmetric matrix.
        groups: Name -> rows of the group, which may overlap.
        tol: Of the residual, relative to the value.
        most: Products at most.
        seed: Of the start vectors, which depend on the group's name and size, nothing else.

    >>> A = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, -5.0]], dtype=torch.float64)
    >>> found = extremes(A.matmul, 3, {"first two": torch.tensor([0, 1]), "all": torch.arange(3)})
    >>> {name: round(one.value, 6) for name, one in found.items()}
    {'first two': 3.0, 'all': -5.0}
    """
    bases, found = {}, {}
    for k, (name, rows) in enumerate(groups.items()):
        generator = torch.Generator().manual_seed(seed + 1000 * k)
        bases[name] = LanczosBasis(torch.randn(len(rows), generator=generator, dtype=torch.float64), min(most, len(rows)))
    while bases:
        block = torch.zeros(size, len(bases), dtype=torch.float64)
        for column, (name, basis) in enumerate(bases.items()):
            block[groups[name], column] = basis.direction
        products = product(block)
        for column, (name, basis) in enumerate(list(bases.items())):
            basis.take(products[groups[name], column])
            values, vectors = basis.ritz()
            k = int(values.abs().argmax())
            value, residual = float(values[k]), basis.beta * float(vectors[-1, k].abs())
            if residual <= tol * abs(value) or basis.n == len(basis.Q):
                found[name] = Extreme(value, residual, basis.n)
                del bases[name]
    return {name: found[name] for name in groups}
