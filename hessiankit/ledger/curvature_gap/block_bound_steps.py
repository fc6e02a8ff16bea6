"""The steps to Theorem 6: C.6."""

from __future__ import annotations

import math
from functools import partial

from derivations.bounds import (
    theorem_6_printed,
)
from derivations.bounds.block_printed import (
    attention_jacobians_printed,
    phi_printed,
)
from hessiankit.ledger.autodiff import hessian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.attention_problems import AttentionProblem, sample, two_attended_tokens
from hessiankit.ledger.curvature_gap.block_problems import (
    crossed_pairs,
    exact_phi,
    norms,
    over,
    peaked_identity,
    problems,
    uniform_pair,
)
from hessiankit.ledger.curvature_gap.notation import dense, spectral
from hessiankit.ledger.curvature_gap.point import ATTENTION_PAIRS, BlockPoint, BlockSizes, attention, point
from hessiankit.ledger.evidence import assumed, bounded, violated
from hessiankit.ledger.registry import claim


@claim("curvature-gap/eq17-g_v", "C.6, Eq. 17", "HOLDS", uses=[attention_jacobians_printed])
def eq17_g_v(seed: int) -> Evidence:
    r"""$\|G_V\|_2\le L\|X\|_2$

    Correct: $\le\sqrt L\|X\|_2$; the print is attained at $L = 1$ only
    """
    one = point(seed, BlockSizes(1, 3, 2, 4))
    found = [spectral(p.first("F", "V")) / (p.sizes.L * spectral(p.X)) for p in (*problems(seed), one)]
    found += [spectral(p.first("F", "V")) / (math.sqrt(p.sizes.L) * spectral(p.X)) for p in problems(seed)]
    return bounded(found, "five points, attained by one token; also with the root of L", attained=1 - 1e-9)


@claim("curvature-gap/eq17-g_q", "C.6, Eq. 17", "HOLDS UNDER ASSUMPTION", uses=[attention_jacobians_printed])
def eq17_g_q(seed: int) -> Evidence:
    r"""$\|G_Q\|_2\le\frac{1}{L\sqrt{d_K}}\|W_V\|_2\|W_K\|_2\|X\|_2^3$, and $G_K$ with $W_Q$

    Needs: uniform attention, $A = \frac1L 11^\top$, or $L\le 2$

    Correct: $\frac{1}{2\sqrt{d_K}}$ in front
    """

    def right(p: AttentionProblem, k: str) -> float:
        of_Q, of_K, _ = attention_jacobians_printed(len(p.X), p.sizes[2], *(p.norms[n] for n in ("x", "w_Q", "w_K", "w_V")))
        return of_Q if k == "Q" else of_K

    found = [spectral(p.G(k)) / right(p, k) for p in sample(seed, uniform=True) for k in "QK"]
    found += [spectral(p.G(k)) / (right(p, k) * len(p.X) / 2) for p in sample(seed) for k in "QK"]
    pair = two_attended_tokens(6)
    return assumed(bounded(found, "12 problems; 1/2 on 12 others"), spectral(pair.G("Q")) / right(pair, "Q"), above=2.9)


# C.6: attention's second derivatives, and B -----------------------------------------------------------------------------


def phi_sides(p: BlockPoint, k: str, m: str) -> tuple[float, float, float]:
    """Return a Phi block's norm by autograd, C.6's bound, and it without the stray 2/(L d_V) and with 1/2 in place of 1/L."""
    L, d_V, d_K, _ = p.sizes
    named = norms(p)
    x, s = named["x"], 1 / math.sqrt(d_K)
    straight, curved = s * math.sqrt(d_V) * x**3 / 2, s**2 * 6 * named["w_V"] * named["w_K"] * x**5
    corrected = {
        "QQ": curved * named["w_K"],
        "VQ": straight * named["w_K"],
        "QK": curved * named["w_Q"] + straight * named["w_V"],
    }
    printed = phi_printed(L, d_V, d_K, *(named[n] for n in ("x", "w_Q", "w_K", "w_V")))
    names = "QKV"
    weights = [p.weights[i] for i in names]
    left = hessian_of(partial(attention, p.X), *weights, wrt=(names.index(k), names.index(m)))
    return spectral(left), printed[k + m], corrected[k + m]


def phi_row(seed: int, worst: BlockPoint, k: str, m: str, detail: str, above: float) -> Evidence:
    """Show that a point breaks C.6's bound on a Phi block, and no point the corrected one."""
    left, printed, corrected = zip(*(phi_sides(p, k, m) for p in (worst, *problems(seed))), strict=True)
    return violated(left, printed, detail, corrected=corrected, above=above, at={"X": worst.X, "W_K": worst.weights["K"]})


