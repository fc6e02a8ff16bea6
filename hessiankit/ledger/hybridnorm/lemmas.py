"""Lemmas A.1 and A.2: the Jacobians of a head."""

from __future__ import annotations

import torch

from derivations.attention import AttentionAt
from derivations.normalization import RMSNormAt
from derivations.stage import Stage
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, wrong
from hessiankit.ledger.hybridnorm.definitions import LETTERS, HeadPoint
from hessiankit.ledger.hybridnorm.jacobians import dense, printed_pre_norm, printed_qkv_norm
from hessiankit.ledger.registry import claim

DETAIL = "the printed matrix, the closed form and autograd"


def pre_norm_jacobian(seed: int, letter: str, *, causal: bool = False) -> Evidence:
    """Compare Lemma A.1 as printed, the attention chapter and automatic differentiation."""
    head = HeadPoint.draw(Draw(seed), causal=causal)
    reference = jacobian_of(head.pre_norm, head.X, *head.weights, wrt=1 + LETTERS.index(letter))
    closed = dense(head.closed_pre_norm.jacobian(letter))
    return agrees([printed_pre_norm(head, letter), closed], [reference, reference], DETAIL)


def qkv_norm_jacobian(seed: int, letter: str, *, causal: bool = False) -> Evidence:
    """Compare Lemma A.2 as printed, the composition of the chapters and automatic differentiation."""
    head = HeadPoint.draw(Draw(seed), causal=causal)
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=1 + LETTERS.index(letter))
    closed = dense(head.closed_qkv_norm.jacobian(letter))
    return agrees([printed_qkv_norm(head, letter), closed], [reference, reference], DETAIL)


@claim("hybridnorm/eq17", "Lemma A.1, Eq. 17", "HOLDS", uses=[AttentionAt.jacobian])
def eq17(seed: int) -> Evidence:
    r"""$\frac{\partial S}{\partial W_Q} = (I_s\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial
    M}\frac{X_N\otimes X_N W_K}{\sqrt{d_k}}$"""
    return pre_norm_jacobian(seed, "W_Q")


@claim("hybridnorm/eq18", "Lemma A.1, Eq. 18", "HOLDS", uses=[AttentionAt.jacobian])
def eq18(seed: int) -> Evidence:
    r"""$\frac{\partial S}{\partial W_K} = (I_s\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial M}\frac{X_N
    W_Q\otimes X_N}{\sqrt{d_k}} K_{d_k,d}$"""
    return pre_norm_jacobian(seed, "W_K")


@claim("hybridnorm/eq22", "Lemma A.2, Eq. 22", "HOLDS", uses=[Stage.jacobian])
def eq22(seed: int) -> Evidence:
    r"""$\partial S_N/\partial W_O = A_N V_N\otimes I_d$"""
    return qkv_norm_jacobian(seed, "W_O")


@claim("hybridnorm/eq23", "Lemma A.2, Eq. 23", "HOLDS", uses=[Stage.jacobian])
def eq23(seed: int) -> Evidence:
    r"""$\frac{\partial S_N}{\partial W_V} = (A_N\otimes W_O^\top)\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})$"""
    return qkv_norm_jacobian(seed, "W_V")


@claim("hybridnorm/eq24", "Lemma A.2, Eq. 24", "HOLDS", uses=[Stage.jacobian])
def eq24(seed: int) -> Evidence:
    r"""$\frac{\partial S_N}{\partial W_Q} = (I_s\otimes W_O^\top V_N^\top)\frac{\partial A_N}{\partial M_N}\frac{I_s\otimes
    K_N}{\sqrt{d_k}}\frac{\partial Q_N}{\partial Q}(X\otimes I_{d_k})$"""
    return qkv_norm_jacobian(seed, "W_Q")


@claim("hybridnorm/eq25", "Lemma A.2, Eq. 25", "HOLDS", uses=[Stage.jacobian])
def eq25(seed: int) -> Evidence:
    r"""$\frac{\partial S_N}{\partial W_K} = (I_s\otimes W_O^\top V_N^\top)\frac{\partial A_N}{\partial M_N}\frac{Q_N\otimes
    I_s}{\sqrt{d_k}} K_{d_k,s}\frac{\partial K_N}{\partial K}(X\otimes I_{d_k})$"""
    return qkv_norm_jacobian(seed, "W_K")


@claim("hybridnorm/lemma-a2-caption", "Lemma A.2, first line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_caption(seed: int) -> Evidence:
    """the gradients of the attention with QKV-Norm 'defined in Eq. (12)'

    Correct: Eq. 13; Eq. 12 is the attention with Pre-Norm
    """
    head = HeadPoint.draw(Draw(seed))
    of_12 = jacobian_of(head.pre_norm, head.X, *head.weights, wrt=3)
    of_13 = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=3)
    lemma = printed_qkv_norm(head, "W_V")
    return wrong(of_12, lemma, "dS/dW_V of Eq. 12 and of Eq. 13 against Eq. 23", corrected=of_13)


@claim("hybridnorm/lemma-a2-proof-sqrt-q", "Proof of Lemma A.2, W_Q, third line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_q(seed: int) -> Evidence:
    r"""$\ldots\frac{I_s\otimes K_N}{d_k}\ldots$

    Correct: divided by $\sqrt{d_k}$, as in Eq. 24
    """
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=1)
    return wrong(printed_qkv_norm(head, "W_Q", power=1), reference, "d_k = 3", corrected=printed_qkv_norm(head, "W_Q"), above=0.4)


@claim("hybridnorm/lemma-a2-proof-sqrt-k", "Proof of Lemma A.2, W_K, second line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_k(seed: int) -> Evidence:
    r"""$\ldots\frac{Q_N\otimes I_s}{d_k}\ldots$

    Correct: divided by $\sqrt{d_k}$, as in Eq. 25
    """
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=2)
    return wrong(printed_qkv_norm(head, "W_K", power=1), reference, "d_k = 3", corrected=printed_qkv_norm(head, "W_K"), above=0.4)


@claim("hybridnorm/lemma-a2-proof-a", "Proof of Lemma A.2, W_V, second line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_a(seed: int) -> Evidence:
    r"""$(A\otimes W_O^\top)\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})$

    Correct: $A_N$ for $A$, which is the attention of Eq. 12
    """
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=3)
    inner = dense(RMSNormAt(head.X @ head.W_V).jacobian("X")) @ torch.kron(head.X, torch.eye(3, dtype=torch.float64))
    printed = torch.kron(head.closed_pre_norm.A, head.W_O.T.contiguous()) @ inner
    return wrong(printed, reference, "with the A of Eq. 12", corrected=printed_qkv_norm(head, "W_V"))
