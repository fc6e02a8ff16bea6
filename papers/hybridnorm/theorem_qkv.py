"""Theorem A.3, attention with QKV-Norm: Eqs. 30-34, the text after it, and homogeneity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from derivations.normalization import RMSNormAt
from derivations.stage import Stage
from papers.ascent import worst
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import assumed, bounded, relative_error, small, violated, wrong
from papers.hybridnorm.definitions import LETTERS, HeadPoint
from papers.hybridnorm.gradient_bounds import (
    AttentionGradientBounds,
    largest_gain,
    pre_norm_gradient_bounds,
    qkv_norm_gradient_bounds,
)
from papers.hybridnorm.theorem_pre import (
    equal_tokens,
    opposite_tokens,
    printed_qkv_norm_bounds,
    qkv_norm_norms,
    ratios,
    sample,
    sigma_of_product,
    sigma_of_weight,
)
from papers.notation import dense, rms_norm, spectral
from papers.registry import claim, claims_of


def sharp(head: HeadPoint) -> AttentionGradientBounds:
    """Return left over right side of the corrected bounds."""
    return ratios(qkv_norm_norms(head), qkv_norm_gradient_bounds(head.X, *head.weights))


def break_bound(
    head: HeadPoint, letter: str, sigma: Callable[[Tensor, Tensor], float], detail: str, above: float = 1.0
) -> Evidence:
    """Compare a Jacobian's norm with the printed bound, in a reading of sigma_min, and with the corrected one."""
    left, right, corrected = (
        getattr(x, letter)
        for x in (qkv_norm_norms(head), printed_qkv_norm_bounds(head, sigma), qkv_norm_gradient_bounds(head.X, *head.weights))
    )
    at = {"X": head.X, letter: getattr(head, letter)}
    second = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=1 + LETTERS.index(letter)).norm()
    return violated(left, right, detail, corrected=corrected * (1 + 1e-12), above=above, at=at, second=second, by="autograd")


def scaled_tokens(seed: int, letter: str) -> Evidence:
    """Break the bounds as printed: multiply the tokens by a million, which changes sigma_min(XW) and nothing else."""
    head = HeadPoint.draw(Draw(seed), 3, 4, 3)
    large = replace(head, X=1e6 * head.X)
    moved = max(abs(a / b - 1) for a, b in zip(qkv_norm_norms(large), qkv_norm_norms(head), strict=True))
    detail = f"three tokens times 1e6: the left side moves by {moved:.1g}, 1 / sigma_min(XW) becomes a millionth"
    return break_bound(large, letter, sigma_of_product, detail)


@claim("eq30", "Theorem A.3, Eq. 30", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds])
def eq30(seed: int) -> Evidence:
    r"""QKV-Norm: $\|\partial S_N/\partial W_O\|_F = O(sd)$
    Needs: $d_k\le sd$, as for $d_k = d/h$
    Correct: $\le\sqrt{s\,d\,d_k}$"""
    found = [
        qkv_norm_norms(head).W_O / (len(head.X) * head.sizes[1])
        for head in sample(seed)
        if head.sizes[2] <= len(head.X) * head.sizes[1]
    ]
    wide = HeadPoint.draw(Draw(seed), 1, 2, 8)
    return assumed(bounded(found, f"{len(found)} heads"), qkv_norm_norms(wide).W_O / 2, above=1.9)


