r"""Spectral norms of a given matrix as intervals that hold despite rounding.

Every bound here is on the floating-point matrix that it is given, each entry taken as exact, and accounts for the
rounding of its own arithmetic: with u the unit roundoff and g_n = n u / (1 - n u),

    |fl(x . y) - x . y| <= g_n |x| . |y|          for sums in any order (Higham, Accuracy and Stability, Section 3.1)

so that a computed quantity is widened by its own error before it is called a bound. Matrix products are taken to be sums of
products in some order, which BLAS libraries are (Strassen's method is not).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.curvature.dense import LANCZOS_ROWS, norm_by_lanczos
from hessiankit.support.errors import InputError

SQUARINGS = 5
"""Schatten norms are taken of order 2^(SQUARINGS + 1): at most n^(1/64) above the spectral norm."""
WIDENINGS = 1e-12, 1e-10, 1e-8, 1e-6, 1e-4
"""Relative increases of a norm in floating point, tried in turn until Cholesky's method proves it a bound."""


class CertifiedInterval(NamedTuple):
    """Two numbers that a quantity lies between."""

    lower: float
    upper: float


def growth(n: int) -> float:
    """Return g_n = n u / (1 - n u), the relative error of a sum of n products in float64.

    Raises:
        InputError: If n u is not below 1/2, where nothing can be certified.

    >>> growth(10) < 1.2e-15
    True
    """
    u = torch.finfo(torch.float64).eps / 2
    if not n * u < 0.5:
        raise InputError(f"certified: sums of {n} terms have no digits left in float64; certify a smaller matrix")
    return n * u / (1 - n * u)


def up(value: float, steps: int = 4) -> float:
    """Return a number above the value by a few units in the last place, to cover a few roundings in Python's arithmetic.

    >>> up(1.0) > 1.0, up(0.0) > 0.0
    (True, True)
    """
    for _ in range(steps):
        value = math.nextafter(value, math.inf)
    return value


def down(value: float, steps: int = 4) -> float:
    """Return a number below the value by a few units in the last place, or 0."""
    for _ in range(steps):
        value = math.nextafter(value, -math.inf)
    return max(value, 0.0)


def frobenius_upper(A: Tensor) -> float:
    """Return an upper bound on ||A||_F, hence on ||A||_2.

    >>> 5.0 <= frobenius_upper(torch.tensor([[3.0, 4.0]])) < 5.0 * (1 + 1e-14)
    True
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    square = float((A * A).sum())
    return up(scale * math.sqrt(up(square * (1 + 2 * growth(A.numel() + 2)))))


def gershgorin_upper(A: Tensor) -> float:
    """Return sqrt(||A||_1 ||A||_inf) >= ||A||_2: for a symmetric matrix the largest row sum, Gershgorin's bound.

    >>> 7.0 <= gershgorin_upper(torch.tensor([[3.0, 4.0], [4.0, 3.0]])) < 7.0 * (1 + 1e-14)
    True
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    rows, columns = float(A.abs().sum(1).max()), float(A.abs().sum(0).max())
    return up(scale * math.sqrt(up(rows * columns * (1 + 3 * growth(max(A.shape) + 2)))))


