"""Attention in the letters of Lemma 2: what its second derivatives are made of."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from derivations.attention import AttentionAt
from derivations.attention_point import shuffle
from derivations.composition import GaussNewton
from hessiankit.ledger.autodiff import hessian_of, jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.block_jacobians import misprint, same
from hessiankit.ledger.curvature_gap.notation import dense, eye, kron
from hessiankit.ledger.curvature_gap.point import BlockPoint
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import wrong
from hessiankit.ledger.registry import claim


@claim("curvature-gap/l2-hf", "Lemma 2", "WRONG AS PRINTED", uses=[GaussNewton])
def l2_hf(seed: int) -> Evidence:
    r"""$H_f = (\partial\ell/\partial F\otimes I_{p_iq_i})\,\partial^2F/\partial W_i\partial W_j$ with $\partial\ell/\partial
    F\in\mathbb{R}^{L\times d_V}$

    Correct: $(\mathrm{vec}_r(\partial\ell/\partial F)^\top\otimes I_{n_i})$: the gradient enters as a row, as $R_m$ has it
    """

    def functional(p: BlockPoint) -> Tensor:
        return functional_hessian(p, "Q", "K")

    def product(p: BlockPoint, slope: Tensor) -> Tensor:
        return kron(slope, eye(p.n("Q"))) @ dense(p.at.Phi("Q", "K"))

    return misprint(
        seed,
        lambda p: product(p, p.at.value - p.target),
        lambda p: product(p, (p.at.value - p.target).reshape(1, -1)),
        functional,
        "l = 1/2 ||F - Target||^2, block (Q, K)",
    )


def functional_hessian(p: BlockPoint, i: str, j: str) -> Tensor:
    """Return the Hessian of 1/2 ||F - Target||^2 less J_i^T J_j, by autograd."""
    return p.X.numel() / 2 * p.second("loss of F", i, j) - p.first("F", i).T @ p.first("F", j)


@claim("curvature-gap/s-dim", "Lemma 2", "WRONG AS PRINTED", uses=[shuffle])
def s_dim(seed: int) -> Evidence:
    r"""$S\in\mathbb{R}^{d_V^2\times d_V}$

    Correct: $S\in\mathbb{R}^{d_V^3\times d_V}$
    """
    d = 4
    reference = jacobian_of(lambda x: kron(x, eye(d)), Draw(seed).normal(1, d))
    detail = "rows of S = d(x^T (x) I)/dx at d_V = 4"
    return wrong(float(d**2), float(len(reference)), detail, corrected=float(shuffle(d, d).shape[0]))


@claim("curvature-gap/z_1", "Lemma 2", "HOLDS", uses=[AttentionAt])
def z_1(seed: int) -> Evidence:
    r"""$Z_1 = (I_L\otimes X^\top)\frac{\partial A}{\partial T}(X\otimes X)$, which is
    $\sqrt{d_K}\,\partial(AX)/\partial(W_QW_K^\top)$"""
    return same(seed, lambda p: dense(p.at.Z_1), reference=lambda p: jacobian_of(averaged(p), bilinear(p)))


def bilinear(p: BlockPoint) -> Tensor:
    """Return W_Q W_K^T / sqrt(d_K)."""
    return p.weights["Q"] @ p.weights["K"].T / math.sqrt(p.sizes.d_K)


def averaged(p: BlockPoint) -> Callable[[Tensor], Tensor]:
    """Return A X as a function of W_Q W_K^T / sqrt(d_K)."""
    return lambda W: (p.X @ W @ p.X.T).softmax(1) @ p.X


@claim("curvature-gap/z_2", "Lemma 2", "HOLDS", uses=[AttentionAt])
def z_2(seed: int) -> Evidence:
    r"""$Z_2 = (I_L\otimes X^\top\otimes X^\top\otimes X^\top)\frac{\partial^2A}{\partial T^2}(X\otimes X)$, which is
    $d_K\,\partial^2(AX)/\partial(W_QW_K^\top)^2$

    Correct: with $\partial^2A/\partial T^2$ as $L^4\times L^2$; a block diagonal of $L\times L$ blocks does not conform
    """
    return same(seed, lambda p: dense(p.at.Z_2), reference=lambda p: hessian_of(averaged(p), bilinear(p)))
