"""Krylov methods for A x = b with a symmetric A: a function for each iteration, and a solver class for each method of ``solve``.

Conjugate gradients where the matrix is positive definite (Hestenes and Stiefel 1952), MINRES where it is symmetric (Paige and
Saunders 1975), LSMR for least squares (Fong and Saunders 2011). Vectors stay where b is and in its dtype, scalar products are in
float64; SciPy has such functions for arrays of the host.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hessiankit.curvature.tensor_operator import TensorOperator
from hessiankit.support.errors import InputError
from hessiankit.support.inner_products import inner, norm, summed
from hessiankit.support.lanczos import Product, RitzValue, lanczos


def unit(v: Tensor) -> tuple[Tensor, float]:
    """Return v / |v| and |v|; zeros as they are."""
    size = norm(v)
    return v / (size or 1.0), size


def descent(product: Product, b: Tensor, *, precondition: Product | None, tol: float, most: int) -> tuple[Tensor, Tensor | None]:
    """Return x of :func:`conjugate_gradients`, and the direction p with <p, A p> <= 0, to rounding, that ended it, or None."""
    x, r, goal = torch.zeros_like(b), b, tol * norm(b)
    direction, decrease_before = b, 1.0
    for step in range(most):
        if norm(r) <= goal:
            break
        z = r if precondition is None else precondition(r)
        decrease = inner(r, z)
        direction = z + (decrease / decrease_before) * direction if step else z
        Ap = product(direction)
        curvature = inner(direction, Ap)
        if curvature <= torch.finfo(b.dtype).eps * norm(direction) * norm(Ap) and norm(direction):
            return x, direction
        length = decrease / curvature
        x, r, decrease_before = x + length * direction, r - length * Ap, decrease
    return x, None


def conjugate_gradients(product: Product, b: Tensor, *, precondition: Product | None, tol: float, most: int) -> Tensor:
    """Return x with |b - A x| <= tol |b| for a positive definite A, or the iterate after ``most`` products.

    ``product`` maps v to A v, ``precondition`` to M v with M about A^-1, symmetric and positive definite. The residual is the one
    that is updated. A matrix that is not positive definite ends it at the iterate before.

    >>> A = torch.tensor([[2.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    >>> b = torch.tensor([4.0, 6.0], dtype=torch.float64)
    >>> [round(x, 9) for x in conjugate_gradients(A.mv, b, precondition=None, tol=1e-10, most=9).tolist()]
    [1.0, 1.0]
    """
    return descent(product, b, precondition=precondition, tol=tol, most=most)[0]


def minres(product: Product, b: Tensor, *, precondition: Product | None, tol: float, most: int) -> Tensor:
    """Return x that minimises |b - A x| in a Krylov space, until that is tol |A| |x| or the gradient |A r| is tol |A| |r|.

    Lanczos with the preconditioner gives a tridiagonal T, which Givens rotations bring to the upper triangular R column by
    column; the directions are the columns of V R^-1. Arguments as of :func:`conjugate_gradients`, A symmetric.

    >>> A = torch.tensor([[0.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    >>> b = torch.tensor([4.0, 6.0], dtype=torch.float64)
    >>> [round(x, 9) for x in minres(A.mv, b, precondition=None, tol=1e-10, most=9).tolist()]
    [3.0, 2.0]
    """
    M: Product = precondition or (lambda v: v)
    x, basis_before, basis, z = torch.zeros_like(b), torch.zeros_like(b), b, M(b)
    beta = beta_first = math.sqrt(max(inner(basis, z), 0.0))
    if not beta_first:
        return x
    beta_before, cosine, sine, diagonal, superdiagonal, residual = 1.0, -1.0, 0.0, 0.0, 0.0, beta_first
    directions = [torch.zeros_like(b), torch.zeros_like(b)]
    size = 0.0  # squared Frobenius norm of T, for |A|
    for _ in range(most):
        v = z / beta
        w = product(v) - (beta / beta_before) * basis_before
        alpha = inner(v, w)
        w = w - (alpha / beta) * basis
        basis_before, basis, z = basis, w, M(w)
        beta_before, beta = beta, math.sqrt(max(inner(w, z), 0.0))
        # the new column of T is (beta_before, alpha, beta); the rotations before it turn its upper part
        second_superdiagonal, superdiagonal = superdiagonal, sine * beta
        upper, lower = cosine * diagonal + sine * alpha, sine * diagonal - cosine * alpha
        diagonal = -cosine * beta
        size += alpha**2 + 2 * beta**2
        norm_A = math.sqrt(size)
        if math.hypot(lower, diagonal) <= tol * norm_A:  # |A r| / |r| of x as it is; a step would divide by what is left
            break
        gamma = max(math.hypot(lower, beta), torch.finfo(b.dtype).tiny)
        cosine, sine = lower / gamma, beta / gamma
        directions = [directions[1], (v - second_superdiagonal * directions[0] - upper * directions[1]) / gamma]
        x = x + (cosine * residual) * directions[1]
        residual *= sine
        if abs(residual) <= tol * max(beta_first, norm_A * norm(x)) or not beta:
            break
    return x


def lsmr(product: Product, b: Tensor, *, tol: float, most: int) -> Tensor:
    """Return the shortest x that minimises |b - A x|, until that is tol |b|, or the gradient |A r| is 1e-3 tol |A| |r|.

    Golub and Kahan's bidiagonalisation of A, on which |A r| is minimised; two products a step. A rotation brings the bidiagonal
    matrix to the triangular R, a second one its transpose. The products of A with the directions are combined as these are, so
    that r is at hand. Arguments as of :func:`minres`.

    >>> A = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> b = torch.tensor([4.0, 0.0], dtype=torch.float64)
    >>> [round(x, 9) for x in lsmr(A.mv, b, tol=1e-10, most=9).tolist()]
    [1.0, 1.0]
    """
    x, r = torch.zeros_like(b), b
    u, norm_b = unit(b)
    v, alpha = unit(product(u))
    if not alpha:
        return x
    direction, direction_bar = torch.zeros_like(v), torch.zeros_like(v)
    A_direction, A_direction_bar = direction, direction_bar
    alpha_bar, slope, size = alpha, alpha * norm_b, alpha**2
    rho = rho_bar = cosine_bar = 1.0
    theta = sine_bar = 0.0
    for _ in range(1, most, 2):
        Av = product(v)
        direction, A_direction = v - (theta / rho) * direction, Av - (theta / rho) * A_direction
        u, beta = unit(Av - alpha * u)
        v, alpha = unit(product(u) - beta * v)
        rho_old, rho_bar_old = rho, rho_bar
        rho = math.hypot(alpha_bar, beta)
        cosine, sine = alpha_bar / rho, beta / rho
        theta, alpha_bar = sine * alpha, cosine * alpha
        theta_bar, rho_tilde = sine_bar * rho, cosine_bar * rho
        rho_bar = math.hypot(rho_tilde, theta)
        cosine_bar, sine_bar = rho_tilde / rho_bar, theta / rho_bar
        length, slope = cosine_bar * slope / (rho * rho_bar), -sine_bar * slope
        ratio = theta_bar * rho / (rho_old * rho_bar_old)
        direction_bar, A_direction_bar = direction - ratio * direction_bar, A_direction - ratio * A_direction_bar
        x, r = x + length * direction_bar, r - length * A_direction_bar
        size += beta**2 + alpha**2
        if norm(r) <= tol * norm_b or abs(slope) <= 1e-3 * tol * math.sqrt(size) * norm(r):
            break
    return x


RITZ_PRODUCTS = 60
"""Products with H for its most negative Ritz value, which tells how much damping is missing: three digits are enough."""
STAGNATION = 0.9
"""Share of the residual that a restart has to remove less of than the rest: above it, b is not in the range, or rounding is
reached."""


class System:
    """A = H + damping I.

    Attributes:
        operator: H.
        damping: Number added to the diagonal.
        products: Number of products with H so far.
    """

    def __init__(self, operator: TensorOperator, damping: float) -> None:
        self.operator, self.damping, self.products = operator, damping, 0

    def product(self, v: Tensor) -> Tensor:
        """Return A v."""
        self.products += 1
        Av: Tensor = (self.operator @ v).add(v, alpha=self.damping)
        if not math.isfinite(float(summed(Av.sum()))) and float(summed(torch.isfinite(Av).logical_not().sum())):
            raise InputError("solve: a product with the operator is NaN or infinite, so the system has no solution")
        return Av

    def is_null(self, r: Tensor, b: Tensor, tol: float) -> bool:
        """Return whether |A r| <= tol |A| |r| of a remainder r of b, with a lower bound for |A|: |A v| / |v| of A b and of b - r.

        The one of b itself is too small where b lies almost in the null space.
        """
        size = max(norm(self.product(v)) / max(norm(v), 1e-300) for v in (self.product(b), b - r))
        return norm(self.product(r)) <= tol * size * norm(r)

    def lowest(self, start: Tensor) -> RitzValue:
        """Return the smallest Ritz value of H from a start vector."""
        lowest = lanczos(lambda v: -(self.operator @ v), start, tol=1e-3, most=RITZ_PRODUCTS)
        self.products += lowest.products
        return replace(lowest, value=-lowest.value)


class Iterate(NamedTuple):
    """An approximate solution for one right-hand side.

    Attributes:
        method: Name of the method that gave x.
        x: Solution, or last iterate.
        remainder: b - A x, from a product of its own.
        lowest: Smallest Ritz value of H, where a method before this one met an A that is not positive definite.
    """

    method: str
    x: Tensor
    remainder: Tensor
    lowest: RitzValue | None = None


class Solver(Protocol):
    """A method for A x = b, for one right-hand side after the other."""

    def solve(self, A: System, b: Tensor, M: Product | None, tol: float, most: int) -> Iterate | RitzValue:
        """Return x with |b - A x| <= tol |b|, or the iterate after ``most`` products; M v is about A^-1 v.

        A method for positive definite matrices answers another one by the smallest Ritz value of H.
        """


class ConjugateGradients:
    """Conjugate gradients, for a positive definite A."""

    def solve(self, A: System, b: Tensor, M: Product | None, tol: float, most: int) -> Iterate | RitzValue:
        x, direction = descent(A.product, b, precondition=M, tol=tol / 2, most=most)
        return Iterate("cg", x, b - A.product(x)) if direction is None else A.lowest(direction)


class Restarts:
    """A method that stops by a measure of its own, restarted until |b - A x| is tol |b|.

    Attributes:
        name: Name of the method.
    """

    name: str

    def step(self, A: System, r: Tensor, M: Product | None, tol: float, most: int) -> Tensor:
        """Return x with |r - A x| about tol |r|."""
        raise NotImplementedError

    def solve(self, A: System, b: Tensor, M: Product | None, tol: float, most: int) -> Iterate:
        x, r, size = torch.zeros_like(b), b, norm(b)
        end = A.products + most
        while A.products < end and norm(r) > tol / 2 * size:
            goal, previous = min(tol * size / norm(r), max(tol, 1e-3)), norm(r)
            change = self.step(A, r, M, goal, max(1, end - A.products))
            r = r - A.product(change)
            x = x + change if norm(r) < previous else x
            if not norm(r) < STAGNATION * previous:
                break
        return Iterate(self.name, x, b - A.product(x))


class MinimalResiduals(Restarts):
    """MINRES, for a symmetric A."""

    name = "minres"

    def step(self, A: System, r: Tensor, M: Product | None, tol: float, most: int) -> Tensor:
        return minres(A.product, r, precondition=M, tol=tol / 10, most=most)


class LeastSquares(Restarts):
    """LSMR, for the shortest least-squares solution; without a preconditioner."""

    name = "lsmr"

    def step(self, A: System, r: Tensor, M: Product | None, tol: float, most: int) -> Tensor:
        return lsmr(A.product, r, tol=tol / 4, most=most)


class Fallbacks:
    """Conjugate gradients; MINRES from the beginning where A is not positive definite; LSMR where these stagnate.

    Conjugate gradients that another method had to replace are not tried again with the next right-hand side.
    """

    def __init__(self) -> None:
        self.first: Solver = ConjugateGradients()

    def solve(self, A: System, b: Tensor, M: Product | None, tol: float, most: int) -> Iterate:
        end, best = A.products + most, self.first.solve(A, b, M, tol, most)
        if isinstance(best, RitzValue):
            self.first = MinimalResiduals()
            best = self.first.solve(A, b, M, tol, most)._replace(lowest=best)
        if A.products < end and norm(best.remainder) > tol * norm(b):
            other = LeastSquares().solve(A, b, None, tol, end - A.products)
            if norm(other.remainder) <= (1 + tol) * norm(best.remainder) or A.is_null(other.remainder, b, tol):
                self.first, best = MinimalResiduals(), other._replace(lowest=best.lowest)
        return best


SOLVERS: dict[str, type[Solver]] = {
    "auto": Fallbacks,
    "cg": ConjugateGradients,
    "minres": MinimalResiduals,
    "lsmr": LeastSquares,
}
"""Solvers by the name of their method; one is made for each system."""