def schatten_upper(A: Tensor, squarings: int = SQUARINGS) -> float:
    r"""Return an upper bound on (tr (A^T A)^{p/2})^{1/p} >= ||A||_2 with p = 2^{squarings + 1}.

    G = A^T A (or A A^T, the smaller) is squared again and again; E bounds the Frobenius norm of the error so far,

        E' = g_n ||G||_F^2 + 2 ||G||_F E + E^2 .

    >>> A = torch.diag(torch.tensor([2.0, 1.0]))
    >>> 2.0 <= schatten_upper(A) < 2.0 * (1 + 1e-8)
    True
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    A = A if A.shape[0] >= A.shape[1] else A.T
    g = growth(A.shape[0] + 2)
    size = frobenius_upper(A)
    G, error = A.T @ A, up(g * size * size)
    logarithm = math.log(scale)
    weight = 0.5
    for _ in range(squarings - 1):
        norm = frobenius_upper(G)
        if norm == 0.0:
            break
        G, error = G / norm, up(up(error / norm) + up(growth(2)))
        logarithm += weight * math.log(norm)
        size = up(1.0 + 1e-12)
        G, error = G @ G, up(growth(G.shape[0] + 2) * size + 2 * size * error + error * error)
        weight /= 2
    total = up(frobenius_upper(G) + error)
    return math.exp(up(logarithm + weight * math.log(total)) + 1e-13) if total > 0 else 0.0


def verified_upper(A: Tensor, guess: float | None = None, widenings: tuple[float, ...] = WIDENINGS) -> float | None:
    r"""Return an upper bound on ||A||_2 of a symmetric matrix that a Cholesky factorisation proves, or None if it fails.

    If Cholesky's method runs to its end on fl(c I - A) - d I, with d at least its backward error g_{n+1} / (1 - g_{n+1}) tr,
    then c I - A is positive definite (Rump, "Verification of positive definiteness", BIT 2006; Higham, Theorem 10.3). With the
    same for c I + A: ||A||_2 < c. The bound is some 1e-10 above the norm.

    >>> A = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    >>> c = verified_upper(A)
    >>> 2.0 <= c < 2.0 * (1 + 1e-9)
    True
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    n = A.shape[0]
    largest = float(torch.linalg.eigvalsh(A).abs().max()) if guess is None else guess / scale
    g = growth(n + 1)
    backward = g / (1 - g) * n * (2 * largest + 1.0)  # the trace of c I -+ A is at most n (c + ||A||)
    for widen in widenings:
        c = up(largest * (1 + widen) + 4 * backward)
        if is_below(c - 2 * backward, A) and is_below(c - 2 * backward, -A):
            return up(scale * c)
    return None


def is_below(c: float, A: Tensor) -> bool:
    """Return whether Cholesky's method succeeds on c I - A: then, up to rounding, A has no eigenvalue above c."""
    difference = -A
    difference.diagonal().add_(c)
    return int(torch.linalg.cholesky_ex(difference).info) == 0


def top_vector(A: Tensor) -> Tensor:
    """Return a unit vector v for which ||A v|| is ||A||_2 up to rounding: from the eigenvectors of the smaller Gram matrix."""
    A, _ = _scaled(A)
    tall = A.shape[0] >= A.shape[1]
    w = torch.linalg.eigh(A.T @ A if tall else A @ A.T).eigenvectors[:, -1]
    w = w if tall else A.T @ w
    return w / w.norm()


def rayleigh_lower(A: Tensor, v: Tensor | None = None) -> float:
    """Return a lower bound on ||A||_2: ||A v|| / ||v|| for a vector, less its rounding; by default the :func:`top_vector`.

    >>> A = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    >>> 2.0 * (1 - 1e-9) < rayleigh_lower(A) <= 2.0
    True
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    v = top_vector(A) if v is None else v
    g = growth(A.shape[1] + 4)
    error = g * float((A.abs() @ v.abs()).norm())
    numerator = float((A @ v).norm()) * (1 - 2 * growth(A.shape[0] + 4)) - up(error * (1 + 1e-10))
    denominator = float(v.norm()) * (1 + 2 * growth(A.shape[1] + 4))
    return down(scale * max(numerator, 0.0) / denominator)


def largest_eigenvalue(A: Tensor) -> float:
    """Return the largest eigenvalue in floating point of a positive semidefinite matrix.

    Of a large one it is Lanczos's, which might be too small, if Cholesky's method finds no eigenvalue above it.

    >>> round(largest_eigenvalue(torch.full((600, 600), 0.5, dtype=torch.float64)), 9)
    300.0
    """
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0
    if len(A) > LANCZOS_ROWS:
        norm, _ = norm_by_lanczos(A)
        if is_below(norm * (1 + 1e-10), A):
            return scale * norm
    return scale * max(float(torch.linalg.eigvalsh(A)[-1]), 0.0)


def spectral_norm(A: Tensor) -> float:
    """Return ||A||_2 in floating point, from the smaller Gram matrix.

    >>> spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    4.0
    """
    A, scale = _scaled(A)
    return scale * math.sqrt(largest_eigenvalue(A @ A.T if A.shape[0] <= A.shape[1] else A.T @ A))


def _norm(A: Tensor, *, symmetric: bool) -> tuple[float, float, float | None]:
    """Return ||A||_2 in floating point, a lower bound and, for a symmetric A, the upper bound that Cholesky's method proves."""
    A, scale = _scaled(A)
    if not bool(A.any()):
        return 0.0, 0.0, 0.0
    verified = None
    if symmetric and len(A) > LANCZOS_ROWS:
        norm, v = norm_by_lanczos(A)  # much faster than all eigenvectors; Cholesky's method finds out where it is too small
        verified = verified_upper(A, norm, WIDENINGS[:1])
    if verified is None:  # or Lanczos's method missed the largest eigenvalue
        v = top_vector(A)
        norm = float((A @ v).norm())
        verified = verified_upper(A, norm) if symmetric else None
    return scale * norm, down(scale * rayleigh_lower(A, v)), None if verified is None else up(scale * verified)


