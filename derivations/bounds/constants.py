r"""Sharp constants of the primitives: how large the derivatives of a normalization, an activation and softmax can be.

For one row x of width d, with xhat = C x / s, s = sqrt(||C x||^2 / d + eps), rho^2 = ||xhat||^2 / d = 1 - eps / s^2 and
u = xhat / ||xhat|| (C = I - 1 1^T / d for LayerNorm, C = I for RMSNorm, gamma = 1, beta = 0):

    J      = (1/s) (C - rho^2 u u^T)
    D_b J  = -(rho / (sqrt(d) s^2)) [ (u.b) C + (C b) u^T + u (C b)^T - 3 rho^2 (u.b) u u^T ]

All norms below are read off these two lines: C is the identity on the k-dimensional space of centred rows
(k = d - 1 for LayerNorm, d for RMSNorm), which splits into u and the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from derivations.arrays import Array, as_array, to_float


def norm_jacobian_norm(X: Array, eps: float = 0.0, *, norm: str = "layernorm") -> float:
    """Return the spectral norm of dN/dX for N = LayerNorm(X) or RMSNorm(X), exactly (ours/norm-norms).

    ||dN/dX||_2 = 1 / min_i s_i if k >= 2 (LayerNorm d >= 3, RMSNorm d >= 2), else max_i (1 - rho_i^2) / s_i.
    It replaces Eq. 28 (Lemma 4) of Closing the Curvature Gap, which is violated with its stated sigma_min
    (curvature-gap/lemma4-28). With a gain the norm is at most this times max_j |gamma_j|.

    Args:
        X: array of shape (L, d).
        eps: added to the variance (LayerNorm) or to the mean square (RMSNorm).
        norm: ``"layernorm"`` or ``"rmsnorm"``.

    Raises:
        ValueError: if a row has s = 0, where the normalization is not differentiable.

    >>> norm_jacobian_norm(torch.tensor([[3.0, -3.0, 0.0, 0.0], [2.0, 2.0, -2.0, -2.0]]))  # s = (sqrt(4.5), 2)
    0.5
    """
    s, rho, _, k = _rows("norm_jacobian_norm", X, eps, norm)
    return float((1 / s).max()) if k >= 2 else float((k * (1 - rho**2) / s).max())


def norm_hessian_norm(X: Array, eps: float = 0.0, *, norm: str = "layernorm") -> float:
    """Return the spectral norm of d2N/dX2 as the L d * L d x L d matrix of the paper, exactly (ours/norm-norms).

    ||d2N/dX2||_2 = max_i rho_i / (sqrt(d) s_i^2) sqrt(max(k - 1 + 9 (1 - rho_i^2)^2, 2)), without the 2 if k = 1; it is
    max_b ||D_b J||_F over unit b. With eps = 0 it is at most 1 / min_i s_i^2. It replaces Eq. 29 (Lemma 4;
    curvature-gap/lemma4-29m).

    Args: as ``norm_jacobian_norm``.

    >>> round(norm_hessian_norm(torch.tensor([[2.0, 2.0, -2.0, -2.0]])), 6)  # sqrt(1/2) / s^2 with s = 2
    0.176777
    """
    s, rho, d, k = _rows("norm_hessian_norm", X, eps, norm)
    along = k - 1 + 9 * (1 - rho**2) ** 2
    square = along.clamp(min=2.0) if k >= 2 else along * k
    return float((rho / (math.sqrt(d) * s**2) * square.sqrt()).max())


def norm_hessian_map_norm(X: Array, eps: float = 0.0, *, norm: str = "layernorm") -> float:
    """Return the largest ||D^2N(X)[a, b]|| over a, b of unit norm, exactly; a loss Hessian is bounded by it.

    It is max_i of 2 / (sqrt(3 d) s_i^2) where rho_i^2 >= 1/3 and k >= 2, else of 3 (1 - rho_i^2) rho_i / (sqrt(d) s_i^2):
    <w, D^2N[a, b]> is symmetric in its three arguments, so that the largest value is at w = a = b = t u + sqrt(1 - t^2) e,
    where it is proportional to 3 t - 3 rho^2 t^3.

    Args: as ``norm_jacobian_norm``.

    >>> round(norm_hessian_map_norm(torch.tensor([[1.0, -1.0, 0.0]])), 6)  # 2/3 / s^2 with s^2 = 2/3
    1.0
    """
    s, rho, d, k = _rows("norm_hessian_map_norm", X, eps, norm)
    inside = 2 / math.sqrt(3 * d) / s**2
    at_u = 3 * (1 - rho**2) * rho / (math.sqrt(d) * s**2)
    return float((torch.where(rho**2 >= 1 / 3, inside, at_u) if k >= 2 else at_u * k).max())


class NormConstants(NamedTuple):
    """Suprema over all inputs of the two derivatives of a normalization with eps > 0."""

    jacobian: float
    hessian_map: float


def norm_constants(d: int, eps: float) -> NormConstants:
    """Return bounds on ||dN/dX||_2 and on the map norm of d2N/dX2 that hold for every input, given eps > 0.

    1 / sqrt(eps), attained at constant rows (LayerNorm d >= 2, RMSNorm d >= 1), and 48 / (25 sqrt(5 d) eps), attained at
    rows of variance eps / 4.

    Raises:
        ValueError: if eps is not positive: then there is no bound, as the rows may be arbitrarily close to constant.

    >>> norm_constants(4, 0.25).jacobian
    2.0
    """
    if eps <= 0:
        raise ValueError(f"norm_constants: with eps = {eps} the derivatives are unbounded. Pass eps > 0.")
    return NormConstants(1 / math.sqrt(eps), 48 / (25 * math.sqrt(5 * d) * eps))


@dataclass(frozen=True)
class Steepness:
    """Suprema of an activation sigma with sigma(0) = 0: ``slope`` |sigma'|, ``chord`` |sigma(z) / z|, ``second`` |sigma''|."""

    slope: float
    chord: float
    second: float = 0.0


