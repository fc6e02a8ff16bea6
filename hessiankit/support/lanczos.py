"""The largest eigenvalue of a symmetric matrix from its products, with its residual, by Lanczos."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.errors import InputError


@dataclass(frozen=True)
class RitzValue:
    """The largest Ritz value of a symmetric matrix H; or of A^T A, with its root and the root's residual, a singular value of A.

    Attributes:
        value: Never above the largest eigenvalue, rounding aside.
        residual: ``|H v - value v|`` of its unit vector v, from one more product: some eigenvalue of H lies within it, which is
            no proof that it is the largest. Of a singular value ``|A^T A v - value^2 v| / value``.
        products: Products with H (A^T A) that it took.
        converged: Whether the residual is within the tolerance asked for.
        vector: v, (P,); None where it was not kept.
    """

    value: float
    residual: float
    products: int
    converged: bool
    vector: Tensor | None = None

    @property
    def relative(self) -> float:
        """The residual over the value; 0 where both are 0."""
        return self.residual / abs(self.value) if self.value else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the vector as plain Python numbers."""
        return {name: getattr(self, name) for name in ("value", "residual", "products", "converged")}

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.converged else "?")

    def __repr__(self) -> str:
        state = "" if self.converged else ", not converged"
        return f"RitzValue({self.value:.6g}, residual {self.residual:.1e}, {self.products} products{state})"


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, tol: float = 1e-3, most: int = 60, basis: int = 20
) -> RitzValue:
    """Return the largest eigenvalue of a symmetric matrix H by Lanczos with full reorthogonalisation and thick restarts.

    The basis is made orthogonal twice at every step. When it is full, the better half of its Ritz vectors and the last
    direction start the next one (Wu and Simon, SIAM J. Matrix Anal. Appl. 22, 2000), so that memory stays at ``basis`` vectors.

    Args:
        product: v (P,) -> H v (P,).
        start: Vector to start from, (P,), not zero; in the dtype of the products.
        tol: Of the residual, relative to the eigenvalue of largest magnitude met so far.
        most: Products at most; one of them is spent on the residual.
        basis: Vectors kept at most, 3 or more.

    Raises:
        InputError: A product is not finite, or H is not symmetric.

    >>> H = torch.diag(torch.tensor([-9.0, 1.0, 2.0, 5.0], dtype=torch.float64))
    >>> found = lanczos(H.matmul, torch.ones(4, dtype=torch.float64))
    >>> round(found.value, 9), found.residual < 1e-9, found.converged
    (5.0, True, True)
    """
    Q = [start / start.norm()]
    T = torch.zeros(basis, basis, dtype=torch.float64)
    known = torch.zeros(0, dtype=torch.float64)  # <H q_k, q_n> of the earlier q_k; symmetry makes it <q_k, H q_n>
    done, largest = 0, 0.0
    while True:
        w = product(Q[-1])
        done += 1
        n = len(Q)
        largest = max(largest, float(w.norm()))
        column = torch.stack([q @ w for q in Q])
        for k, q in enumerate(Q):
            w = w - column[k] * q
        for k, q in enumerate(Q):  # once more: the first pass leaves what rounding made of a large component
            again = q @ w
            column[k] += again
            w = w - again * q
        T[:n, n - 1] = T[n - 1, :n] = found = column.double().cpu()
        beta = float(w.norm())
        if not math.isfinite(beta):
            raise InputError(f"lanczos: product {done} with the matrix is NaN or infinite, so it has no eigenvalues to find")
        error = float((found[:-1] - known).abs().max()) / largest if n > 1 and largest else 0.0
        if error > torch.finfo(start.dtype).eps ** 0.5:
            raise InputError(
                f"lanczos: <u, Hv> and <v, Hu> differ by {error:.1e} of |Hv|, more than rounding, so that H is not symmetric: an "
                "operation of the model has a wrong second derivative, or the model is not the same at every call"
            )
        values, vectors = torch.linalg.eigh(T[:n, :n])
        estimate, scale = beta * abs(float(vectors[-1, -1])), float(values.abs().max())
        if estimate <= tol * scale or done >= most - 1 or n >= len(start):
            return _result(product, Q, vectors[:, -1], done, tol * scale)
        known = torch.zeros(n, dtype=torch.float64)
        known[-1] = beta
        if n == basis:
            kept = max(1, basis // 2)
            Q = [_combine(Q, vectors[:, -k]) for k in range(1, kept + 1)]
            T.zero_()
            T.diagonal()[:kept] = values.flip(0)[:kept]
            known = beta * vectors[-1].flip(0)[:kept]
        Q.append(w / beta)


def _result(product: Callable[[Tensor], Tensor], Q: list[Tensor], weights: Tensor, done: int, allowed: float) -> RitzValue:
    v = _combine(Q, weights)
    v = v / v.norm()
    Hv = product(v)
    value = float(v @ Hv)
    residual = float((Hv - value * v).norm())
    return RitzValue(value, residual, done + 1, residual <= allowed, v)


def _combine(Q: list[Tensor], weights: Tensor) -> Tensor:
    out = torch.zeros_like(Q[0])
    for q, weight in zip(Q, weights.tolist(), strict=True):
        out += weight * q
    return out