@dataclass(frozen=True)
class Certificate:
    """Certified norms of a symmetric matrix and of its blocks.

    ``bounds`` are upper bounds on ||H||_2 by the way in which they were found: "cholesky" (None: it failed), "norm matrix" (the
    norm of the matrix of block norms), "schatten" (None: Cholesky's is as good and costs less), "gershgorin", "frobenius".
    """

    whole: CertifiedInterval
    pairs: Mapping[tuple[str, str], CertifiedInterval]
    bounds: Mapping[str, float | None]
    norm: float  # ||H||_2 in floating point
    norms: Mapping[tuple[str, str], float]  # and that of each block


def certify(H: Tensor, slices: Mapping[str, slice]) -> Certificate:
    """Return certified norms of a symmetric matrix and of its blocks.

    Args:
        H: P x P, float64; the bounds are on its symmetric part.
        slices: Name -> the rows (and columns) of a block.

    Raises:
        InputError: If the matrix is not square, not finite or not float64.
    """
    if H.ndim != 2 or H.shape[0] != H.shape[1] or H.dtype != torch.float64:
        raise InputError(f"certify: expected a square float64 matrix, got {H.dtype} {tuple(H.shape)}")
    if not bool(torch.isfinite(H).all()):
        raise InputError("certify: the matrix holds NaN or infinite entries")
    pairs: dict[tuple[str, str], CertifiedInterval] = {}
    norms: dict[tuple[str, str], float] = {}
    for i, j in combinations_with_replacement(slices, 2):
        block = H[slices[i], slices[j]]
        norm, lower, verified = _norm(block, symmetric=i == j)
        uppers = [frobenius_upper(block), gershgorin_upper(block), schatten_upper(block), verified]
        pairs[i, j] = pairs[j, i] = CertifiedInterval(lower, min(upper for upper in uppers if upper is not None))
        norms[i, j] = norms[j, i] = norm
    table = torch.tensor([[pairs[i, j].upper for j in slices] for i in slices], dtype=torch.float64, device="cpu")
    norm, lower, verified = _norm(H, symmetric=True)
    bounds: dict[str, float | None] = {
        "cholesky": verified,
        "norm matrix": verified_upper(table) or gershgorin_upper(table),
        "schatten": schatten_upper(H) if verified is None else None,
        "gershgorin": gershgorin_upper(H),
        "frobenius": frobenius_upper(H),
    }
    upper = min(value for value in bounds.values() if value is not None)
    return Certificate(CertifiedInterval(lower, upper), pairs, bounds, norm, norms)


def _scaled(A: Tensor) -> tuple[Tensor, float]:
    """Return the matrix divided by a power of two near its largest entry, which is exact, and that power."""
    A = A.detach().double()
    largest = max(abs(float(entry)) for entry in A.aminmax()) if A.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return A, 1.0
    exponent = math.frexp(largest)[1]
    scale = math.ldexp(1.0, max(min(exponent, 1000), -1000))
    return (A if scale == 1.0 else A / scale), scale
