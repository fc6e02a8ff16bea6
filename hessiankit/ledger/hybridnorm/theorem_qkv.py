"""Theorem A.3, attention with QKV-Norm: Eqs. 30-34."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from derivations.gradient_bounds import AttentionGradientBounds, qkv_norm_gradient_bounds
from derivations.normalization import RMSNormAt
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import assumed, bounded, violated
from hessiankit.ledger.hybridnorm.bounds_printed import (
    equal_tokens,
    opposite_tokens,
    printed_qkv_norm_bounds,
    qkv_norm_norms,
    ratios,
    sample,
    sigma_of_product,
    sigma_of_weight,
)
from hessiankit.ledger.hybridnorm.definitions import HeadPoint, rms_norm
from hessiankit.ledger.hybridnorm.jacobians import dense
from hessiankit.ledger.registry import claim


def sharp(head: HeadPoint) -> AttentionGradientBounds:
    """Return left over right side of the corrected bounds."""
    return ratios(qkv_norm_norms(head), qkv_norm_gradient_bounds(head.X, *head.weights))


def break_bound(
    head: HeadPoint, letter: str, sigma: Callable[[Tensor, Tensor], float], detail: str, above: float = 1.0
) -> Evidence:
    """Compare a Jacobian's norm with the printed bound, in a reading of sigma_min, and with the corrected one."""
    left, right, corrected = (
        getattr(x, letter)
        for x in (
            qkv_norm_norms(head),
            printed_qkv_norm_bounds(head, sigma),
            qkv_norm_gradient_bounds(head.X, *head.weights),
        )
    )
    at = {"X": head.X, letter: getattr(head, letter)}
    return violated(left, right, detail, corrected=corrected * (1 + 1e-12), above=above, at=at)


def scaled_tokens(seed: int, letter: str) -> Evidence:
    """Break the bounds as printed: multiply the tokens by a million, which changes sigma_min(XW) and nothing else."""
    head = HeadPoint.draw(Draw(seed), 3, 4, 3)
    large = head.with_(X=1e6 * head.X)
    moved = max(abs(a / b - 1) for a, b in zip(qkv_norm_norms(large), qkv_norm_norms(head), strict=True))
    detail = f"three tokens times 1e6: the left side moves by {moved:.1g}, 1 / sigma_min(XW) becomes a millionth"
    return break_bound(large, letter, sigma_of_product, detail)


@claim("hybridnorm/eq30", "Theorem A.3, Eq. 30", "HOLDS UNDER ASSUMPTION", uses=[qkv_norm_gradient_bounds])
def eq30(seed: int) -> Evidence:
    r"""QKV-Norm: $\|\partial S_N/\partial W_O\|_F = O(sd)$

    Needs: $d_k\le sd$, as for $d_k = d/h$

    Correct: $\le\sqrt{s\,d\,d_k}$
    """
    found = [
        qkv_norm_norms(head).W_O / (len(head.X) * head.sizes[1])
        for head in sample(seed)
        if head.sizes[2] <= len(head.X) * head.sizes[1]
    ]
    wide = HeadPoint.draw(Draw(seed), 1, 2, 8)
    return assumed(bounded(found, f"{len(found)} heads"), qkv_norm_norms(wide).W_O / 2, above=1.9)


@claim("hybridnorm/eq31", "Theorem A.3, Eq. 31", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq31(seed: int) -> Evidence:
    r"""QKV-Norm: $\|\partial S_N/\partial W_V\|_F = O\left(\frac{s\sqrt{d_k}}{\sigma_{\min}^V}\|W_O\|_2\right)$,
    $\sigma_{\min}^V$ that of $XW_V$

    Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
    """
    return scaled_tokens(seed, "W_V")


@claim("hybridnorm/eq32", "Theorem A.3, Eq. 32", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq32(seed: int) -> Evidence:
    r"""QKV-Norm: $\|\partial S_N/\partial W_Q\|_F = O\left(\frac{s^{3/2}d_k}{\sigma_{\min}^Q}\|W_O\|_2\right)$,
    $\sigma_{\min}^Q$ that of $XW_Q$

    Correct: $\le\sqrt s\,d_k\,\rho_Q\|W_O\|_2$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
    """
    return scaled_tokens(seed, "W_Q")


@claim("hybridnorm/eq33", "Theorem A.3, Eq. 33", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq33(seed: int) -> Evidence:
    r"""QKV-Norm: $\|\partial S_N/\partial W_K\|_F = O\left(\frac{s^{3/2}d_k}{\sigma_{\min}^K}\|W_O\|_2\right)$,
    $\sigma_{\min}^K$ that of $XW_K$

    Correct: $\le\sqrt s\,d_k\,\rho_K\|W_O\|_2$ with $\rho_W = \max_i\|x_i\|/\|W^\top x_i\|$
    """
    return scaled_tokens(seed, "W_K")


@claim("hybridnorm/eq34", "Proof of Theorem A.3, Eq. 34", "WRONG AS PRINTED", uses=[qkv_norm_gradient_bounds])
def eq34(seed: int) -> Evidence:
    r"""$\|\partial S_N/\partial W_V\|_F\le\frac{s\sqrt{d_k}}{\sigma_{\min}^V}\|W_O\|_2$ with the singular value of $W_V$ (as
    derived)

    Correct: $\le\sqrt{s d_k}\,\rho_V\|W_O\|_F$
    """
    draw = Draw(seed)
    n = 5
    head = HeadPoint(draw.normal(1, n), draw.normal(n, n), draw.normal(n, n), draw.orthogonal(n), draw.orthogonal(n))
    return break_bound(head, "W_V", sigma_of_weight, f"one token, d = d_k = {n}, W_V and W_O orthogonal", above=1.9)


@claim("hybridnorm/theorem-a3-proof-step", "Proof of Theorem A.3, before Eq. 34", "WRONG AS PRINTED", uses=[RMSNormAt])
def proof_step(seed: int) -> Evidence:
    r"""$\left\|\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})\right\|_F\le\sqrt{d_k\sum_i\|X_i\|^2/\|V_i\|^2}$

    Correct: equality with $\sqrt{d_k(d_k - 1)\sum_i\|X_i\|^2/\|V_i\|^2}$: $\|I - vv^\top\|_F^2 = d_k - 1$ was dropped
    """
    draw = Draw(seed)
    d_k = 6
    head = HeadPoint.draw(draw, 4, 5, d_k)
    V = head.X @ head.W_V
    left = float((dense(RMSNormAt(V).jacobian("X")) @ torch.kron(head.X, torch.eye(d_k, dtype=torch.float64))).norm())
    total = float((head.X.norm(dim=1) ** 2 / V.norm(dim=1) ** 2).sum())
    printed, corrected = math.sqrt(d_k * total), math.sqrt(d_k * (d_k - 1) * total)
    second = jacobian_of(lambda W: rms_norm(head.X @ W), head.W_V).norm()
    detail = f"d_k = {d_k}: sqrt(d_k - 1); equal to the corrected side to {abs(left / corrected - 1):.1g}"
    return violated(left, printed, detail, corrected=corrected, above=2, second=second, by="autograd")


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
