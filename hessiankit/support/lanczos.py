"""Extreme eigenvalues of a symmetric matrix, and Gauss quadrature of its spectral measure, from products by Lanczos."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.inner_products import entries, inner, norm, normal, summed

Product: TypeAlias = Callable[[Tensor], Tensor]
CHUNK = 2**16  # entries of the vectors that a restart combines at once
SINGULAR = 64  # times the rounding error of the largest product: a smaller residual leaves no direction


@dataclass(frozen=True)
class RitzValue(WithDict):
    """The largest Ritz value of a symmetric matrix H; or of A^T A, with its root and the root's residual, a singular value of A.

    Attributes:
        value: Ritz value, at most the largest eigenvalue up to rounding.
        residual: ``|H v - value v|`` of its unit vector v, from one more product: some eigenvalue of H lies within it, not
            necessarily the largest. Of a singular value ``|A^T A v - value^2 v| / value``.
        products: Products with H (A^T A) that it took.
        vector: v, (P,); None where it was not kept.
    """

    value: float
    residual: float
    products: int
    converged: bool
    vector: Tensor | None = None

    _hidden = ("vector",)

    @property
    def relative(self) -> float:
        """The residual over the value; 0 where both are 0."""
        return self.residual / abs(self.value) if self.value else 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.converged else "?")

    def __repr__(self) -> str:
        state = "" if self.converged else ", not converged"
        return f"RitzValue({self.value:.6g}, residual {self.residual:.1e}, {self.products} products{state})"


class LanczosBasis:
    """Orthonormal vectors q_1 ... q_n with T = Q^T H Q and the residual w = (I - Q Q^T) H q_n, orthogonalised twice.

    :attr:`direction` is the next vector to multiply, :meth:`take` takes its product. Where w is zero to rounding, Q spans an
    invariant space, and the next direction is random.

    Args:
        start: First direction, (P,), not zero; in the dtype of the products.
        capacity: Vectors kept at most.
        against: Orthonormal rows (k, P) that all directions are kept orthogonal to: H is compressed to their complement.
        seed: Seed of the random directions.
        norm: Norm of H, as far as it is known: products far below it are rounding.
    """

    def __init__(self, start: Tensor, capacity: int, *, against: Tensor | None = None, seed: int = 0, norm: float = 0.0) -> None:
        self.against, self.seed, self.draws = against, seed, 0
        self.Q, self.size = start.new_empty(capacity, start.numel()), entries(start)
        self.T = torch.zeros(capacity, capacity, dtype=torch.float64, device="cpu")
        self.n, self.taken = 0, 0  # vectors whose products are in T, and all products
        self.beta, self.largest = 0.0, norm  # |w|, and the largest norm of a product
        # <H q_k, q_n> of the earlier q_k, which symmetry makes <q_k, H q_n> but for the residuals that turns left out
        self.known, self.dropped = torch.zeros(0, dtype=torch.float64, device="cpu"), 0.0
        self._aim(start)

    def _aim(self, vector: Tensor) -> None:
        """Set the next direction, a unit vector orthogonal to all others."""
        for _ in range(2):  # once more: the first pass leaves what rounding made of a large component
            vector = self._orthogonal(vector / norm(vector))[0]
        self.direction = vector / norm(vector)

    def _orthogonal(self, w: Tensor, n: int | None = None) -> tuple[Tensor, Tensor]:
        if self.against is not None:
            w = w - summed(self.against @ w) @ self.against
        Q = self.Q[: self.n if n is None else n]
        column = summed(Q @ w)
        return w - column @ Q, column

    def turn(self) -> None:
        """Set the next direction to a random one."""
        old_direction = self.direction
        self.draws += 1
        self._aim(normal(self.Q.shape[1], self.seed + 7919 * self.draws).to(self.Q))
        self.dropped += float(self.known.norm())
        self.known = self.known * inner(old_direction, self.direction)

    def take(self, w: Tensor) -> None:
        """Take the product of H with :attr:`direction`; an InputError where it is not finite, or H is not symmetric."""
        n = self.n + 1
        self.Q[n - 1] = self.direction
        self.largest = max(self.largest, norm(w))
        w, column = self._orthogonal(w, n)
        w, correction = self._orthogonal(w, n)
        projections = (column + correction).double().cpu()
        beta = norm(w)
        if not math.isfinite(beta):
            raise InputError(f"lanczos: product {self.taken + 1} with the matrix is NaN or infinite: there are no eigenvalues")
        loss = float((projections[:-1] - self.known).abs().max()) - self.dropped if n > 1 else 0.0
        error = loss / self.largest if self.largest else 0.0
        eps = torch.finfo(w.dtype).eps
        if error > eps**0.5:
            why = "an operation of the model has a wrong second derivative, or the model is not the same at every call"
            differ = f"<u, Hv> and <v, Hu> differ by {error:.1e} of |Hv|, more than rounding"
            raise InputError(f"lanczos: {differ}, so that H is not symmetric: {why}")
        self.T[:n, n - 1] = self.T[n - 1, :n] = projections
        self.n, self.beta, self.taken, self.known = n, beta, self.taken + 1, torch.zeros(n, dtype=torch.float64, device="cpu")
        self.known[-1] = beta
        if beta > SINGULAR * eps * self.largest:
            self.direction = w / beta
        elif n < self.size - (0 if self.against is None else len(self.against)):
            self.turn()

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the Ritz values, ascending, and their vectors in the basis as columns, in float64 on the CPU."""
        return tuple(torch.linalg.eigh(self.T[: self.n, : self.n]))

    def combine(self, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the combinations of the basis by the columns of ``weights`` (n, k), as rows (k, P); ``out`` may lie in Q."""
        out = self.Q.new_empty(weights.shape[1], self.Q.shape[1]) if out is None else out
        rows = weights.T.to(self.Q)
        for start in range(0, self.Q.shape[1], CHUNK):
            columns = slice(start, start + CHUNK)
            out[:, columns] = rows @ self.Q[: self.n, columns]
        return out

    def restart(self, columns: list[int]) -> None:
        """Keep Ritz vectors, by their places among the ascending values, and the next direction (Wu and Simon, 2000)."""
        values, vectors = self.ritz()
        self.combine(vectors[:, columns], self.Q[: len(columns)])
        self.T.zero_()
        self.T.diagonal()[: len(columns)] = values[columns]
        self.known = float(self.known[-1]) * vectors[-1, columns]
        self.n = len(columns)


@dataclass(frozen=True)
class RitzPairs:
    """Ritz values at the ends of the spectrum of a symmetric matrix H with their vectors.

    Attributes:
        values: Ritz values of the upper end, then those of the lower, in descending order, (k,), float64 on the CPU.
        vectors: Unit Ritz vectors, as rows (k, P).
        residuals: |H v - value v| of each, by the recurrence, with its rounding by a product: some eigenvalue lies within it,
            and to second order in it where the residual is small beside the distance to the others, (k,).
        products: Products with H taken.
        converged: Whether all residuals are within the tolerance.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    converged: bool

    def __str__(self) -> str:
        rows = [
            f"{value:.6g} +- {residual:.1e}"
            for value, residual in zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        ]
        return f"{', '.join(rows)} ({self.products} products)"


def extreme_eigenpairs(
    product: Product,
    start: Tensor,
    *,
    top: int = 1,
    bottom: int = 0,
    tol: float = 1e-3,
    most: int = 60,
    basis: int = 20,
    again: bool = True,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda products, converged: None,
) -> RitzPairs:
    """Return eigenpairs at both ends of a spectrum by Lanczos with full reorthogonalisation and thick restarts.

    When the basis is full, the better half of its Ritz vectors and the last direction start the next one (Wu and Simon, SIAM J.
    Matrix Anal. Appl. 22, 2000). A Krylov space holds one vector of every eigenspace, so that multiple eigenvalues would be
    counted once: when all wanted pairs have converged they are kept, and the basis is filled from a random direction orthogonal
    to them; if that changes one of the wanted values, the search continues.

    Args:
        product: v (P,) -> H v; for the residuals V (P, k) -> H V too with ``again``, where ``top + bottom`` is more than 1.
        start: First direction, (P,), not zero; in the dtype of the products.
        top: Eigenvalues wanted at the upper end.
        bottom: Eigenvalues wanted at the lower end; top + bottom <= P.
        tol: Tolerance of the residuals, relative to the largest |Ritz value|.
        most: Products at most, those for the residuals included.
        basis: Vectors kept at most; at least top + bottom + 2.
        again: Whether to search again, for multiple eigenvalues. One search meets one vector of every eigenspace, and one
            product of the sum of its vectors verifies all residuals; after a second one each has a product of its own.
        seed: Seed of random directions.
        tell: Called with (products, pairs converged) after each product that does not end the search.

    Raises:
        InputError: A product is not finite, or H is not symmetric.
    """
    size = entries(start)
    pairs, space = top + bottom, LanczosBasis(start, min(basis, size), seed=seed)
    verifying = pairs if again else 1  # products after the search
    goal = tol / 2 if again else 0.9 * tol  # the rest is for residuals that turns leave out, and for rounding
    old_values: Tensor | None = None  # the wanted values when they converged last
    while True:
        space.take(product(space.direction))
        values, vectors = space.ritz()
        n, full = space.n, space.n == len(space.Q)
        columns = sorted({*range(n - min(top, n), n), *range(min(bottom, n))})
        scale = float(values.abs().max())
        converged_pairs = space.beta * vectors[-1, columns].abs() <= goal * scale
        if n == size or space.taken >= most - verifying:
            break
        if n >= pairs and bool(converged_pairs.all()):
            new = old_values is None or bool(((values[columns] - old_values).abs() > tol * scale).any())
            if not again or (full and not new):
                break
            if new:
                old_values, full = values[columns], False
                space.restart(columns)
                space.turn()
        if full:
            extra = (len(space.Q) - pairs) // 2
            upper = extra if not bottom else 0 if not top else -(-extra // 2)
            restart_columns = {*range(n - top - upper, n), *range(bottom + extra - upper)}
            space.restart(sorted(restart_columns, reverse=True))
        tell(space.taken, int(converged_pairs.sum()))
    ends, weights = values[columns[::-1]], vectors[:, columns[::-1]]
    V = space.combine(weights)
    V = V / summed(V.square().sum(1, keepdim=True)).sqrt()
    # H V = V diag(values) + direction last^T, but for rounding and the residuals that turns left out
    last = torch.zeros_like(ends) if again else space.beta * weights[-1]
    HV = ends.to(V).unsqueeze(1) * V + torch.outer(last.to(V), space.direction)
    rows, expected = (V, HV) if again else (V.sum(0, keepdim=True), HV.sum(0, keepdim=True))
    products_of_rows = product(rows[0]).unsqueeze(0) if len(rows) == 1 else product(rows.T).T
    residuals = last.abs() + summed((products_of_rows - expected).square().sum(1)).sqrt().double().cpu()
    ok = len(V) == pairs and bool((residuals <= tol * scale).all())
    return RitzPairs(ends, V, residuals, space.taken + len(rows), ok)


def lanczos(product: Product, start: Tensor, *, tol: float = 1e-3, most: int = 60, basis: int = 20) -> RitzValue:
    """Return the largest eigenvalue of a symmetric matrix H, as :func:`extreme_eigenpairs`; one product is for the residual.

    >>> H = torch.diag(torch.tensor([-9.0, 1.0, 2.0, 5.0], dtype=torch.float64))
    >>> found = lanczos(H.matmul, torch.ones(4, dtype=torch.float64))
    >>> round(found.value, 9), found.residual < 1e-9, found.converged
    (5.0, True, True)
    """
    pairs = extreme_eigenpairs(product, start, tol=tol, most=most, basis=min(basis, most), again=False)
    return RitzValue(float(pairs.values[0]), float(pairs.residuals[0]), pairs.products, pairs.converged, pairs.vectors[0])


def quadrature(
    product: Product, starts: Tensor, steps: int, *, against: Tensor | None = None, norm: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """Return nodes and weights (m,) of the Gauss quadrature of each start vector's spectral measure, m <= ``steps``.

    sum_i weight_i f(node_i) = q^T f(H) q for polynomials f of degree below 2 m, with q the unit vector of the start (Golub and
    Meurant, Matrices, Moments and Quadrature, 2010, Sec. 3 and 6).

    Args:
        product: V (P, k) -> H V.
        starts: Rows (s, P), whose products are taken together.
        steps: Lanczos steps, products of each start.
        against: Orthonormal rows whose complement H is compressed to; the starts are projected.
        norm: Norm of H, as far as it is known.

    >>> H = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> [(nodes, weights)] = quadrature(H.matmul, torch.ones(1, 2, dtype=torch.float64), 2)
    >>> [round(x, 9) for x in nodes.tolist()], [round(w, 9) for w in weights.tolist()]
    ([1.0, 3.0], [0.5, 0.5])
    """
    room = entries(starts[0]) - (0 if against is None else len(against))
    bases = [LanczosBasis(start, min(steps, room), against=against, norm=norm) for start in starts]
    unfinished = bases
    while unfinished:
        W = product(torch.stack([basis.direction for basis in unfinished], dim=1))
        for basis, w in zip(unfinished, W.T, strict=True):
            basis.take(w)
        # a random direction has no weight in the start's measure
        unfinished = [basis for basis in unfinished if basis.n < len(basis.Q) and not basis.draws]
    return [(nodes, vectors[0].square()) for nodes, vectors in (basis.ritz() for basis in bases)]
