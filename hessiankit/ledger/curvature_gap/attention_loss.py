"""The Hessian of the attention loss: C.1's outer and functional parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.composition import gauss_newton
from derivations.loss import MeanSquaredErrorAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.attention_curvature import printed_phi
from hessiankit.ledger.curvature_gap.derivatives import hessian_of
from hessiankit.ledger.curvature_gap.notation import dense, eye, kron, turn
from hessiankit.ledger.curvature_gap.point import ATTENTION_PAIRS, BlockPoint, point, points
from hessiankit.ledger.evidence import agrees
from hessiankit.ledger.registry import claim


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


def logits_outer(p: BlockPoint, k: str) -> Tensor:
    """Return 2/(L d_V d_K)(I (x) W_K^T) Z_1^T (I (x) W_V W_V^T) Z_1 (right factor of k)."""
    L, d_V, d_K, _ = p.sizes
    Z_1, W_V = dense(p.at.Z_1), p.weights["V"]
    left = kron(eye(d_V), p.weights["K"].T) @ Z_1.T @ kron(eye(L), W_V @ W_V.T) @ Z_1
    return 2 / (L * d_V * d_K) * left @ right_factor(p, k)


def contracted(p: BlockPoint, n: int) -> Tensor:
    """Return R_n = vec_r(F - Target)^T (x) I_n."""
    return kron((p.at.value - p.target).reshape(1, -1), eye(n))


@claim("curvature-gap/hessian-split", "Sec. 4.1", "HOLDS", uses=[gauss_newton])
def hessian_split(seed: int) -> Evidence:
    """$H_k(W_i,W_j) = H_o(W_i,W_j) + H_f(W_i,W_j)$ for the attention layer"""
    p = point(seed)
    loss = MeanSquaredErrorAt(p.at.value, p.target)
    found = [dense(gauss_newton(loss, p.at, f"W_{i}", f"W_{j}").total) for i, j in ATTENTION_PAIRS]
    return agrees(found, [p.second("loss of F", i, j) for i, j in ATTENTION_PAIRS], "nine blocks, against autograd")


@claim("curvature-gap/c1-ho_vv", "C.1", "HOLDS", uses=[AttentionAt])
def c1_ho_vv(seed: int) -> Evidence:
    r"""$H_o(W_V,W_V) = \frac{2}{Ld_V}M_1^\top M_1\otimes I_{d_V}$, $M_1 = AX$ (only its norm is printed)"""

    def printed(p: BlockPoint) -> Tensor:
        M_1 = dense(p.at.AX)
        return 2 / p.X.numel() * kron(M_1.T @ M_1, eye(p.sizes.d_V))

    return compare(seed, printed, outer, "V", "V")


@claim("curvature-gap/c1-ho_qq", "C.1", "HOLDS", uses=[AttentionAt])
def c1_ho_qq(seed: int) -> Evidence:
    r"""$H_o(W_Q,W_Q) = \frac{2}{Ld_Vd_K}(I\otimes W_K^\top)Z_1^\top(I_L\otimes W_VW_V^\top)Z_1(I\otimes W_K)$"""
    return compare(seed, lambda p: logits_outer(p, "Q"), outer, "Q", "Q")


@claim("curvature-gap/c1-ho_vq", "C.1", "HOLDS", uses=[AttentionAt])
def c1_ho_vq(seed: int) -> Evidence:
    r"""$H_o(W_V,W_Q) = \frac{2}{Ld_V\sqrt{d_K}}(M_1^\top\otimes W_V^\top)Z_1(I\otimes W_K)$"""

    def printed(p: BlockPoint) -> Tensor:
        front = 2 / (p.X.numel() * math.sqrt(p.sizes.d_K)) * kron(dense(p.at.AX).T, p.weights["V"].T)
        return front @ dense(p.at.Z_1) @ right_factor(p, "Q")

    return compare(seed, printed, outer, "V", "Q")


@claim("curvature-gap/c1-ho_qk", "C.1", "HOLDS", uses=[AttentionAt])
def c1_ho_qk(seed: int) -> Evidence:
    r"""$H_o(W_Q,W_K) = \frac{2}{Ld_Vd_K}(I\otimes W_K^\top)Z_1^\top(I_L\otimes W_VW_V^\top)Z_1(W_Q\otimes I)K_{d_K,d_V}$"""
    return compare(seed, lambda p: logits_outer(p, "K"), outer, "Q", "K")


@claim("curvature-gap/c1-hf_qq", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_qq(seed: int) -> Evidence:
    r"""$H_f(W_Q,W_Q) = \frac{2}{Ld_Vd_K}R_{d_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(I\otimes W_K)$

    Correct: here the factor $2/(Ld_V)$ is in its place
    """
    return compare(seed, lambda p: contracted(p, p.n("Q")) @ printed_phi(p, "Q", "Q"), functional, "Q", "Q")


@claim("curvature-gap/c1-hf_vq", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_vq(seed: int) -> Evidence:
    r"""$H_f(W_V,W_Q) = \frac{2}{Ld_V\sqrt{d_K}}R_{d_V^2}(I_L\otimes S)Z_1(I\otimes W_K)$"""
    return compare(seed, lambda p: contracted(p, p.n("V")) @ printed_phi(p, "V", "Q"), functional, "V", "Q")


@claim("curvature-gap/c1-hf_qk", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_qk(seed: int) -> Evidence:
    r"""$H_f(W_Q,W_K) = \frac{2}{Ld_Vd_K}R_{d_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(W_Q\otimes I)K_{d_K,d_V}
    + \frac{2}{Ld_V\sqrt{d_K}}[R_{d_V}(I_L\otimes W_V^\top\otimes I)(Z_1\otimes I)S]\otimes I_{d_K}$

    Correct: with $I_L$, where Lemma 2 has $I_{d_V}$; the brackets are ours
    """

    def printed(p: BlockPoint) -> Tensor:
        L, d_V, d_K, _ = p.sizes
        W = p.weights
        front = contracted(p, p.n("Q")) @ kron(eye(L), W["V"].T, eye(d_V), W["K"].T) @ dense(p.at.Z_2)
        pull = contracted(p, d_V) @ kron(eye(L), W["V"].T, eye(d_V)) @ kron(dense(p.at.Z_1), eye(d_V)) @ dense(p.at.S)
        c = 2 / (L * d_V)
        return c / d_K * front @ right_factor(p, "K") + c / math.sqrt(d_K) * kron(pull, eye(d_K))

    return compare(seed, printed, functional, "Q", "K")


@claim("curvature-gap/c1-hf_vv", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_vv(seed: int) -> Evidence:
    """$H_f(W_V,W_V) = 0$"""
    p = point(seed)
    whole = p.second("loss of F", "V", "V")
    return agrees(outer(p, "V", "V"), whole, "the outer part is the whole block, by autograd")


@claim("curvature-gap/c1-missing", "C.1, before the last step", "OMITTED", uses=[AttentionAt])
def c1_missing(seed: int) -> Evidence:
    r"""$H_o + H_f$ for $(K,K)$ and $(V,K)$, over which the maximum of Theorem 1 has to run

    Correct: the blocks of $Q$ with $W_Q$ and $W_K$ exchanged as in the corrected $\Phi_{KQ}$: they alone contain $\|W_Q\|^2$
    """
    p = point(seed)
    row = (p.at.value - p.target).reshape(1, -1)
    found, references = [], []
    for i, j in (("K", "K"), ("V", "K"), ("K", "V")):
        J_i, J_j = dense(p.at.jacobian(f"W_{i}")), dense(p.at.jacobian(f"W_{j}"))
        found.append(2 / p.X.numel() * (J_i.T @ J_j + kron(row, eye(p.n(i))) @ dense(p.at.Phi(i, j))))
        references.append(p.second("loss of F", i, j))
    return agrees(found, references, "closed forms, against autograd")


@claim("curvature-gap/c1-mean-over-samples", "Sec. 4.1", "HOLDS", uses=[gauss_newton])
def c1_mean(seed: int) -> Evidence:
    r"""$H^{(k)}(w) = \frac1k\sum_{i=1}^k H_i(w)$"""
    samples = [point(seed + k) for k in range(3)]
    W = samples[0].weights

    def mean_loss(W_V: Tensor) -> Tensor:
        moved = {**W, "V": W_V}
        return torch.stack([p.stage("loss of F", moved) for p in samples]).mean()

    one_by_one = []
    for p in samples:
        at = AttentionAt(p.X, W["Q"], W["K"], W["V"])
        one_by_one.append(dense(gauss_newton(MeanSquaredErrorAt(at.value, p.target), at, "W_V", "W_V").total))
    return agrees(sum(one_by_one) / 3, hessian_of(mean_loss, W["V"]), "block (V, V) of three samples, against autograd")