claims_of(
    __name__, scaled_tokens, "WRONG AS PRINTED", [qkv_norm_gradient_bounds],
    ("eq31", "Theorem A.3, Eq. 31", "W_V", r"""
     QKV-Norm: $\|\partial S_N/\partial W_V\|_F = O\left(\frac{s\sqrt{d_k}}{\sigma_{\min}^V}\|W_O\|_2\right)$,
     $\sigma_{\min}^V$ that of $XW_V$
     Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
     Severity: false"""),
    ("eq32", "Theorem A.3, Eq. 32", "W_Q", r"""
     QKV-Norm: $\|\partial S_N/\partial W_Q\|_F = O\left(\frac{s^{3/2}d_k}{\sigma_{\min}^Q}\|W_O\|_2\right)$,
     $\sigma_{\min}^Q$ that of $XW_Q$
     Correct: $\le\sqrt s\,d_k\,\rho_Q\|W_O\|_2$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
     Severity: false
     Follows: eq31"""),
    ("eq33", "Theorem A.3, Eq. 33", "W_K", r"""
     QKV-Norm: $\|\partial S_N/\partial W_K\|_F = O\left(\frac{s^{3/2}d_k}{\sigma_{\min}^K}\|W_O\|_2\right)$,
     $\sigma_{\min}^K$ that of $XW_K$
     Correct: $\le\sqrt s\,d_k\,\rho_K\|W_O\|_2$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
     Severity: false
     Follows: eq31"""),
)  # fmt: skip


@claim("eq34", "Proof of Theorem A.3, Eq. 34", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq34(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_V\|_F\le\frac{s\sqrt{d_k}}{\sigma_{\min}^V}\|W_O\|_2$ with the singular value of $W_V$ (as
    derived)
    Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$
    Severity: constant"""
    draw = Draw(seed)
    n = 5
    head = HeadPoint(draw.normal(1, n), draw.normal(n, n), draw.normal(n, n), draw.orthogonal(n), draw.orthogonal(n))
    return break_bound(head, "W_V", sigma_of_weight, f"one token, d = d_k = {n}, W_V and W_O orthogonal", above=1.9)


@claim("theorem-a3-proof-step", "Proof of Theorem A.3, before Eq. 34", "WRONG AS PRINTED", uses=[RMSNormAt])
def proof_step(seed: int) -> Evidence:
    r"""$\left\|\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})\right\|_F\le\sqrt{d_k\sum_i\|X_i\|^2/\|V_i\|^2}$
    Correct: equality with $\sqrt{d_k(d_k - 1)\sum_i\|X_i\|^2/\|V_i\|^2}$: $\|I - vv^\top\|_F^2 = d_k - 1$ was dropped
    Severity: constant"""
    draw = Draw(seed)
    d_k = 6
    head = HeadPoint.draw(draw, 4, 5, d_k)
    V = head.X @ head.W_V
    left = float((dense(RMSNormAt(V).jacobian("X")) @ torch.kron(head.X, torch.eye(d_k, dtype=torch.float64))).norm())
    total = float((head.X.norm(dim=1) ** 2 / V.norm(dim=1) ** 2).sum())
    printed, corrected = math.sqrt(d_k * total), math.sqrt(d_k * (d_k - 1) * total)
    second = jacobian_of(lambda W: rms_norm(head.X @ W), head.W_V).norm()
    detail = f"d_k = {d_k}: sqrt(d_k - 1); equal to the corrected side to {abs(left / corrected - 1):.1g}"
    sides = [left, corrected], [printed, math.inf], [corrected * (1 + 1e-12), left * (1 + 1e-12)]
    return violated(*sides[:2], detail, corrected=sides[2], above=2, second=[second, corrected], by="autograd")


@claim("ours/eq30-sharp", "HybridNorm, Theorem A.3, Eq. 30", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq30_sharp(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_O\|_F\le\sqrt{s\,d\,d_k}$, attained by equal tokens"""
    return bounded([sharp(h).W_O for h in [*sample(seed), equal_tokens(seed)]], "41 heads", attained=1 - 1e-9)


