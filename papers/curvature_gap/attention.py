"""Attention's second derivatives: Lemma 2, the parts of C.1, and the uniform attention of C.5."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.attention_point import shuffle
from derivations.composition import GaussNewton
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.curvature_gap.attention_problems import global_minimum
from papers.curvature_gap.point import ATTENTION_PAIRS, BlockPoint, BlockSizes, misprint, point, points, same
from papers.drawing import Draw
from papers.evidence import agrees, assumed, relative_error, wrong
from papers.notation import dense, eye, if_it_conforms, kron, spectral, turn
from papers.registry import claim, claims_of


@claim("l2-hf", "Lemma 2", "WRONG AS PRINTED", uses=[GaussNewton])
def l2_hf(seed: int) -> Evidence:
    r"""$H_f = (\partial\ell/\partial F\otimes I_{p_iq_i})\,\partial^2F/\partial W_i\partial W_j$ with $\partial\ell/\partial
    F\in\mathbb{R}^{L\times d_V}$
    Correct: $(\mathrm{vec}_r(\partial\ell/\partial F)^\top\otimes I_{n_i})$: the gradient enters as a row, as $R_m$ has it
    Severity: slip of print"""

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


@claim("s-dim", "Lemma 2", "WRONG AS PRINTED", uses=[shuffle])
def s_dim(seed: int) -> Evidence:
    r"""$S\in\mathbb{R}^{d_V^2\times d_V}$
    Correct: $S\in\mathbb{R}^{d_V^3\times d_V}$
    Severity: slip of print"""
    d = 4
    reference = jacobian_of(lambda x: kron(x, eye(d)), Draw(seed).normal(1, d))
    detail = "rows of S = d(x^T (x) I)/dx at d_V = 4"
    return wrong(float(d**2), float(len(reference)), detail, corrected=float(shuffle(d, d).shape[0]))


@claim("z_1", "Lemma 2", "HOLDS", uses=[AttentionAt])
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


@claim("z_2", "Lemma 2", "HOLDS", uses=[AttentionAt])
def z_2(seed: int) -> Evidence:
    r"""$Z_2 = (I_L\otimes X^\top\otimes X^\top\otimes X^\top)\frac{\partial^2A}{\partial T^2}(X\otimes X)$, which is
    $d_K\,\partial^2(AX)/\partial(W_QW_K^\top)^2$
    Correct: with $\partial^2A/\partial T^2$ as $L^4\times L^2$; a block diagonal of $L\times L$ blocks does not conform"""
    return same(seed, lambda p: dense(p.at.Z_2), reference=lambda p: hessian_of(averaged(p), bilinear(p)))


# Second derivatives of attention: Lemma 2, and the uniform attention of C.5
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


# The blocks
@claim("phi_vv", "Lemma 2", "HOLDS", uses=[AttentionAt.Phi])
def phi_vv(seed: int) -> Evidence:
    r"""$\Phi_{VV} = 0$"""
    return same(seed, lambda p: printed_phi(p, "V", "V"), reference=lambda p: p.second("F", "V", "V"))


claims_of(
    __name__, wrong_phi, "WRONG AS PRINTED", [AttentionAt.Phi],
    ("phi_qq", "Lemma 2", "Q", "Q", r"""
     $\Phi_{QQ} = \frac{2}{Ld_Vd_K}(I_L\otimes W_V^\top\otimes I_{d_V}\otimes W_K^\top)Z_2(I_{d_V}\otimes W_K)$
     Correct: $\frac{1}{d_K}$ in front: the factor $\frac{2}{Ld_V}$ belongs to the loss
     Severity: constant"""),
    ("phi_vq", "Lemma 2", "V", "Q", r"""$\Phi_{VQ} = \frac{2}{Ld_V\sqrt{d_K}}(I_L\otimes S)Z_1(I_{d_V}\otimes W_K)$
     Correct: $\frac{1}{\sqrt{d_K}}$ in front
     Severity: constant
     Follows: phi_qq"""),
    ("phi_qk", "Lemma 2", "Q", "K", r"""
     $\Phi_{QK} = \frac{2}{Ld_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(W_Q\otimes I)K_{d_K,d_V} +
     \frac{2}{Ld_V\sqrt{d_K}}[(I_{d_V}\otimes W_V^\top\otimes I)(Z_1\otimes I)S]\otimes I_{d_K}$, brackets ours
     Correct: $\frac{1}{d_K}(\dots) + \frac{1}{\sqrt{d_K}}[(I_L\otimes W_V^\top\otimes I_{d_V})(Z_1\otimes I_{d_V})S]\otimes
     I_{d_K}$: no loss factor, $I_L$ in place of $I_{d_V}$
     Severity: constant
     Follows: phi_qq"""),
)  # fmt: skip


@claim("phi_qk-lit", "Lemma 2", "WRONG AS PRINTED", uses=[AttentionAt.Phi])
def phi_qk_lit(seed: int) -> Evidence:
    r"""the same without brackets: $(Z_1\otimes I)(S\otimes I_{d_K})$
    Correct: the brackets of the row above
    Severity: slip of print"""
    return misprint(
        seed,
        lambda p: printed_phi(p, "Q", "K", literal=True),
        lambda p: dense(p.at.Phi("Q", "K")),
        lambda p: p.second("F", "Q", "K"),
    )


@claim("phi_qk-f", "Lemma 2", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt.Phi])
def phi_qk_f(seed: int) -> Evidence:
    r"""$\Phi_{QK}$ with only the loss factors repaired
    Needs: $L = d_V$
    Correct: $I_L$ in place of $I_{d_V}$"""
    generic, equal = points(seed)
    narrow = point(seed, BlockSizes(3, 3, 2, 5))  # L = d_V, d_K different
    cases = [equal, narrow]
    holds = agrees(
        [printed_phi(p, "Q", "K", factor=False) for p in cases], [p.second("F", "Q", "K") for p in cases], "L = d_V = 3"
    )
    found = if_it_conforms(partial(printed_phi, factor=False), generic, "Q", "K")
    return assumed(holds, relative_error(found, generic.second("F", "Q", "K")), above=1.0)


@claim("phi_kq", "Lemma 2", "OMITTED", uses=[AttentionAt.Phi])
def phi_kq(seed: int) -> Evidence:
    r"""$\Phi_{KQ}$ is $\Phi_{QK}$ with $W_Q$ and $W_K$ 'swapped and commutation adjusted': where the commutation matrices go
    Correct: exchange the weights and replace $Z_1$ by $Z_1K$, $Z_2$ by $(I\otimes K)Z_2K$, $K = K_{d_V,d_V}$: row softmax does
    not commute with transposition"""

    def exchanged(p: BlockPoint) -> Tensor:
        d_V, d_K = p.sizes.d_V, p.sizes.d_K
        front = kron(eye(p.sizes.L), p.weights["V"].T, eye(d_V), p.weights["Q"].T) @ dense(p.at.Z_2) / d_K
        pull = kron(eye(p.sizes.L), p.weights["V"].T, eye(d_V)) / math.sqrt(d_K)
        bilinear_part = kron(pull @ kron(dense(p.at.Z_1), eye(d_V)) @ dense(p.at.S), eye(d_K))
        return front @ kron(p.weights["K"], eye(d_V)) @ turn(d_K, d_V) + bilinear_part

    return misprint(
        seed, exchanged, lambda p: dense(p.at.Phi("K", "Q")), lambda p: p.second("F", "K", "Q"), "from the corrected Phi_QK"
    )


claims_of(
    __name__, omitted, "OMITTED", [AttentionAt.Phi],
    ("phi_kk", "Lemma 2, needed by Theorem 6", "K", "K", r"""
     $\Phi_{KK} = \frac{1}{d_K}(I_L\otimes W_V^\top\otimes I\otimes W_Q^\top)\tilde Z_2(I\otimes W_Q)$, $\tilde Z_2 =
     (I_{Ld_V}\otimes K)Z_2K$, $K = K_{d_V,d_V}$"""),
    ("phi_vk", "Lemma 2", "V", "K", r"""$\Phi_{VK} = \frac{1}{\sqrt{d_K}}(I_L\otimes S)Z_1(W_Q\otimes I)K_{d_K,d_V}$"""),
    ("phi_qv", "Lemma 2, 'analogous'", "Q", "V", r"""
     $\Phi_{QV} = (I_{Ld_V}\otimes R_Q^\top)(I_L\otimes K_{d_V,L}\otimes I)(\mathrm{vec}_r I_L\otimes
     I_{d_V^2})K_{d_V,d_V}$, $R_Q = \frac{1}{\sqrt{d_K}}Z_1(I\otimes W_K)$"""),
    ("phi_kv", "Lemma 2, 'analogous'", "K", "V", r"""
     $\Phi_{KV}$: the same with $R_K = \frac{1}{\sqrt{d_K}}Z_1(W_Q\otimes I)K_{d_K,d_V}$"""),
)  # fmt: skip


# Uniform attention
@claim("unif-vq-vk", "C.5, 3.3, with Lemma 2", "INCONSISTENT", uses=[AttentionAt.Phi])
def unif_vq_vk(seed: int) -> Evidence:
    r"""uniform attention gives $\Phi_{VQ} = \Phi_{VK} = 0$ (C.5); $\Phi_{VQ}\propto(I_L\otimes S)Z_1(I\otimes W_K)$ (Lemma 2)
    Correct: Lemma 2: $\Phi_{VQ} = \frac{1}{\sqrt{d_K}}(I_L\otimes S)Z_1(I\otimes W_K)$ with $Z_1 = \frac1L(I_L\otimes X^\top
    C_L)(X\otimes X)$ at uniform $A$, not zero"""
    p = point(seed, uniform=True)
    references = [p.second("F", "V", k) for k in "QK"]
    closed, zeros = [dense(p.at.Phi("V", k)) for k in "QK"], [torch.zeros_like(r) for r in references]
    return wrong(zeros, references, "W_Q W_K^T = 0, neither of them zero", corrected=closed)


@claim("unif-qq-kk", "C.5, 3.3", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt.Phi])
def unif_qq_kk(seed: int) -> Evidence:
    r"""uniform attention gives $\Phi_{QQ} = \Phi_{KK} = 0$
    Needs: $L = 2$, where $\partial^2A/\partial T^2 = 0$ at uniform $A$
    Correct: the $\Phi_{QQ}$ and $\Phi_{KK}$ of Lemma 2, corrected"""
    two, three = point(seed, BlockSizes(2, 4, 2, 5), uniform=True), point(seed, uniform=True)
    zeros = [torch.zeros_like(two.second("F", k, k)) for k in "QK"]
    closed = [dense(three.at.Phi(k, k)) for k in "QK"]
    references = [three.second("F", k, k) for k in "QK"]
    holds = agrees([*(two.second("F", k, k) for k in "QK"), *closed], [*zeros, *references], "L = 2; the closed forms at L = 3")
    return assumed(holds, min(relative_error(torch.zeros_like(r), r) for r in references), above=0.99)


# The Hessian of the attention loss: C.1's outer and functional parts
def outer(p: BlockPoint, i: str, j: str) -> Tensor:
    """Return 2/(L d_V) J_i^T J_j by autograd."""
    return 2 / p.X.numel() * p.first("F", i).T @ p.first("F", j)


def functional(p: BlockPoint, i: str, j: str) -> Tensor:
    """Return the rest of the Hessian of the loss by autograd."""
    return p.second("loss of F", i, j) - outer(p, i, j)


def compare(
    seed: int, printed: Callable[[BlockPoint], Tensor], reference: Callable[[BlockPoint, str, str], Tensor], i: str, j: str
) -> Evidence:
    """Compare a printed part of block (i, j) with autograd at generic and at equal sizes."""
    found = [printed(p) for p in points(seed)]
    return agrees(found, [reference(p, i, j) for p in points(seed)], "generic and equal sizes, against autograd")


def right_factor(p: BlockPoint, k: str) -> Tensor:
    """Return I (x) W_K for Q, and (W_Q (x) I) K_{d_K,d_V} for K."""
    _, d_V, d_K, _ = p.sizes
    W = p.weights
    return kron(eye(d_V), W["K"]) if k == "Q" else kron(W["Q"], eye(d_V)) @ turn(d_K, d_V)


def contracted(p: BlockPoint, n: int) -> Tensor:
    """Return R_n = vec_r(F - Target)^T (x) I_n."""
    return kron((p.at.value - p.target).reshape(1, -1), eye(n))


@claim("c1-hf_qq", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_qq(seed: int) -> Evidence:
    r"""$H_f(W_Q,W_Q) = \frac{2}{Ld_Vd_K}R_{d_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(I\otimes W_K)$
    Correct: here the factor $2/(Ld_V)$ is in the right place"""
    return compare(seed, lambda p: contracted(p, p.n("Q")) @ printed_phi(p, "Q", "Q"), functional, "Q", "Q")


@claim("c1-hf_qk", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_qk(seed: int) -> Evidence:
    r"""$H_f(W_Q,W_K) = \frac{2}{Ld_Vd_K}R_{d_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(W_Q\otimes I)K_{d_K,d_V}
    + \frac{2}{Ld_V\sqrt{d_K}}[R_{d_V}(I_L\otimes W_V^\top\otimes I)(Z_1\otimes I)S]\otimes I_{d_K}$
    Correct: with $I_L$, where Lemma 2 has $I_{d_V}$; the brackets are ours"""

    def printed(p: BlockPoint) -> Tensor:
        L, d_V, d_K, _ = p.sizes
        W = p.weights
        front = contracted(p, p.n("Q")) @ kron(eye(L), W["V"].T, eye(d_V), W["K"].T) @ dense(p.at.Z_2)
        pull = contracted(p, d_V) @ kron(eye(L), W["V"].T, eye(d_V)) @ kron(dense(p.at.Z_1), eye(d_V)) @ dense(p.at.S)
        c = 2 / (L * d_V)
        return c / d_K * front @ right_factor(p, "K") + c / math.sqrt(d_K) * kron(pull, eye(d_K))

    return compare(seed, printed, functional, "Q", "K")


@claim("c1-missing", "C.1, before the last step", "OMITTED", uses=[AttentionAt])
def c1_missing(seed: int) -> Evidence:
    r"""$H_o + H_f$ for $(K,K)$ and $(V,K)$, over which the maximum of Theorem 1 has to run
    Correct: the blocks of $Q$ with $W_Q$ and $W_K$ exchanged as in the corrected $\Phi_{KQ}$: they alone contain $\|W_Q\|^2$"""
    p = point(seed)
    row = (p.at.value - p.target).reshape(1, -1)
    found, references = [], []
    for i, j in (("K", "K"), ("V", "K"), ("K", "V")):
        J_i, J_j = dense(p.at.jacobian(f"W_{i}")), dense(p.at.jacobian(f"W_{j}"))
        found.append(2 / p.X.numel() * (J_i.T @ J_j + kron(row, eye(p.n(i))) @ dense(p.at.Phi(i, j))))
        references.append(p.second("loss of F", i, j))
    q = global_minimum(100.0)
    blocks = {i + j: spectral(q.hessian[q._place(i), q._place(j)]) for i, j in ATTENTION_PAIRS}
    largest = max(norm for pair, norm in blocks.items() if pair not in ("KK", "VK", "KV"))
    holds = agrees(found, references, "closed forms of (K, K), (V, K), (K, V) against autograd")
    return assumed(holds, blocks["KK"] / largest if largest else math.inf, above=100)
