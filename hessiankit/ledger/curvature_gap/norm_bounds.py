"""Bounds on LayerNorm and on what it returns: Lemma 4 and Proposition 10."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from derivations.bounds import (
    lemma_4_hessian_printed,
    lemma_4_jacobian_printed,
    norm_hessian_norm,
    norm_jacobian_norm,
    proposition_10_printed,
)
from derivations.bounds.block_printed import (
    sigma_min_printed,
)
from derivations.layernorm_theorems import LayerNormTheorems
from derivations.normalization import LayerNormAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.block_problems import (
    never_above,
    norms,
    problems,
)
from hessiankit.ledger.curvature_gap.notation import dense, spectral
from hessiankit.ledger.curvature_gap.point import BlockPoint
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, bounded, exceeded, loose
from hessiankit.ledger.registry import claim


def two_entries(n: int, scale: float = 1.0) -> Tensor:
    """Return the row (1, -1, 0, ...)."""
    row = torch.zeros(1, n, dtype=torch.float64)
    row[0, 0], row[0, 1] = scale, -scale
    return row


def lemma_ratios(X: Tensor, reading: str) -> tuple[float, float]:
    """Return left over right side of Eqs. 28 and 29."""
    at, sigma, x = LayerNormAt(X), sigma_min_printed(X, reading=reading), spectral(X)
    jacobian, hessian = spectral(dense(at.jacobian("X"))), spectral(dense(at.hessian("X", "X")))
    return jacobian / lemma_4_jacobian_printed(x, sigma, X.shape[1]), hessian / lemma_4_hessian_printed(x, sigma, *X.shape)


def rows(seed: int) -> list[Tensor]:
    """Return inputs of a norm: different sizes and scales, the last a single balanced row, where the bounds are closest."""
    draw = Draw(seed)
    found = [10 ** float(draw.uniform(1, low=-2, high=2)) * draw.normal(L, n) for L in (1, 2, 3) for n in (3, 4, 6)]
    return [*found, torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)]


@claim("curvature-gap/lemma4-28", "Lemma 4, Eq. 28", "WRONG AS PRINTED", uses=[lemma_4_jacobian_printed, norm_jacobian_norm])
def lemma4_28(seed: int) -> Evidence:
    r"""$\|J_{LN}\|_2\le\frac{1}{\sigma_{\min}} + \frac{\|X\|_2^2}{\sqrt n\,\sigma_{\min}^3}$ with $\sigma_{\min} =
    \min_i\|M_i\|_2$

    Correct: $\|J_{LN}\|_2 = 1/\min_i\sigma_i$ for $n\ge3$
    """
    exact = [spectral(dense(LayerNormAt(X).jacobian("X"))) / norm_jacobian_norm(X) for X in rows(seed)]
    return exceeded(lemma_ratios(two_entries(8), "stated")[0], "X = (1, -1, 0, ..., 0), n = 8", corrected=exact, above=2)


@claim("curvature-gap/lemma4-29m", "Lemma 4, Eq. 29", "WRONG AS PRINTED", uses=[lemma_4_hessian_printed, norm_hessian_norm])
def lemma4_29m(seed: int) -> Evidence:
    r"""$\|H_{LN}\|_2\le\frac{\|X\|}{\sigma_{\min}^3}(1 + \sqrt{m/n}) + \frac{\|X\|^2}{\sqrt n\sigma_{\min}^3} +
    \frac{3\|X\|^3}{n\sigma_{\min}^5}$, $\sigma_{\min} = \min_i\|M_i\|_2$

    Correct: $\|H_{LN}\|_2 = \sqrt{\max(n-2,2)/n}\,/\min_i\sigma_i^2$ for $n\ge3$
    """
    exact = [spectral(dense(LayerNormAt(X).hessian("X", "X"))) / norm_hessian_norm(X) for X in rows(seed)]
    found = lemma_ratios(two_entries(8, 1e-3), "stated")[1]
    return exceeded(found, "X = (1, -1, 0, ..., 0) / 1000, n = 8", corrected=exact, above=3.9)


@claim("curvature-gap/lemma4-28-proof", "Lemma 4, Eq. 28, as its proof reads it", "LOOSE", uses=[lemma_4_jacobian_printed])
def lemma4_28_proof(seed: int) -> Evidence:
    r"""Eq. 28 with $\sigma_{\min} = \min_i\sigma_i = \min_i\|M_i\|_2/\sqrt n$

    Correct: the right side is at least $(1 + \sqrt n)/\min_i\sigma_i$
    """
    return loose([lemma_ratios(X, "proof")[0] for X in rows(seed)], "ten inputs", factor=1 + math.sqrt(3))


@claim("curvature-gap/lemma4-29", "Lemma 4, Eq. 29, as its proof reads it", "LOOSE", uses=[lemma_4_hessian_printed])
def lemma4_29(seed: int) -> Evidence:
    r"""Eq. 29 with $\sigma_{\min} = \min_i\sigma_i$

    Correct: the right side is at least $4\sqrt n/\min_i\sigma_i^2$; its middle term has the wrong degree in $X$, and is not
    needed
    """
    return loose([lemma_ratios(X, "proof")[1] for X in rows(seed)], "ten inputs", factor=4 * math.sqrt(3))


def inverse_scale_ratios(X: Tensor) -> tuple[float, float]:
    """Return left over right side of the proof's bounds on dP/dX and d2P/dX2, sigma_min as the proof reads it."""
    objects, n, x, sigma = LayerNormTheorems(X), X.shape[1], spectral(X), sigma_min_printed(X, reading="proof")
    first = x / (math.sqrt(n) * sigma**3)
    return spectral(dense(objects.dP)) / first, spectral(dense(objects.d2P)) / (first + 3 * x**2 / (n * sigma**5))


