"""Jacobians of a head: the calculus of App. A, Lemmas A.1 and A.2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.matrix import Commutation, Dense
from derivations.normalization import RMSNormAt
from derivations.softmax import SoftmaxAt
from derivations.stage import Stage
from derivations.vecr import sandwich
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, wrong
from papers.hybridnorm.definitions import LETTERS, HeadPoint
from papers.notation import dense, eye, rms_norm
from papers.registry import claim, claims_of


def printed_pre_norm(head: HeadPoint, letter: str) -> Tensor:
    """Return the right side of Eq. 15 (W_O), 16 (W_V), 17 (W_Q) or 18 (W_K)."""
    s, d, d_k = head.sizes
    N = RMSNormAt(head.X).value
    softmax = SoftmaxAt(N @ head.W_Q @ head.W_K.T @ N.T / math.sqrt(d_k), mask=head.mask)
    if letter == "W_O":
        return torch.kron(softmax.value @ N @ head.W_V, eye(d))
    if letter == "W_V":
        return torch.kron(softmax.value @ N, head.W_O.T.contiguous())
    front = torch.kron(eye(s), head.W_O.T @ head.W_V.T @ N.T) @ dense(softmax.jacobian("T"))
    if letter == "W_Q":
        return front @ torch.kron(N, N @ head.W_K) / math.sqrt(d_k)
    return front @ torch.kron(N @ head.W_Q, N) / math.sqrt(d_k) @ dense(Commutation(d_k, d))


def printed_qkv_norm(head: HeadPoint, letter: str, *, power: float = 0.5) -> Tensor:
    """Return the right side of Eq. 22 (W_O), 23 (W_V), 24 (W_Q) or 25 (W_K).

    Args:
        head: The point.
        letter: Which weight.
        power: 1 divides by d_k in place of its root, as two lines of the proof do.
    """
    s, d, d_k = head.sizes
    Q, K, V = (RMSNormAt(head.X @ W) for W in head.weights[:3])
    softmax = SoftmaxAt(Q.value @ K.value.T / math.sqrt(d_k), mask=head.mask)
    inner = torch.kron(head.X, eye(d_k))
    if letter == "W_O":
        return torch.kron(softmax.value @ V.value, eye(d))
    if letter == "W_V":
        return torch.kron(softmax.value, head.W_O.T.contiguous()) @ dense(V.jacobian("X")) @ inner
    front = torch.kron(eye(s), head.W_O.T @ V.value.T) @ dense(softmax.jacobian("T"))
    if letter == "W_Q":
        return front @ torch.kron(eye(s), K.value) / d_k**power @ dense(Q.jacobian("X")) @ inner
    turned = torch.kron(Q.value, eye(s)) / d_k**power @ dense(Commutation(d_k, s))
    return front @ turned @ dense(K.jacobian("X")) @ inner


# Calculus of App. A: the rule of Eq. 14, softmax, the norm, the commutation matrix
@claim("eq14", "App. A.1, Eq. 14", "HOLDS", uses=[sandwich])
def eq14(seed: int) -> Evidence:
    r"""$\partial (AWB)/\partial W = A\otimes B^\top$, row-wise"""
    draw = Draw(seed)
    A, W, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(dense(sandwich(Dense(A), Dense(B))), jacobian_of(lambda W: A @ W @ B, W), "against autograd")


@claim("eq19", "Lemma A.1, Eq. 19", "HOLDS", uses=[SoftmaxAt])
def eq19(seed: int) -> Evidence:
    r"""$\partial A/\partial M = \mathrm{blockdiag}(\mathrm{diag}(A_i) - A_i A_i^\top)$ for $A = \mathrm{softmax}(M)$"""
    M = Draw(seed).normal(3, 4)
    A = M.softmax(1)
    printed = torch.block_diag(*(torch.diag(a) - torch.outer(a, a) for a in A))
    reference = jacobian_of(lambda M: M.softmax(1), M)
    return agrees(
        [printed, dense(SoftmaxAt(M).jacobian("T"))], [reference] * 2, "as printed and the closed form, against autograd"
    )


def printed_norm_jacobian(X: torch.Tensor) -> torch.Tensor:
    """Return the right side of Eqs. 20 and 21: no eps, no gain."""
    blocks = []
    for x in X:
        square = x @ x
        blocks.append(len(x) ** 0.5 / square.sqrt() * (torch.eye(len(x), dtype=x.dtype) - torch.outer(x, x) / square))
    return torch.block_diag(*blocks)


@claim("eq20", "Lemma A.1, Eq. 20", "HOLDS", uses=[RMSNormAt])
def eq20(seed: int) -> Evidence:
    r"""$\frac{\partial X_N}{\partial X} = \mathrm{blockdiag}\left(\frac{\sqrt d}{\|X_i\|}\left(I_d - \frac{X_i
    X_i^\top}{\|X_i\|^2}\right)\right)$"""
    X = Draw(seed).normal(3, 5)
    reference = jacobian_of(rms_norm, X)
    closed = dense(RMSNormAt(X).jacobian("X"))
    return agrees([printed_norm_jacobian(X), closed], [reference] * 2, "as printed and the closed form, against autograd")


@claim("eq21", "Lemma A.1, Eq. 21", "HOLDS", uses=[RMSNormAt])
def eq21(seed: int) -> Evidence:
    """the same for $Q$, $K$, $V$, with $d_k$ in place of $d$"""
    draw = Draw(seed)
    X, W = draw.normal(4, 5), draw.normal(5, 3)
    reference = jacobian_of(lambda W: rms_norm(X @ W), W)
    chained = printed_norm_jacobian(X @ W) @ torch.kron(X, torch.eye(3, dtype=torch.float64))
    return agrees(chained, reference, "through Q = X W_Q, against autograd")


@claim("eq20-eps", "Lemma A.1, Eqs. 20-21, as the models run", "OMITTED", uses=[RMSNormAt])
def eq20_eps(seed: int) -> Evidence:
    r"""the Jacobian of the norm of the experiments, which has $\epsilon > 0$ and a gain
    Correct: $\mathrm{diag}(\alpha)\,\rho^{-1}(I - xx^\top/(d\rho^2))$ with $\rho^2 = \overline{x^2} + \epsilon$"""
    draw = Draw(seed)
    X, gain, eps = draw.normal(3, 5), draw.uniform(5, low=0.5, high=1.5), 1e-2
    reference = jacobian_of(lambda X: rms_norm(X, eps) * gain, X)
    scaled = torch.diag(gain.repeat(3)) @ printed_norm_jacobian(X)  # the gain forgiven, eps not
    return wrong(scaled, reference, "eps = 0.01", corrected=dense(RMSNormAt(X, gamma=gain, eps=eps).jacobian("X")))


# Lemmas A.1 and A.2: the Jacobians of a head
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


claims_of(
    __name__, pre_norm_jacobian, "HOLDS", [AttentionAt.jacobian],
    ("eq17", "Lemma A.1, Eq. 17", "W_Q", r"""
     $\frac{\partial S}{\partial W_Q} = (I_s\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial
     M}\frac{X_N\otimes X_N W_K}{\sqrt{d_k}}$"""),
    ("eq18", "Lemma A.1, Eq. 18", "W_K", r"""
     $\frac{\partial S}{\partial W_K} = (I_s\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial M}\frac{X_N
     W_Q\otimes X_N}{\sqrt{d_k}} K_{d_k,d}$"""),
)  # fmt: skip


claims_of(
    __name__, qkv_norm_jacobian, "HOLDS", [Stage.jacobian],
    ("eq22", "Lemma A.2, Eq. 22", "W_O", r"""$\partial S_N/\partial W_O = A_N V_N\otimes I_d$"""),
    ("eq23", "Lemma A.2, Eq. 23", "W_V", r"""
     $\frac{\partial S_N}{\partial W_V} = (A_N\otimes W_O^\top)\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})$"""),
    ("eq24", "Lemma A.2, Eq. 24", "W_Q", r"""
     $\frac{\partial S_N}{\partial W_Q} = (I_s\otimes W_O^\top V_N^\top)\frac{\partial A_N}{\partial M_N}\frac{I_s\otimes
     K_N}{\sqrt{d_k}}\frac{\partial Q_N}{\partial Q}(X\otimes I_{d_k})$"""),
    ("eq25", "Lemma A.2, Eq. 25", "W_K", r"""
     $\frac{\partial S_N}{\partial W_K} = (I_s\otimes W_O^\top V_N^\top)\frac{\partial A_N}{\partial M_N}\frac{Q_N\otimes
     I_s}{\sqrt{d_k}} K_{d_k,s}\frac{\partial K_N}{\partial K}(X\otimes I_{d_k})$"""),
)  # fmt: skip


@claim("lemma-a2-caption", "Lemma A.2, first line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_caption(seed: int) -> Evidence:
    """the gradients of the attention with QKV-Norm 'defined in Eq. (12)'
    Correct: Eq. 13; Eq. 12 is the attention with Pre-Norm
    Severity: slip of print"""
    head = HeadPoint.draw(Draw(seed))
    of_12 = jacobian_of(head.pre_norm, head.X, *head.weights, wrt=3)
    of_13 = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=3)
    lemma = printed_qkv_norm(head, "W_V")
    return wrong(of_12, lemma, "dS/dW_V of Eq. 12 and of Eq. 13 against Eq. 23", corrected=of_13)


@claim("lemma-a2-proof-sqrt-q", "Proof of Lemma A.2, W_Q, third line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_q(seed: int) -> Evidence:
    r"""$\ldots\frac{I_s\otimes K_N}{d_k}\ldots$
    Correct: divided by $\sqrt{d_k}$, as in Eq. 24
    Severity: slip of print"""
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=1)
    return wrong(printed_qkv_norm(head, "W_Q", power=1), reference, "d_k = 3", corrected=printed_qkv_norm(head, "W_Q"), above=0.4)


@claim("lemma-a2-proof-sqrt-k", "Proof of Lemma A.2, W_K, second line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_k(seed: int) -> Evidence:
    r"""$\ldots\frac{Q_N\otimes I_s}{d_k}\ldots$
    Correct: divided by $\sqrt{d_k}$, as in Eq. 25
    Severity: slip of print
    Follows: lemma-a2-proof-sqrt-q"""
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=2)
    return wrong(printed_qkv_norm(head, "W_K", power=1), reference, "d_k = 3", corrected=printed_qkv_norm(head, "W_K"), above=0.4)


@claim("lemma-a2-proof-a", "Proof of Lemma A.2, W_V, second line", "WRONG AS PRINTED", uses=[Stage.jacobian])
def lemma_a2_proof_a(seed: int) -> Evidence:
    r"""$(A\otimes W_O^\top)\frac{\partial V_N}{\partial V}(X\otimes I_{d_k})$
    Correct: $A_N$ for $A$, which is the attention of Eq. 12
    Severity: slip of print"""
    head = HeadPoint.draw(Draw(seed))
    reference = jacobian_of(head.qkv_norm, head.X, *head.weights, wrt=3)
    inner = dense(RMSNormAt(head.X @ head.W_V).jacobian("X")) @ torch.kron(head.X, torch.eye(3, dtype=torch.float64))
    printed = torch.kron(head.closed_pre_norm.A, head.W_O.T.contiguous()) @ inner
    return wrong(printed, reference, "with the A of Eq. 12", corrected=printed_qkv_norm(head, "W_V"))
