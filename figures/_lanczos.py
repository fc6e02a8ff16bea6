"""The eigenvalue of largest magnitude of several symmetric matrices at once, from one block product a step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor


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


def lanczos(start: Tensor, tol: float, most: int) -> Generator[Tensor, Tensor, Extreme]:
    """Yield vectors, take their products with a symmetric matrix, return its eigenvalue of largest magnitude.

    Lanczos with full reorthogonalisation; it stops where the residual is below ``tol`` times the value.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    while True:
        w = yield basis[-1]
        diagonal.append(basis[-1] @ w)
        Q = torch.stack(basis)
        for _ in range(2):  # once leaves what rounding made of a large component
            w = w - Q.T @ (Q @ w)
        off.append(w.norm())
        T = torch.diag(torch.stack(diagonal))
        if len(basis) > 1:
            side = torch.stack(off[:-1])
            T += torch.diag(side, 1) + torch.diag(side, -1)
        values, vectors = torch.linalg.eigh(T)
        k = int(values.abs().argmax())
        residual = float(off[-1] * vectors[-1, k].abs())
        value = float(values[k])
        if residual <= tol * abs(value) or len(basis) >= min(most, len(start)):
            return Extreme(value, residual, len(basis))
        basis.append(w / off[-1])


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
    generator = torch.Generator()
    running, vectors, found = {}, {}, {}
    for k, (name, rows) in enumerate(groups.items()):
        start = torch.randn(len(rows), generator=generator.manual_seed(seed + 1000 * k), dtype=torch.float64)
        running[name] = lanczos(start, tol, most)
        vectors[name] = next(running[name])
    while vectors:
        block = torch.zeros(size, len(vectors), dtype=torch.float64)
        for column, (name, vector) in enumerate(vectors.items()):
            block[groups[name], column] = vector
        products = product(block)
        for column, name in enumerate(list(vectors)):
            try:
                vectors[name] = running[name].send(products[groups[name], column])
            except StopIteration as stop:
                found[name] = stop.value
                del vectors[name]
    return {name: found[name] for name in groups}