@claim("curvature-gap/lemma4-dp", "Lemma 4, proof 1", "HOLDS", uses=[LayerNormTheorems])
def lemma4_dp(seed: int) -> Evidence:
    r"""$\|\partial P/\partial X\|_2\le\|X\|_2/(\sqrt n\,\sigma_{\min}^3)$, $\sigma_{\min} = \min_i\sigma_i$

    Correct: $= 1/(\sqrt n\min_i\sigma_i^2)$
    """
    found = [inverse_scale_ratios(X)[0] for X in rows(seed)]
    exact = [spectral(dense(LayerNormTheorems(X).dP)) * math.sqrt(X.shape[1]) * least_scale(X) ** 2 for X in rows(seed)]
    return bounded([*found, *exact], "ten inputs, the print and the corrected equality", attained=1 - 1e-9)


def least_scale(X: Tensor) -> float:
    """Return min_i sigma_i."""
    return sigma_min_printed(X, reading="proof")


@claim("curvature-gap/lemma4-d2p", "Lemma 4, proof (ii)", "HOLDS", uses=[LayerNormTheorems])
def lemma4_d2p(seed: int) -> Evidence:
    r"""$\|\partial^2P/\partial X^2\|_2\le\frac{\|X\|_2}{\sqrt n\,\sigma_{\min}^3} + \frac{3\|X\|_2^2}{n\,\sigma_{\min}^5}$

    Correct: with $\sigma_{\min} = \min_i\sigma_i$; the first term, not needed, has degree $-2$ in $X$ and not $-3$
    """
    return bounded([inverse_scale_ratios(X)[1] for X in rows(seed)], "ten inputs")


@claim("curvature-gap/lemma4-29-degree", "Lemma 4, Eq. 29, middle term", "WRONG AS PRINTED", uses=[lemma_4_hessian_printed])
def lemma4_29_degree(seed: int) -> Evidence:
    r"""$\|X\|_2^2/(\sqrt n\,\sigma_{\min}^3)$ scales as a second derivative of LayerNorm does

    Correct: $H_{LN}(cX) = c^{-2}H_{LN}(X)$, as the other terms; this one goes with $c^{-1}$
    """
    X, c = Draw(seed).normal(3, 4), 100.0

    def terms(X: Tensor) -> tuple[float, float]:
        x, sigma = spectral(X), sigma_min_printed(X, reading="proof")
        middle = x**2 / (math.sqrt(X.shape[1]) * sigma**3)
        return middle, lemma_4_hessian_printed(x, sigma, *X.shape) - middle

    (middle, rest), (scaled_middle, scaled_rest) = terms(X), terms(c * X)
    hessian = norm_hessian_norm(c * X) / norm_hessian_norm(X)
    return exceeded(scaled_middle / middle * c**2, "100 X in place of X", corrected=[hessian * c**2, scaled_rest / rest * c**2])


@claim("curvature-gap/eq25", "Proposition 10, Eq. 25", "HOLDS", uses=[proposition_10_printed])
def eq25(seed: int) -> Evidence:
    r"""$\|Y\|_2\le\|Y\|_F = \sqrt{Ld_V}$

    Correct: with $\gamma = 1$, $\beta = 0$, $\epsilon = 0$
    """
    found = [float(p.block.Y.norm()) for p in problems(seed)]
    return agrees(found, [math.sqrt(p.X.numel()) for p in problems(seed)], "the Frobenius norm of Y")


@claim("curvature-gap/eq26", "Proposition 10, Eq. 26", "HOLDS", uses=[proposition_10_printed])
def eq26(seed: int) -> Evidence:
    r"""$\|\mathrm{FFN}(Y)\|_2\le\sqrt{\min(L,d_{ff})}\,\|Y\|_2\|W_1\|_2\|W_2\|_2$"""

    def right(p: BlockPoint) -> float:
        named = norms(p)
        return math.sqrt(min(p.sizes.L, p.sizes.d_ff)) * spectral(p.block.Y) * named["w_1"] * named["w_2"]

    return never_above(seed, lambda p: spectral(p.block.S - p.block.Y), right, "exact Y")


@claim("curvature-gap/eq27", "Proposition 10, Eq. 27", "HOLDS", uses=[proposition_10_printed])
def eq27(seed: int) -> Evidence:
    r"""$\|S\|_2\le\sqrt{Ld_V}\,(1 + \sqrt{\min(L,d_{ff})}\,\|W_1\|_2\|W_2\|_2)$

    Correct: the inner root is not needed: $\|S\|_F\le\sqrt{Ld_V}(1 + \|W_1\|\|W_2\|)$
    """
    found = []
    for p in problems(seed):
        L, d_V, _, d_ff = p.sizes
        named = norms(p)
        found.append(spectral(p.block.S) / proposition_10_printed(L, d_V, d_ff, named["w_1"], named["w_2"]).S)
        found.append(float(p.block.S.norm()) / (math.sqrt(L * d_V) * (1 + named["w_1"] * named["w_2"])))
    return bounded(found, "four points, the print and without the inner root")