@claim("curvature-gap/c6-phi_qq", "C.6", "WRONG AS PRINTED", uses=[phi_printed])
def c6_phi_qq(seed: int) -> Evidence:
    r"""$\|\Phi_{QQ}\|_2\le\frac{12}{Ld_Vd_K}\|W_V\|\|W_K\|^2\|X\|^5$

    Correct: $\frac{6}{d_K}$ in front, loose by 8 or more: the loss factor of Lemma 2
    """
    return phi_row(seed, peaked_identity(8), "Q", "Q", "L = d_V = 8, X = I", 1.0)


@claim("curvature-gap/c6-phi_vq", "C.6", "WRONG AS PRINTED", uses=[phi_printed])
def c6_phi_vq(seed: int) -> Evidence:
    r"""$\|\Phi_{VQ}\|_2\le\frac{2}{L^2\sqrt{d_Vd_K}}\|W_K\|\|X\|^3$, and $\Phi_{VK}$, $\Phi_{QV}$, $\Phi_{KV}$ likewise

    Correct: $\frac12\sqrt{d_V/d_K}\,\|W_K\|\|X\|^3$
    """
    return phi_row(seed, uniform_pair(4), "V", "Q", "uniform attention, L = d_V = 4", 7.9)


@claim("curvature-gap/c6-phi_qk", "C.6", "WRONG AS PRINTED", uses=[phi_printed])
def c6_phi_qk(seed: int) -> Evidence:
    r"""$\|\Phi_{QK}\|_2\le\frac{12}{Ld_Vd_K}\|W_V\|\|W_K\|\|W_Q\|\|X\|^5 + \frac{2}{L^2\sqrt{d_Vd_K}}\|W_V\|\|X\|^3$

    Correct: $\frac{6}{d_K}\|W_V\|\|W_K\|\|W_Q\|\|X\|^5 + \frac12\sqrt{d_V/d_K}\,\|W_V\|\|X\|^3$
    """
    return phi_row(seed, uniform_pair(4), "Q", "K", "uniform attention, L = d_V = 4", 3.9)


@claim("curvature-gap/eq21", "C.6, Eq. 21", "WRONG AS PRINTED", uses=[theorem_6_printed])
def eq21(seed: int) -> Evidence:
    r"""$\|\xi_{21}\|_2\le\sqrt{d_{ff}}\,\|W_2\|_2$

    Correct: $\|\xi_{21}\|_2\le\sqrt{d_V}\,\|Y\|_2$: $\xi_{21} = \partial B_2/\partial W_1$ does not depend on $W_2$
    """
    p = point(seed)
    small = BlockPoint(p.sizes, p.X, {**p.weights, "2": 1e-6 * p.weights["2"]}, p.target)
    left = spectral(small.second("S", "2", "1"))
    printed, corrected = math.sqrt(p.sizes.d_ff) * spectral(small.weights["2"]), math.sqrt(p.sizes.d_V) * spectral(p.block.Y)
    return violated(left, printed, "W_2 a millionth of a generic one", corrected=corrected, above=1e4)


def eq24_sides(p: BlockPoint, k: str, m: str, phi: dict[str, float]) -> tuple[float, float]:
    """Return left and right side of Eq. 24 with exact J_SY, J_Y, H_Y, G and given norms of Phi."""
    J_SY, J_Y, H_Y = (spectral(dense(A)) for A in (p.block.J_SY, p.block.J_Y, p.block.H_Y))
    bent = spectral(p.first("F", k)) * H_Y * spectral(p.first("F", m))
    return spectral(p.second("S", k, m)), J_SY * (bent + J_Y * phi[k + m])


@claim("curvature-gap/eq24", "C.6, Eq. 24", "HOLDS", uses=[theorem_6_printed])
def eq24(seed: int) -> Evidence:
    r"""$\|\xi_{k\ell}\|_2\le\|J_{SY}\|_2(\|G_k\|_2\|H_Y\|_2\|G_\ell\|_2 + \|J_Y\|_2\|\Phi_{k\ell}\|_2)$, all factors exact"""
    found = [over(*eq24_sides(p, k, m, exact_phi(p))) for p in problems(seed) for k, m in ATTENTION_PAIRS]
    return bounded(found, "four points, nine pairs")


@claim("curvature-gap/eq24-phi", "C.6, Eq. 24 with the bounds on Phi before it", "WRONG AS PRINTED", uses=[phi_printed])
def eq24_phi(seed: int) -> Evidence:
    r"""Eq. 24 with the bounds that C.6 gives for $\|\Phi_{k\ell}\|_2$

    Correct: with the norms of $\Phi$, or bounds without the stray $2/(Ld_V)$
    """
    p, pairs = crossed_pairs(), (("V", "Q"), ("Q", "K"))
    printed = phi_printed(4, 4, 1, *(norms(p)[name] for name in ("x", "w_Q", "w_K", "w_V")))
    left, right = zip(*(eq24_sides(p, k, m, printed) for k, m in pairs), strict=True)
    corrected = [eq24_sides(p, k, m, exact_phi(p))[1] for k, m in pairs]
    return violated(left, right, "uniform attention, L = d_V = 4", corrected=corrected, above=5, at={"X": p.X})
