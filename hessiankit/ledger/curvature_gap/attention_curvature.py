"""Second derivatives of attention: Lemma 2, and the uniform attention of C.5."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.block_jacobians import misprint, same
from hessiankit.ledger.curvature_gap.notation import dense, eye, if_it_conforms, kron, turn
from hessiankit.ledger.curvature_gap.point import BlockPoint, BlockSizes, point, points
from hessiankit.ledger.evidence import agrees, assumed, relative_error, wrong
from hessiankit.ledger.registry import claim


def omitted(seed: int, k: str, m: str) -> Evidence:
    """Compare the closed form of Phi_km with autograd at generic and at equal sizes."""
    return same(seed, lambda p: dense(p.at.Phi(k, m)), reference=lambda p: p.second("F", k, m))


def wrong_phi(seed: int, k: str, m: str) -> Evidence:
    """Compare Phi_km as printed with autograd; the closed form is right."""
    return misprint(seed, lambda p: printed_phi(p, k, m), lambda p: dense(p.at.Phi(k, m)), lambda p: p.second("F", k, m))


def printed_phi(p: BlockPoint, k: str, m: str, *, factor: bool = True, literal: bool = False) -> Tensor:
    """Return Phi_VV, Phi_QQ, Phi_VQ or Phi_QK as Lemma 2 prints it.

    Args:
        p: The point.
        k: Which first derivative.
        m: With respect to which weight.
        factor: False leaves out the loss factor 2/(L d_V).
        literal: True reads S (x) I_{d_K} without the brackets that it needs.
    """
    L, d_V, d_K, _ = p.sizes
    c = 2 / (L * d_V) if factor else 1.0
    W_Q, W_K, W_V = (p.weights[i] for i in "QKV")
    Z_1, Z_2, S = dense(p.at.Z_1), dense(p.at.Z_2), dense(p.at.S)
    if (k, m) == ("V", "V"):
        return torch.zeros(L * d_V**3, d_V**2, dtype=p.X.dtype)
    if (k, m) == ("V", "Q"):
        return c / math.sqrt(d_K) * kron(eye(L), S) @ Z_1 @ kron(eye(d_V), W_K)
    front = c / d_K * kron(eye(L), W_V.T, eye(d_V), W_K.T) @ Z_2
    if (k, m) == ("Q", "Q"):
        return front @ kron(eye(d_V), W_K)
    through = front @ kron(W_Q, eye(d_V)) @ turn(d_K, d_V)
    pull = c / math.sqrt(d_K) * kron(eye(d_V), W_V.T, eye(d_V))
    if literal:
        return through + pull @ kron(Z_1, eye(d_V)) @ kron(S, eye(d_K))
    return through + kron(pull @ kron(Z_1, eye(d_V)) @ S, eye(d_K))


# The blocks ------------------------------------------------------------------------------------------------------------


@claim("curvature-gap/phi_vv", "Lemma 2", "HOLDS", uses=[AttentionAt.Phi])
def phi_vv(seed: int) -> Evidence:
    r"""$\Phi_{VV} = 0$"""
    return same(seed, lambda p: printed_phi(p, "V", "V"), reference=lambda p: p.second("F", "V", "V"))


@claim("curvature-gap/phi_qq", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_qq(seed: int) -> Evidence:
    r"""$\Phi_{QQ} = \frac{2}{Ld_Vd_K}(I_L\otimes W_V^\top\otimes I_{d_V}\otimes W_K^\top)Z_2(I_{d_V}\otimes W_K)$

    Correct: $\frac{1}{d_K}$ in front: the factor $\frac{2}{Ld_V}$ belongs to the loss
    """
    return wrong_phi(seed, "Q", "Q")


@claim("curvature-gap/phi_vq", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_vq(seed: int) -> Evidence:
    r"""$\Phi_{VQ} = \frac{2}{Ld_V\sqrt{d_K}}(I_L\otimes S)Z_1(I_{d_V}\otimes W_K)$

    Correct: $\frac{1}{\sqrt{d_K}}$ in front
    """
    return wrong_phi(seed, "V", "Q")


@claim("curvature-gap/phi_qk", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_qk(seed: int) -> Evidence:
    r"""$\Phi_{QK} = \frac{2}{Ld_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(W_Q\otimes I)K_{d_K,d_V} +
    \frac{2}{Ld_V\sqrt{d_K}}[(I_{d_V}\otimes W_V^\top\otimes I)(Z_1\otimes I)S]\otimes I_{d_K}$, brackets ours

    Correct: $\frac{1}{d_K}(\dots) + \frac{1}{\sqrt{d_K}}[(I_L\otimes W_V^\top\otimes I_{d_V})(Z_1\otimes I_{d_V})S]\otimes
    I_{d_K}$: no loss factor, $I_L$ in place of $I_{d_V}$
    """
    return wrong_phi(seed, "Q", "K")


@claim("curvature-gap/phi_qk-lit", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_qk_lit(seed: int) -> Evidence:
    r"""the same without brackets: $(Z_1\otimes I)(S\otimes I_{d_K})$

    Correct: the brackets of the row above
    """
    return misprint(
        seed,
        lambda p: printed_phi(p, "Q", "K", literal=True),
        lambda p: dense(p.at.Phi("Q", "K")),
        lambda p: p.second("F", "Q", "K"),
    )


@claim("curvature-gap/phi_qk-f", "Lemma 2", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt.Phi])
def phi_qk_f(seed: int) -> Evidence:
    r"""$\Phi_{QK}$ with only the loss factors repaired

    Needs: $L = d_V$

    Correct: $I_L$ in place of $I_{d_V}$
    """
    generic, equal = points(seed)
    narrow = point(seed, BlockSizes(3, 3, 2, 5))  # L = d_V, d_K different
    cases = [equal, narrow]
    holds = agrees(
        [printed_phi(p, "Q", "K", factor=False) for p in cases], [p.second("F", "Q", "K") for p in cases], "L = d_V = 3"
    )
    found = if_it_conforms(partial(printed_phi, factor=False), generic, "Q", "K")
    return assumed(holds, relative_error(found, generic.second("F", "Q", "K")), above=1.0)


@claim("curvature-gap/phi_kk", "Lemma 2, needed by Theorem 6", "OMITTED", uses=[AttentionAt.Phi])
def phi_kk(seed: int) -> Evidence:
    r"""$\Phi_{KK} = \frac{1}{d_K}(I_L\otimes W_V^\top\otimes I\otimes W_Q^\top)\tilde Z_2(I\otimes W_Q)$, $\tilde Z_2 =
    (I_{Ld_V}\otimes K)Z_2K$, $K = K_{d_V,d_V}$"""
    return omitted(seed, "K", "K")


@claim("curvature-gap/phi_vk", "Lemma 2", "OMITTED", uses=[AttentionAt.Phi])
def phi_vk(seed: int) -> Evidence:
    r"""$\Phi_{VK} = \frac{1}{\sqrt{d_K}}(I_L\otimes S)Z_1(W_Q\otimes I)K_{d_K,d_V}$"""
    return omitted(seed, "V", "K")


@claim("curvature-gap/phi_kq", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_kq(seed: int) -> Evidence:
    r"""$\Phi_{KQ}$ is $\Phi_{QK}$ with $W_Q$ and $W_K$ exchanged ('commutation adjusted')

    Correct: exchange them and replace $Z_1$ by $Z_1K$, $Z_2$ by $(I\otimes K)Z_2K$, $K = K_{d_V,d_V}$: row softmax does not
    commute with transposition
    """

    def exchanged(p: BlockPoint) -> Tensor:
        d_V, d_K = p.sizes.d_V, p.sizes.d_K
        front = kron(eye(p.sizes.L), p.weights["V"].T, eye(d_V), p.weights["Q"].T) @ dense(p.at.Z_2) / d_K
        pull = kron(eye(p.sizes.L), p.weights["V"].T, eye(d_V)) / math.sqrt(d_K)
        bilinear_part = kron(pull @ kron(dense(p.at.Z_1), eye(d_V)) @ dense(p.at.S), eye(d_K))
        return front @ kron(p.weights["K"], eye(d_V)) @ turn(d_K, d_V) + bilinear_part

    return misprint(
        seed,
        exchanged,
        lambda p: dense(p.at.Phi("K", "Q")),
        lambda p: p.second("F", "K", "Q"),
        "from the corrected Phi_QK",
    )


@claim("curvature-gap/phi_qv", "Lemma 2, 'analogous'", "OMITTED", uses=[AttentionAt.Phi])
def phi_qv(seed: int) -> Evidence:
    r"""$\Phi_{QV} = (I_{Ld_V}\otimes R_Q^\top)(I_L\otimes K_{d_V,L}\otimes I)(\mathrm{vec}_r I_L\otimes
    I_{d_V^2})K_{d_V,d_V}$, $R_Q = \frac{1}{\sqrt{d_K}}Z_1(I\otimes W_K)$"""
    return omitted(seed, "Q", "V")


@claim("curvature-gap/phi_kv", "Lemma 2, 'analogous'", "OMITTED", uses=[AttentionAt.Phi])
def phi_kv(seed: int) -> Evidence:
    r"""$\Phi_{KV}$: the same with $R_K = \frac{1}{\sqrt{d_K}}Z_1(W_Q\otimes I)K_{d_K,d_V}$"""
    return omitted(seed, "K", "V")


# Uniform attention -------------------------------------------------------------------------------------------------------


@claim("curvature-gap/unif-vq-vk", "C.5, 3.3", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def unif_vq_vk(seed: int) -> Evidence:
    r"""uniform attention gives $\Phi_{VQ} = \Phi_{VK} = 0$

    Correct: $\Phi_{VQ} = \frac{1}{\sqrt{d_K}}(I_L\otimes S)Z_1(I\otimes W_K)$ with $Z_1 = \frac1L(I_L\otimes X^\top
    C_L)(X\otimes X)$ at uniform $A$, not zero; Lemma 2 says so too
    """
    p = point(seed, uniform=True)
    references = [p.second("F", "V", k) for k in "QK"]
    closed, zeros = [dense(p.at.Phi("V", k)) for k in "QK"], [torch.zeros_like(r) for r in references]
    return wrong(zeros, references, "W_Q W_K^T = 0, neither of them zero", corrected=closed)


@claim("curvature-gap/unif-qq-kk", "C.5, 3.3", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt.Phi])
def unif_qq_kk(seed: int) -> Evidence:
    r"""uniform attention gives $\Phi_{QQ} = \Phi_{KK} = 0$

    Needs: $L = 2$, where $\partial^2A/\partial T^2 = 0$ at uniform $A$

    Correct: the $\Phi_{QQ}$ and $\Phi_{KK}$ of Lemma 2, corrected
    """
    two, three = point(seed, BlockSizes(2, 4, 2, 5), uniform=True), point(seed, uniform=True)
    zeros = [torch.zeros_like(two.second("F", k, k)) for k in "QK"]
    closed = [dense(three.at.Phi(k, k)) for k in "QK"]
    references = [three.second("F", k, k) for k in "QK"]
    holds = agrees([*(two.second("F", k, k) for k in "QK"), *closed], [*zeros, *references], "L = 2; the closed forms at L = 3")
    return assumed(holds, min(relative_error(torch.zeros_like(r), r) for r in references), above=0.99)