@claim("ours/eq31-sharp", "HybridNorm, Theorem A.3, Eq. 31", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq31_sharp(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_V\|_F\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$, attained by equal tokens with $W_O^\top v = 0$"""
    return bounded([sharp(h).W_V for h in [*sample(seed), equal_tokens(seed)]], "41 heads", attained=1 - 1e-9)


@claim("ours/eq32-sharp", "HybridNorm, Theorem A.3, Eq. 32", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq32_sharp(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_Q\|_F\le\sqrt s\,d_k\,\rho_Q\|W_O\|_2$, attained by tokens $\pm x$"""
    return bounded([sharp(h).W_Q for h in [*sample(seed), opposite_tokens(seed)]], "41 heads", attained=1 - 1e-9)


@claim("ours/eq33-sharp", "HybridNorm, Theorem A.3, Eq. 33", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq33_sharp(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_K\|_F\le\sqrt s\,d_k\,\rho_K\|W_O\|_2$, attained by tokens $\pm x$"""
    return bounded([sharp(h).W_K for h in [*sample(seed), opposite_tokens(seed)]], "41 heads", attained=1 - 1e-9)


# Theorem A.3, attention with QKV-Norm: Eqs. 31-33 in other readings
def with_rho(head: HeadPoint) -> AttentionGradientBounds:
    """Return left over right side of the printed bounds with rho in place of 1 / sigma_min."""
    return ratios(qkv_norm_norms(head), printed_qkv_norm_bounds(head, lambda X, W: 1 / largest_gain(X, W)))


def nearly_lost_tokens(seed: int, letter: str, *, distance: float = 1e-3) -> Evidence:
    """Break the reading of the proof where d_k < d: tokens that W^T all but removes, while its d_k-th singular value is 1."""
    draw = Draw(seed)
    basis = draw.orthogonal(5)
    W, x = basis[:, :3], basis[:, 3] + distance * basis[:, 0]
    if letter == "W_V":
        head = replace(HeadPoint.draw(draw, 4, 5, 3), X=basis[:, 3] + distance * draw.normal(4, 5), W_V=W)
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
    wide = [HeadPoint.draw(draw, s, d, d + int(draw.integers(0, 3))) for s, d, _ in (head.sizes for head in sample(seed, 20))]
    found = worst(
        lambda h: getattr(ratios(qkv_norm_norms(h), printed_qkv_norm_bounds(h, sigma_of_weight)), letter), wide, steps=150
    )
    return assumed(bounded(found, "20 heads"), nearly_lost_tokens(seed, letter).number, above=5)


@claim("eq31-sigma-of-weight", "Theorem A.3, Eq. 31, read as its proof does", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq31_weight(seed: int) -> Evidence:
    r"""Eq. 31 with the $d_k$-th singular value of $W_V$
    Correct: $\rho_V$ in place of $1/\sigma_{\min}$ and $\|W_O\|_F$; over $\mathbb{R}^d$ the smallest singular value is $0$ if
    $d_k < d$
    Severity: constant
    Follows: eq34"""
    return nearly_lost_tokens(seed, "W_V")


claims_of(
    __name__, as_wide_as_the_model, "HOLDS UNDER ASSUMPTION", [qkv_norm_gradient_bounds],
    ("eq32-sigma-of-weight", "Theorem A.3, Eq. 32, read as its proof does", "W_Q", r"""
     Eq. 32 with the smallest singular value of $W_Q$
     Needs: $d_k\ge d$, which no model has
     Correct: $\rho_Q$ in place of $1/\sigma_{\min}$"""),
    ("eq33-sigma-of-weight", "Theorem A.3, Eq. 33, read as its proof does", "W_K", r"""
     Eq. 33 with the smallest singular value of $W_K$
     Needs: $d_k\ge d$, which no model has
     Correct: $\rho_K$ in place of $1/\sigma_{\min}$"""),
)  # fmt: skip


@claim("eq32-small-tokens", "Theorem A.3, Eqs. 32-33", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds])
def eq32_small_tokens(seed: int) -> Evidence:
    r"""Eqs. 32 and 33 with the smallest singular values of $XW_Q$ and $XW_K$
    Needs: $\|x_i\|\le 1$ and $s\le d_k$"""
    draw = Draw(seed)
    heads = [HeadPoint.draw(draw, 2 + int(draw.integers(0, 2)), 5, 4) for _ in range(20)]

    def ratio(head: HeadPoint, k: int) -> float:
        small = replace(head, X=head.X / head.X.norm(dim=1, keepdim=True))
        return ratios(qkv_norm_norms(small), printed_qkv_norm_bounds(small, sigma_of_product))[k]

    found = [worst(lambda h, k=k: ratio(h, k), heads, steps=150) for k in (0, 1)]  # type: ignore[misc]
    return assumed(bounded(found, "20 heads; W_Q, W_K"), scaled_tokens(seed, "W_Q").number, above=1)


@claim("eq31-rho", "Theorem A.3, Eq. 31, with the right scale", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds])
def eq31_rho(seed: int) -> Evidence:
    r"""Eq. 31 with $\rho_V$ in place of $1/\sigma_{\min}^V$ and its spectral norm of $W_O$
    Needs: $\|W_O\|_F^2/\|W_O\|_2^2\le s$; else off by up to $\sqrt{d_k - 1}$, at $s = 1$
    Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$"""

    def ratio(head: HeadPoint) -> float:
        return with_rho(head).W_V if (float(head.W_O.norm()) / spectral(head.W_O)) ** 2 <= len(head.X) else 0.0

    heads, draw = [*sample(seed), equal_tokens(seed)], Draw(seed)
    d_k = 8
    alone = replace(HeadPoint.draw(draw, 1, d_k, d_k), W_O=draw.orthogonal(d_k))
    found = bounded(worst(ratio, heads, steps=150), f"{len(heads)} heads")
    return assumed(found, with_rho(alone).W_V, above=math.sqrt(d_k - 1) * (1 - 1e-9))


@claim("eq32-rho", "Theorem A.3, Eq. 32, with the right scale", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq32_rho(seed: int) -> Evidence:
    r"""Eq. 32 with $\rho_Q$ in place of $1/\sigma_{\min}^Q$ and the factor $1/2$ of its proof"""
    heads = [*sample(seed, least=2), opposite_tokens(seed, 2)]
    return bounded([with_rho(head).W_Q for head in heads], "41 heads, attained at two tokens x and -x", attained=1 - 1e-9)


@claim("eq33-rho", "Theorem A.3, Eq. 33, with the right scale", "HOLDS", uses=[qkv_norm_gradient_bounds])
def eq33_rho(seed: int) -> Evidence:
    r"""Eq. 33 with $\rho_K$ in place of $1/\sigma_{\min}^K$ and the factor $1/2$ of its proof"""
    heads = [*sample(seed, least=2), opposite_tokens(seed, 2)]
    return bounded([with_rho(head).W_K for head in heads], "41 heads, attained at two tokens x and -x", attained=1 - 1e-9)


# The text after Theorem A.3, and what is exact in its place: homogeneity, its consequences for the Hessian, gauges
def moved(seed: int, letter: str) -> tuple[HeadPoint, HeadPoint]:
    """Return a head, and one in which a weight is another draw."""
    head = HeadPoint.draw(Draw(seed))
    other: dict[str, Any] = {letter: Draw(seed + 1000).normal(*getattr(head, letter).shape)}
    return head, replace(head, **other)


@claim("text-pre-not-by-themselves", "App. A, after Theorem A.3", "DOES NOT FOLLOW", uses=[pre_norm_gradient_bounds])
def not_by_themselves(seed: int) -> Evidence:
    """with Pre-Norm, the gradients of $W_Q$ and $W_K$ are influenced by all three other weights but not by themselves
    Correct: that holds of the bounds of Theorem A.3; the gradient depends on them, because $A$ depends on both"""
    before_and_after, bounds = [], []
    for letter, k in (("W_Q", 0), ("W_K", 1)):
        head, other = moved(seed, letter)
        before_and_after.append([jacobian_of(h.pre_norm, h.X, *h.weights, wrt=1 + k) for h in (head, other)])
        before, after = (pre_norm_gradient_bounds(4, *h.weights)[k] for h in (head, other))
        bounds.append(abs(after / before - 1))
    free, found = map(list, zip(*before_and_after, strict=True))
    names = zip((moved(seed, "W_Q")[1], moved(seed, "W_K")[1]), ("W_Q", "W_K"), strict=True)
    closed = [dense(h.closed_pre_norm.jacobian(letter)) for h, letter in names]
    detail = f"dS/dW_Q when W_Q moves, dS/dW_K when W_K does; their bounds change by {max(bounds):.1g}"
    return wrong(free, found, detail, corrected=closed, above=0.1)


@claim(
    "text-qkv-itself-and-output", "App. A, after Theorem A.3", "DOES NOT FOLLOW", uses=[Stage.jacobian, qkv_norm_gradient_bounds]
)
def itself_and_output(seed: int) -> Evidence:
    """with QKV-Norm, the gradient of each weight depends at most on itself and $W_O$
    Correct: that holds of the scales, also of that of $X$; the gradient depends on the directions of all weights"""
    head, other = moved(seed, "W_K")
    before = dense(head.closed_qkv_norm.jacobian("W_Q"))
    turned = jacobian_of(other.qkv_norm, other.X, *other.weights, wrt=1)
    scaled = replace(head, X=7 * head.X, W_Q=head.W_Q, W_K=3 * head.W_K, W_V=0.2 * head.W_V)
    rest = relative_error(dense(scaled.closed_qkv_norm.jacobian("W_Q")), before)
    detail = f"dS_N/dW_Q when W_K is drawn anew: unmoved, moved; scales of X, W_K, W_V change it by {rest:.1g}"
    return wrong(before, turned, detail, corrected=dense(other.closed_qkv_norm.jacobian("W_Q")), above=0.1)


@claim("ours/qkv-degrees", "HybridNorm, Eq. 13", "HOLDS", uses=[Stage.jacobian])
def degrees(seed: int) -> Evidence:
    r"""$S_N$ is homogeneous of degrees $(0,0,0,1;0)$ in $(W_Q,W_K,W_V,W_O;X)$, so $\partial S_N/\partial W_\bullet$ has
    degree $-1$ in $W_\bullet$, $1$ in $W_O$, $0$ in all else"""
    head = HeadPoint.draw(Draw(seed))
    errors = []
    for letter in LETTERS[:3]:
        before = dense(head.closed_qkv_norm.jacobian(letter))
        for name, factor in (("X", 3.0), *((other, 0.5) for other in LETTERS)):
            scaled = replace(head, **{name: factor * getattr(head, name)})
            degree = 1 if name == "W_O" else -1 if name == letter else 0
            errors.append(relative_error(dense(scaled.closed_qkv_norm.jacobian(letter)), factor**degree * before))
    return small(errors, "15 scalings")


def loss_of(head: HeadPoint, seed: int) -> Callable[..., Tensor]:
    """Return a generic loss of S_N as a function of the four weights."""
    draw = Draw(seed + 1)
    slope, target = draw.normal(*head.X.shape), draw.normal(*head.X.shape)

    def loss(*weights: Tensor) -> Tensor:
        S = head.qkv_norm(head.X, *weights)
        return (slope * S).sum() + (S - target).square().sum()

    return loss


@claim("ours/qkv-hessian-on-its-weight", "HybridNorm, Eq. 13", "HOLDS")
def hessian_on_weight(seed: int) -> Evidence:
    r"""$H w_\bullet = -g_\bullet$ on the block of $W_\bullet$ and $0$ on all others, for $W_Q$, $W_K$, $W_V$"""
    head = HeadPoint.draw(Draw(seed), 3, 4, 2)
    loss, errors = loss_of(head, seed), []
    for k in range(3):
        g = jacobian_of(loss, *head.weights, wrt=k).reshape(-1)
        w = head.weights[k].reshape(-1)
        for i in range(4):
            image = hessian_of(loss, *head.weights, wrt=(i, k)) @ w
            expected = -g if i == k else torch.zeros_like(image)
            errors.append(float((image - expected).abs().max() / g.abs().max()))
    return small(errors, "12 blocks, Hessians by autograd twice")
