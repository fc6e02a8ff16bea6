r"""Theorem 6 of "Closing the Curvature Gap" as printed, with Lemma 4, Proposition 10 and Eqs. 8-24: the block's bound M_tr.

``post_block_a_priori`` and ``post_block_structured`` are the bounds to use. M_tr with sigma_min as the lemma states it is
violated from d_V = 5 on; with the smallest row deviation of the proof it holds, because broken
pieces (curvature-gap/eq17-g_q, curvature-gap/c6-phi_vq, curvature-gap/eq21) hide behind others that are loose by many orders of
magnitude. Letters are the paper's, lower case for spectral norms: x = ||X||_2, w_Q, w_K, w_V, w_1, w_2, t = ||Target||_2.

``sigma_min`` and ``sigma_min'`` of Lemma 4 have two readings: "as stated" min_i ||M_i||_2, "as in the proof" min_i ||M_i||_2 /
sqrt(d_V). The functions take the number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from derivations.arrays import Array, as_array, to_float

NAMES = ("1", "2", "K", "Q", "V")
"""The blocks of Theorem 6: W_1, W_2, W_K, W_Q, W_V."""


def sigma_min_printed(X: Array, *, reading: str = "stated") -> float:
    """Return sigma_min of Lemma 4: min_i ||M_i||_2 as "stated", or min_i ||M_i||_2 / sqrt(n) as in its "proof".

    Raises:
        ValueError: if there is no such reading.

    >>> [sigma_min_printed(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), reading=reading) for reading in ("stated", "proof")]
    [6.0, 3.0]
    """
    if reading not in ("stated", "proof"):
        raise ValueError(f"sigma_min_printed: unknown reading {reading!r}, expected 'stated' or 'proof'")
    x = to_float(as_array(X))
    norm = float((x - x.mean(1, keepdim=True)).norm(dim=1).min())
    return norm if reading == "stated" else norm / math.sqrt(x.shape[1])


def lemma_4_jacobian_printed(x: float, sigma: float, n: int) -> float:
    r"""Return 1/sigma + x^2 / (sqrt(n) sigma^3), Eq. 28 as printed.

    VIOLATED for n >= 3 with sigma as stated (curvature-gap/lemma4-28), VALID and loose with that of the proof. The norm is
    1/min_i sigma_i exactly: ``norm_jacobian_norm``.

    >>> lemma_4_jacobian_printed(2.0, 1.0, 4)
    3.0
    """
    return 1 / sigma + x**2 / (math.sqrt(n) * sigma**3)


def lemma_4_hessian_printed(x: float, sigma: float, m: int, n: int) -> float:
    r"""Return x (1 + sqrt(m/n)) / sigma^3 + x^2 / (sqrt(n) sigma^3) + 3 x^3 / (n sigma^5), Eq. 29 as printed.

    VIOLATED for n >= 4 with sigma as stated (curvature-gap/lemma4-29m), VALID with that of the proof. The middle term has the
    wrong degree in X, and is superfluous. The norm is ``norm_hessian_norm``.

    >>> lemma_4_hessian_printed(1.0, 1.0, 4, 4)
    3.25
    """
    return x / sigma**3 * (1 + math.sqrt(m / n)) + x**2 / (math.sqrt(n) * sigma**3) + 3 * x**3 / (n * sigma**5)


class Proposition10(NamedTuple):
    """Bounds on ||Y||_2, ||FFN(Y)||_2 and ||S||_2."""

    Y: float
    FFN: float
    S: float


def proposition_10_printed(length: int, d_V: int, d_ff: int, w_1: float, w_2: float) -> Proposition10:
    r"""Return Eqs. 25-27: sqrt(L d_V), m ||Y|| w_1 w_2 and sqrt(L d_V) (1 + m w_1 w_2), m = sqrt(min(L, d_ff)).

    VALID; m is not needed, as ||S||_F <= sqrt(L d_V) (1 + w_1 w_2).

    >>> proposition_10_printed(4, 9, 5, 1.0, 0.5)
    Proposition10(Y=6.0, FFN=6.0, S=12.0)
    """
    Y, m = math.sqrt(length * d_V), math.sqrt(min(length, d_ff))
    return Proposition10(Y, m * Y * w_1 * w_2, Y * (1 + m * w_1 * w_2))


class PrintedFactors(NamedTuple):
    """The norms that Theorem 6 puts together: of J_Z, H_Z, J_Y, H_Y, Y, sigma(Y W_1) and G_Q, G_K, G_V."""

    J_Z: float
    H_Z: float
    J_Y: float
    H_Y: float
    Y: float
    hidden: float
    G_Q: float
    G_K: float
    G_V: float


class PrintedBlockBound(NamedTuple):
    """The terms of Theorem 6, 5 x 5 in the order of ``NAMES``, and the bound on the whole."""

    xi: Tensor
    B: Tensor
    H_tr: Tensor
    whole: float


def attention_jacobians_printed(
    length: int, d_K: int, x: float, w_Q: float, w_K: float, w_V: float
) -> tuple[float, float, float]:
    r"""Return Eq. 17: ||G_Q|| <= w_V w_K x^3 / (L sqrt(d_K)), G_K with w_Q, ||G_V|| <= L x, in the order Q, K, V.

    G_Q and G_K hold for uniform attention or L <= 2 only, else off by up to L/2 (curvature-gap/eq17-g_q); G_V is loose by
    sqrt(L).

    >>> attention_jacobians_printed(2, 4, 2.0, 1.0, 3.0, 1.0)
    (6.0, 2.0, 4.0)
    """
    logits = w_V * x**3 / (length * math.sqrt(d_K))
    return logits * w_K, logits * w_Q, length * x


def phi_printed(length: int, d_V: int, d_K: int, x: float, w_Q: float, w_K: float, w_V: float) -> dict[str, float]:
    r"""Return the bounds on ||Phi_kl|| of Appendix C.6, with (K, K) and (V, K) read off by symmetry.

        QQ  12 w_V w_K^2 x^5 / (L d_V d_K)                                     VIOLATED for L d_V >~ 45
        VQ  2 w_K x^3 / (L^2 sqrt(d_V d_K))                                    VIOLATED, uniform attention too
        (curvature-gap/c6-phi_vq) QK  12 w_V w_K w_Q x^5 / (L d_V d_K) + 2 w_V x^3 / (L^2 sqrt(d_V d_K)) VIOLATED, uniform
        attention too VV  0

    Lemma 2 keeps the factor 2/(L d_V) of the loss in a derivative of F. Eq. 9 needs (K, K), which the print never gives.

    >>> phi_printed(1, 1, 1, 1.0, 0.0, 2.0, 1.0)["VQ"]
    4.0
    """
    quintic = 12 * w_V * x**5 / (length * d_V * d_K)
    cubic = 2 * x**3 / (length**2 * math.sqrt(d_V * d_K))
    return {
        "QQ": quintic * w_K**2,
        "KK": quintic * w_Q**2,
        "VV": 0.0,
        "VQ": cubic * w_K,
        "VK": cubic * w_Q,
        "QK": quintic * w_K * w_Q + cubic * w_V,
    }


def theorem_6_factors_printed(
    length: int, d_V: int, d_K: int, d_ff: int, x: float, w_Q: float, w_K: float, w_V: float, w_1: float, w_2: float,
    *, sigma: float, sigma_prime: float, input_norm: float | None = None,
) -> PrintedFactors:  # fmt: skip
    r"""Return the closed-form factors: Eq. 17, Proposition 10 for Y and S, Lemma 4 at X + F and at S.

    Args:
        length, d_V, d_K, d_ff: L and the widths of tokens, queries and hidden units.
        x, w_Q, w_K, w_V, w_1, w_2: spectral norms of X and of the weights.
        sigma: sigma_min at X + F, in either reading.
        sigma_prime: sigma_min at S.
        input_norm: ||X + F||_2; None for x + L x w_V, as C.1 bounds F.

    >>> theorem_6_factors_printed(1, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, sigma=1.0, sigma_prime=1.0, input_norm=2.0).J_Y
    5.0
    """
    Y, _, S = proposition_10_printed(length, d_V, d_ff, w_1, w_2)
    G_Q, G_K, G_V = attention_jacobians_printed(length, d_K, x, w_Q, w_K, w_V)
    before = x * (1 + length * w_V) if input_norm is None else input_norm
    return PrintedFactors(
        J_Z=lemma_4_jacobian_printed(S, sigma_prime, d_V),
        H_Z=lemma_4_hessian_printed(S, sigma_prime, length, d_V),
        J_Y=lemma_4_jacobian_printed(before, sigma, d_V),
        H_Y=lemma_4_hessian_printed(before, sigma, length, d_V),
        Y=Y,
        hidden=math.sqrt(min(length, d_ff)) * Y * w_1,
        G_Q=G_Q,
        G_K=G_K,
        G_V=G_V,
    )


def theorem_6_printed(
    length: int, d_V: int, d_ff: int, factors: PrintedFactors, phi: dict[str, float], w_1: float, w_2: float, residual: float
) -> PrintedBlockBound:
    r"""Return Theorem 6 and Eq. 9 as printed, from factors that are exact or those of ``theorem_6_factors_printed``.

        ||H_tr^(i,j)|| <= J_Z xi_ij + B_i H_Z B_j                                                (8), VALID with exact factors
        M_tr = 5 max_ij (2/(L d_V) J_Z^2 B_i B_j + ||R|| ||H_tr^(i,j)||)                         (9), ||dZ/dW_i|| <= J_Z B_i
        B_1 = w_2 Y, B_2 = ||sigma(Y W_1)||, B_k = (w_1 w_2 + 1) J_Y G_k                         (13)-(16), VALID
        xi_11 = xi_22 = 0, xi_12 = sqrt(d_V) Y                                                   (18)-(20), VALID a.e.
        xi_21 = sqrt(d_ff) w_2                                                                   (21), VIOLATED
        (curvature-gap/eq21)
        xi_1k = sqrt(d_ff) w_2 J_Y G_k, xi_2k = sqrt(d_V) w_1 J_Y G_k                            (22), (23), VALID
        xi_kl = (w_1 w_2 + 1) (G_k H_Y G_l + J_Y Phi_kl)                                         (24), VIOLATED with printed Phi

    Eq. 9 is VALID for the loss 1/(L d_V) ||.||^2 and looser by L d_V / 2 than need be, and VIOLATED for the loss that Eq. 7
    writes down, ||.||^2. (i, j) and (j, i) are made of the same numbers but for (21).

    Args:
        length, d_V, d_ff: L and the widths of tokens and hidden units.
        factors: the norms of the factors.
        phi: as ``phi_printed``.
        w_1, w_2: spectral norms of the weights.
        residual: ||Z - Target||_F.

    Nothing is left of a residual's part where the residual is zero:

    >>> ones = PrintedFactors(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    >>> phi = dict.fromkeys(("QQ", "KK", "VV", "VQ", "VK", "QK"), 0.0)
    >>> theorem_6_printed(1, 2, 4, ones, phi, 1.0, 1.0, 0.0).whole  # 5 * (2/2) * B_k B_l with B_k = 2
    20.0
    """
    G = {"K": factors.G_K, "Q": factors.G_Q, "V": factors.G_V}
    through = w_1 * w_2 + 1
    B = torch.tensor([w_2 * factors.Y, factors.hidden, *(through * factors.J_Y * G[k] for k in "KQV")], dtype=torch.float64)
    xi = torch.zeros(5, 5, dtype=torch.float64)
    xi[0, 1], xi[1, 0] = math.sqrt(d_V) * factors.Y, math.sqrt(d_ff) * w_2
    for i, k in enumerate("KQV", start=2):
        xi[0, i] = xi[i, 0] = math.sqrt(d_ff) * w_2 * factors.J_Y * G[k]
        xi[1, i] = xi[i, 1] = math.sqrt(d_V) * w_1 * factors.J_Y * G[k]
        for j, ell in enumerate("KQV", start=2):
            curved = phi[k + ell] if k + ell in phi else phi[ell + k]
            xi[i, j] = through * (G[k] * factors.H_Y * G[ell] + factors.J_Y * curved)
    H_tr = factors.J_Z * xi + factors.H_Z * torch.outer(B, B)
    terms = 2 / (length * d_V) * factors.J_Z**2 * torch.outer(B, B) + residual * H_tr
    return PrintedBlockBound(xi, B, H_tr, 5 * float(terms.max()))