STEEPNESS = {
    "identity": Steepness(1.0, 1.0),
    "relu": Steepness(1.0, 1.0),
    "leaky_relu": Steepness(1.0, 1.0),
    "tanh": Steepness(1.0, 1.0, 4 / math.sqrt(27)),
    "gelu": Steepness((1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi), 1.0, math.sqrt(2 / math.pi)),  # at z = sqrt(2)
    "gelu_tanh": Steepness(1.128993068658772, 1.0, math.sqrt(2 / math.pi)),  # at z = 1.41850
    "silu": Steepness(1.099839320128867, 1.0, 0.5),  # where z tanh(z / 2) = 2
}
"""Of the kinds of ``derivations.activation``; a negative slope of leaky_relu is taken to be between -1 and 1, and the second
derivative of relu and leaky_relu is that off the kinks: a bound on the Hessian almost everywhere."""


def softmax_jacobian_bound(A: Array | None = None) -> float:
    """Return a bound on ||diag(p) - p p^T||_2: max_i 2 p_i (1 - p_i) over the rows p of A, or 1/2 for any rows.

    By Gershgorin; 1/2 is attained at p = (1/2, 1/2, 0, ...). It replaces the 1/L of Closing the Curvature Gap, which holds at
    uniform attention only (claim b:dA/dT<=1/L).

    Args:
        A: array of shape (L, L') whose rows are probabilities.

    >>> softmax_jacobian_bound(), softmax_jacobian_bound(torch.full((1, 4), 0.25))
    (0.5, 0.375)
    """
    if A is None:
        return 0.5
    p = _probabilities("softmax_jacobian_bound", A)
    return min(0.5, float((2 * p * (1 - p)).max()))


def softmax_hessian_map_bound() -> float:
    """Return sqrt(6) / 9, the largest ||D^2 softmax(t)[a, b]|| over all t and unit a, b, in any dimension L >= 2.

    <w, D^2 softmax[a, b]> is the third cumulant of (a, b, w) under p, hence symmetric; of all laws on an interval of length
    r the third central moment is largest for two points, r^3 / (6 sqrt(3)), and ||a|| = 1 allows r = sqrt(2). It is attained
    at p = ((1 + 1/sqrt(3))/2, (1 - 1/sqrt(3))/2, 0, ...), a = b = (1, -1, 0, ...) / sqrt(2).

    >>> round(softmax_hessian_map_bound(), 6)
    0.272166
    """
    return math.sqrt(6) / 9


def softmax_hessian_stacked_bound() -> float:
    """Return 1 / sqrt(2), a bound on the spectral norm of d2A/dT2 written as the L^4 x L^2 matrix of the paper.

    That norm is max_v ||D_v J||_F over a row and unit v. With q = J v and s = ||p||^2 its square is
    ||q||^2 (1 + 2s) - 4 sum_i p_i q_i^2 + 2 (p.q)^2 <= min(1/4, (1 - s)^2) (1 + 2s) <= 1/2. The paper's bound is 6; the true
    supremum seems to be that of the map, sqrt(6)/9, which is proved as a lower bound only.

    >>> round(softmax_hessian_stacked_bound(), 6)
    0.707107
    """
    return math.sqrt(0.5)


def row_stochastic_norm_bound(A: Array | int) -> float:
    """Return a bound on ||A||_2 for a matrix whose rows are probabilities: the root of its largest column sum.

    ||A||_2^2 <= ||A||_1 ||A||_inf = max_j sum_i A_ij <= L. Given only the number L of rows it is sqrt(L), attained when all
    rows put everything on one column. Closing the Curvature Gap uses L.

    Args:
        A: array of shape (L, L'), or L.

    >>> row_stochastic_norm_bound(9), row_stochastic_norm_bound(torch.full((9, 9), 1 / 9))
    (3.0, 1.0)
    """
    if isinstance(A, int):
        return math.sqrt(A)
    return math.sqrt(float(_probabilities("row_stochastic_norm_bound", A).sum(0).max()))


