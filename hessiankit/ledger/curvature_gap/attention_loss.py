"""The Hessian of the attention loss: C.1's outer and functional parts."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from derivations.attention import AttentionAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.attention_curvature import printed_phi
from hessiankit.ledger.curvature_gap.attention_problems import global_minimum
from hessiankit.ledger.curvature_gap.notation import dense, eye, kron, spectral, turn
from hessiankit.ledger.curvature_gap.point import ATTENTION_PAIRS, BlockPoint, point, points
from hessiankit.ledger.evidence import agrees, assumed
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


def contracted(p: BlockPoint, n: int) -> Tensor:
    """Return R_n = vec_r(F - Target)^T (x) I_n."""
    return kron((p.at.value - p.target).reshape(1, -1), eye(n))


@claim("curvature-gap/c1-hf_qq", "C.1", "HOLDS", uses=[AttentionAt.Phi])
def c1_hf_qq(seed: int) -> Evidence:
    r"""$H_f(W_Q,W_Q) = \frac{2}{Ld_Vd_K}R_{d_Vd_K}(I_L\otimes W_V^\top\otimes I\otimes W_K^\top)Z_2(I\otimes W_K)$

    Correct: here the factor $2/(Ld_V)$ is in its place
    """
    return compare(seed, lambda p: contracted(p, p.n("Q")) @ printed_phi(p, "Q", "Q"), functional, "Q", "Q")


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
    q = global_minimum(100.0)
    blocks = {i + j: spectral(q.hessian[q._place(i), q._place(j)]) for i, j in ATTENTION_PAIRS}
    largest = max(norm for pair, norm in blocks.items() if pair not in ("KK", "VK", "KV"))
    holds = agrees(found, references, "closed forms of (K, K), (V, K), (K, V) against autograd")
    return assumed(holds, blocks["KK"] / largest if largest else math.inf, above=100)
