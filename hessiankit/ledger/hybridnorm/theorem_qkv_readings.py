"""Theorem A.3, attention with QKV-Norm: Eqs. 31-33 in other readings."""

from __future__ import annotations

import math
from typing import Any

import torch

from derivations.gradient_bounds import AttentionGradientBounds, largest_gain, qkv_norm_gradient_bounds
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import assumed, bounded
from hessiankit.ledger.hybridnorm.bounds_printed import (
    opposite_tokens,
    printed_qkv_norm_bounds,
    qkv_norm_norms,
    ratios,
    sample,
    sigma_of_product,
    sigma_of_weight,
    spectral,
)
from hessiankit.ledger.hybridnorm.definitions import HeadPoint
from hessiankit.ledger.hybridnorm.theorem_qkv import break_bound, scaled_tokens
from hessiankit.ledger.registry import claim


def with_rho(head: HeadPoint) -> AttentionGradientBounds:
    """Return left over right side of the printed bounds with rho in place of 1 / sigma_min."""
    return ratios(qkv_norm_norms(head), printed_qkv_norm_bounds(head, lambda X, W: 1 / largest_gain(X, W)))


def nearly_lost_tokens(seed: int, letter: str, *, distance: float = 1e-3) -> Evidence:
    """Break the reading of the proof where d_k < d: tokens that W^T all but removes, while its d_k-th singular value is 1."""
    draw = Draw(seed)
    basis = draw.orthogonal(5)
    W, x = basis[:, :3], basis[:, 3] + distance * basis[:, 0]
    if letter == "W_V":
        head = HeadPoint.draw(draw, 4, 5, 3).with_(X=basis[:, 3] + distance * draw.normal(4, 5), W_V=W)
    else:  # x and -x, queries and keys at right angles, as where the sharp bound is attained
        u, e = x / x.norm(), torch.eye(3, dtype=torch.float64)
        other = {"W_Q": "W_K", "W_K": "W_Q"}[letter]
        rest: dict[str, Any] = {"W_V": torch.outer(u, e[2]), "W_O": torch.outer(e[2], draw.normal(5))}
        head = HeadPoint(**{"X": torch.stack([x, -x]), letter: W, other: torch.outer(u, e[1]), **rest})
    detail = f"d_k = 3 < d = 5, tokens within {distance:g} of the kernel of {letter}^T"
    return break_bound(head, letter, sigma_of_weight, detail, above=5)


def as_wide_as_the_model(seed: int, letter: str) -> Evidence:
    """Find the reading of the proof to hold where d_k >= d, and to fail where d_k < d."""
    draw = Draw(seed)
    found = []
    for head in sample(seed, 40):
        s, d, _ = head.sizes
        wide = HeadPoint.draw(draw, s, d, d + int(draw.integers(0, 3)))
        found.append(getattr(ratios(qkv_norm_norms(wide), printed_qkv_norm_bounds(wide, sigma_of_weight)), letter))
    fails = nearly_lost_tokens(seed, letter)
    return assumed(bounded(found, "40 heads"), fails.number, above=5)


@claim(
    "hybridnorm/eq31-sigma-of-weight",
    "Theorem A.3, Eq. 31, read as its proof does",
    "WRONG AS PRINTED",
    uses=[qkv_norm_gradient_bounds],
)
def eq31_weight(seed: int) -> Evidence:
    r"""Eq. 31 with the $d_k$-th singular value of $W_V$

    Correct: $\rho_V$ in place of $1/\sigma_{\min}$ and $\|W_O\|_F$; over $\mathbb{R}^d$ the smallest singular value is $0$ if
    $d_k < d$
    """
    return nearly_lost_tokens(seed, "W_V")


@claim(
    "hybridnorm/eq32-sigma-of-weight",
    "Theorem A.3, Eq. 32, read as its proof does",
    "HOLDS UNDER ASSUMPTION",
    uses=[qkv_norm_gradient_bounds],
)
def eq32_weight(seed: int) -> Evidence:
    r"""Eq. 32 with the smallest singular value of $W_Q$

    Needs: $d_k\ge d$, which no model has

    Correct: $\rho_Q$ in place of $1/\sigma_{\min}$
    """
    return as_wide_as_the_model(seed, "W_Q")


@claim(
    "hybridnorm/eq33-sigma-of-weight",
    "Theorem A.3, Eq. 33, read as its proof does",
    "HOLDS UNDER ASSUMPTION",
    uses=[qkv_norm_gradient_bounds],
)
def eq33_weight(seed: int) -> Evidence:
    r"""Eq. 33 with the smallest singular value of $W_K$

    Needs: $d_k\ge d$, which no model has

    Correct: $\rho_K$ in place of $1/\sigma_{\min}$
    """
    return as_wide_as_the_model(seed, "W_K")


@claim("hybridnorm/eq32-small-tokens", "Theorem A.3, Eqs. 32-33", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds])
def eq32_small_tokens(seed: int) -> Evidence:
    r"""Eqs. 32 and 33 with the smallest singular values of $XW_Q$ and $XW_K$

    Needs: $\|x_i\|\le 1$ and $s\le d_k$
    """
    draw = Draw(seed)
    found: list[float] = []
    for _ in range(40):
        head = HeadPoint.draw(draw, 2 + int(draw.integers(0, 2)), 5, 4)
        small = head.with_(X=head.X / head.X.norm(dim=1, keepdim=True))
        found += ratios(qkv_norm_norms(small), printed_qkv_norm_bounds(small, sigma_of_product))[:2]
    return assumed(bounded(found, "40 heads"), scaled_tokens(seed, "W_Q").number, above=1)


@claim(
    "hybridnorm/eq31-rho", "Theorem A.3, Eq. 31, with the right scale", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds]
)
def eq31_rho(seed: int) -> Evidence:
    r"""Eq. 31 with $\rho_V$ in place of $1/\sigma_{\min}^V$ and its spectral norm of $W_O$

    Needs: $\|W_O\|_F^2/\|W_O\|_2^2\le s$; else off by up to $\sqrt{d_k - 1}$, at $s = 1$

    Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$
    """
    heads = [head for head in sample(seed, 60) if (float(head.W_O.norm()) / spectral(head.W_O)) ** 2 <= len(head.X)]
    draw = Draw(seed)
    d_k = 8
    alone = HeadPoint.draw(draw, 1, d_k, d_k).with_(W_O=draw.orthogonal(d_k))
    found = bounded([with_rho(head).W_V for head in heads], f"{len(heads)} heads")
    return assumed(found, with_rho(alone).W_V, above=math.sqrt(d_k - 1) * (1 - 1e-9))


@claim("hybridnorm/eq32-rho", "Theorem A.3, Eq. 32, with the right scale", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq32_rho(seed: int) -> Evidence:
    r"""Eq. 32 with $\rho_Q$ in place of $1/\sigma_{\min}^Q$ and the factor $1/2$ of its proof"""
    heads = [*sample(seed, least=2), opposite_tokens(seed, 2)]
    return bounded([with_rho(head).W_Q for head in heads], "41 heads, attained at two tokens x and -x", attained=1 - 1e-9)


@claim("hybridnorm/eq33-rho", "Theorem A.3, Eq. 33, with the right scale", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq33_rho(seed: int) -> Evidence:
    r"""Eq. 33 with $\rho_K$ in place of $1/\sigma_{\min}^K$ and the factor $1/2$ of its proof"""
    heads = [*sample(seed, least=2), opposite_tokens(seed, 2)]
    return bounded([with_rho(head).W_K for head in heads], "41 heads, attained at two tokens x and -x", attained=1 - 1e-9)
