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
)
from derivations.bounds.block_printed import (
    sigma_min_printed,
)
from hessiankit.ledger.autodiff import hessian_of, jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import spectral
from hessiankit.ledger.curvature_gap.point import layer_norm
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import loose, violated, wrong
from hessiankit.ledger.registry import claim


def two_entries(n: int, scale: float = 1.0) -> Tensor:
    """Return the row (1, -1, 0, ...)."""
    row = torch.zeros(1, n, dtype=torch.float64)
    row[0, 0], row[0, 1] = scale, -scale
    return row


def lemma_ratios(X: Tensor, reading: str) -> tuple[float, float]:
    """Return left over right side of Eqs. 28 and 29."""
    (left, right), (bent, bent_right) = lemma_sides(X, reading)
    return left / right, bent / bent_right


def lemma_sides(X: Tensor, reading: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the left sides of Eqs. 28 and 29 by autograd and their right sides."""
    sigma, x = sigma_min_printed(X, reading=reading), spectral(X)
    jacobian, hessian = spectral(jacobian_of(layer_norm, X)), spectral(hessian_of(layer_norm, X))
    return (jacobian, lemma_4_jacobian_printed(x, sigma, X.shape[1])), (hessian, lemma_4_hessian_printed(x, sigma, *X.shape))


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
    inputs = [two_entries(8), *rows(seed)]
    left, printed = zip(*(lemma_sides(X, "stated")[0] for X in inputs), strict=True)
    corrected = [norm_jacobian_norm(X) for X in inputs]
    return violated(left, printed, "X = (1, -1, 0, ..., 0), n = 8, first", corrected=corrected, above=2, at={"X": inputs[0]})


@claim("curvature-gap/lemma4-29m", "Lemma 4, Eq. 29", "WRONG AS PRINTED", uses=[lemma_4_hessian_printed, norm_hessian_norm])
def lemma4_29m(seed: int) -> Evidence:
    r"""$\|H_{LN}\|_2\le\frac{\|X\|}{\sigma_{\min}^3}(1 + \sqrt{m/n}) + \frac{\|X\|^2}{\sqrt n\sigma_{\min}^3} +
    \frac{3\|X\|^3}{n\sigma_{\min}^5}$, $\sigma_{\min} = \min_i\|M_i\|_2$

    Correct: $\|H_{LN}\|_2 = \sqrt{\max(n-2,2)/n}\,/\min_i\sigma_i^2$ for $n\ge3$
    """
    inputs = [two_entries(8, 1e-3), *rows(seed)]
    left, printed = zip(*(lemma_sides(X, "stated")[1] for X in inputs), strict=True)
    corrected = [norm_hessian_norm(X) for X in inputs]
    return violated(
        left, printed, "X = (1, -1, 0, ..., 0) / 1000, n = 8, first", corrected=corrected, above=3.9, at={"X": inputs[0]}
    )


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
    hessian = spectral(hessian_of(layer_norm, c * X)) / spectral(hessian_of(layer_norm, X))
    detail = "factor with 100 X in place of X: of that term, of H by autograd, of the other terms"
    return wrong(scaled_middle / middle, hessian, detail, corrected=scaled_rest / rest)
