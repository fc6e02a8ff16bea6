"""Krylov methods for A x = b with a symmetric A: vectors stay where b is and in its dtype, scalar products are in float64.

Conjugate gradients (Hestenes and Stiefel 1952), and MINRES (Paige and Saunders 1975), also for least squares. SciPy has them for
arrays of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]


def inner(u: Tensor, v: Tensor) -> float:
    """Return <u, v>, summed in float64 where the device has it."""
    return float((u * v).sum(dtype=u.dtype if u.device.type == "mps" else torch.float64))


def norm(v: Tensor) -> float:
    """Return |v|."""
    return math.sqrt(inner(v, v))


def conjugate_gradients(product: Product, b: Tensor, *, precondition: Product | None, tol: float, most: int) -> Tensor:
    """Return x with |b - A x| <= tol |b| for a positive definite A, or the iterate after ``most`` products.

    ``product`` maps v to A v, ``precondition`` to M v with M about A^-1, symmetric and positive definite. The residual is the one
    that is updated.

    >>> A = torch.tensor([[2.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    >>> b = torch.tensor([4.0, 6.0], dtype=torch.float64)
    >>> [round(x, 9) for x in conjugate_gradients(A.mv, b, precondition=None, tol=1e-10, most=9).tolist()]
    [1.0, 1.0]
    """
    x, r, goal = torch.zeros_like(b), b, tol * norm(b)
    direction, before = b, 1.0
    for step in range(most):
        if norm(r) <= goal:
            break
        z = r if precondition is None else precondition(r)
        now = inner(r, z)
        direction = z + (now / before) * direction if step else z
        Ap = product(direction)
        length = now / inner(direction, Ap)
        x, r, before = x + length * direction, r - length * Ap, now
    return x


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
    x, older, old, z = torch.zeros_like(b), torch.zeros_like(b), b, M(b)
    beta = first = math.sqrt(max(inner(old, z), 0.0))
    if not first:
        return x
    before, cosine, sine, diagonal, above, rest = 1.0, -1.0, 0.0, 0.0, 0.0, first
    directions = [torch.zeros_like(b), torch.zeros_like(b)]
    size = 0.0  # squared Frobenius norm of T, for |A|
    for _ in range(most):
        v = z / beta
        w = product(v) - (beta / before) * older
        alpha = inner(v, w)
        w = w - (alpha / beta) * old
        older, old, z = old, w, M(w)
        before, beta = beta, math.sqrt(max(inner(w, z), 0.0))
        # the new column of T is (before, alpha, beta); the rotations before it turn its upper part
        two_above, above = above, sine * beta
        upper, lower = cosine * diagonal + sine * alpha, sine * diagonal - cosine * alpha
        diagonal = -cosine * beta
        size += alpha**2 + 2 * beta**2
        whole = math.sqrt(size)
        if math.hypot(lower, diagonal) <= tol * whole:  # |A r| / |r| of x as it is; a step would divide by what is left
            break
        gamma = max(math.hypot(lower, beta), torch.finfo(b.dtype).tiny)
        cosine, sine = lower / gamma, beta / gamma
        directions = [directions[1], (v - two_above * directions[0] - upper * directions[1]) / gamma]
        x = x + (cosine * rest) * directions[1]
        rest *= sine
        if abs(rest) <= tol * max(first, whole * norm(x)) or not beta:
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
    x, r, total = torch.zeros_like(b), b, norm(b)
    if not total:
        return x
    u = b / total
    v = product(u)
    alpha = norm(v)
    if not alpha:
        return x
    v = v / alpha
    direction, second = torch.zeros_like(v), torch.zeros_like(v)
    A_direction, A_second = direction, second
    alpha_bar, slope, size = alpha, alpha * total, alpha**2
    rho = rho_bar = cosine_bar = 1.0
    theta = sine_bar = 0.0
    for _ in range(1, most, 2):
        Av = product(v)
        direction, A_direction = v - (theta / rho) * direction, Av - (theta / rho) * A_direction
        u = Av - alpha * u
        beta = norm(u)
        u = u / (beta or 1.0)
        v = product(u) - beta * v
        alpha = norm(v)
        v = v / (alpha or 1.0)
        rho_old, rho_bar_old = rho, rho_bar
        rho = math.hypot(alpha_bar, beta)
        cosine, sine = alpha_bar / rho, beta / rho
        theta, alpha_bar = sine * alpha, cosine * alpha
        theta_bar, turned = sine_bar * rho, cosine_bar * rho
        rho_bar = math.hypot(turned, theta)
        cosine_bar, sine_bar = turned / rho_bar, theta / rho_bar
        length, slope = cosine_bar * slope / (rho * rho_bar), -sine_bar * slope
        turn = theta_bar * rho / (rho_old * rho_bar_old)
        second, A_second = direction - turn * second, A_direction - turn * A_second
        x, r = x + length * second, r - length * A_second
        size += beta**2 + alpha**2
        if norm(r) <= tol * total or abs(slope) <= 1e-3 * tol * math.sqrt(size) * norm(r):
            break
    return x