def token_range_bound(x: float, rho: float | None = None, diameter: float | None = None) -> float:
    """Return a bound on max_jk |<x_j - x_k, u>| over unit u: min(sqrt(2) ||X||_2, 2 max_i ||x_i||, diameter of the tokens).

    <x_j - x_k, u> = (e_j - e_k)^T X u, and e_j - e_k has norm sqrt(2) (the diameter is exact).

    Args:
        x: ||X||_2.
        rho: the largest norm of a token, if known.
        diameter: the largest distance of two tokens, if known.

    >>> token_range_bound(10.0, 3.0), token_range_bound(10.0, 3.0, 1.0)
    (6.0, 1.0)
    """
    known = [math.sqrt(2) * x, *(() if rho is None else (2 * rho,)), *(() if diameter is None else (diameter,))]
    return min(known)


def token_covariance_bound(x: float, rho: float | None = None, diameter: float | None = None) -> float:
    """Return a bound on ||X^T (diag(p) - p p^T) X||_2 for any probabilities p: a quarter of the squared range.

    A variance is at most a quarter of the squared range (Popoviciu), so that it is min(x^2 / 2, rho^2, diameter^2 / 4). It is
    attained by two opposite tokens of equal weight.

    Args: as ``token_range_bound``.

    >>> token_covariance_bound(math.sqrt(2), 1.0)  # X = (1, -1)^T, p = (1/2, 1/2)
    1.0
    """
    return token_range_bound(x, rho, diameter) ** 2 / 4


def token_cumulant_bound(x: float, rho: float | None = None, diameter: float | None = None) -> float:
    """Return a bound on the third cumulant of the tokens in unit directions: range^3 / (6 sqrt(3)).

    That is min(sqrt(6)/9 x^3, 4/(3 sqrt(3)) rho^3, diameter^3 / (6 sqrt(3))): of all laws on an interval two points have the
    largest third central moment (``softmax_hessian_map_bound``).

    Args: as ``token_range_bound``.

    >>> round(token_cumulant_bound(1.0), 6) == round(softmax_hessian_map_bound(), 6)
    True
    """
    return token_range_bound(x, rho, diameter) ** 3 / (6 * math.sqrt(3))


def row_scales(who: str, X: Tensor, eps: float, norm: str) -> tuple[Tensor, Tensor]:
    """Return the rows that a norm divides, centred for LayerNorm, and their scales s = sqrt(mean square + eps), a column.

    Raises:
        ValueError: if the norm is unknown, or the scale of a row is 0, where it is not differentiable.

    >>> row_scales("f", torch.tensor([[3.0, 1.0]]), 0.0, "layernorm")
    (tensor([[ 1., -1.]]), tensor([[1.]]))
    """
    rows = X - X.mean(-1, keepdim=True) if is_centred(who, norm) else X
    s = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    if not bool((s > 0).all()):
        row, size = int((~(s > 0)).nonzero()[0, 0]), "variance" if norm == "layernorm" else "mean square"
        raise ValueError(
            f"{who}: row {row} has {size} 0 and eps = {eps}, so that {norm} is not differentiable there. "
            "Pass eps > 0 or other rows."
        )
    return rows, s


def is_centred(who: str, norm: str) -> bool:
    """Tell whether a norm, "layernorm" or "rmsnorm", takes the mean of a row away."""
    if norm not in ("layernorm", "rmsnorm"):
        raise ValueError(f"{who}: unknown norm {norm!r}, expected 'layernorm' or 'rmsnorm'")
    return norm == "layernorm"


def _rows(name: str, X: Array, eps: float, norm: str) -> tuple[Tensor, Tensor, int, int]:
    """Return s_i and rho_i of every row, the width d and the dimension k of the space of centred rows."""
    x = to_float(as_array(X))
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name}: expected rows of shape (L, d), got {tuple(x.shape)}")
    rows, s = row_scales(name, x, eps, norm)
    rho, d = rows.square().mean(1, keepdim=True).sqrt() / s, x.shape[1]
    return s[:, 0], rho[:, 0], d, d - (norm == "layernorm")


def _probabilities(name: str, A: Array) -> Tensor:
    p = to_float(as_array(A))
    tolerance = 16 * p.shape[-1] * torch.finfo(p.dtype).eps
    if p.ndim != 2 or bool((p < 0).any()) or bool(((p.sum(1) - 1).abs() > tolerance).any()):
        raise ValueError(f"{name}: expected a matrix whose rows are nonnegative and sum to 1, got shape {tuple(p.shape)}")
    return p
