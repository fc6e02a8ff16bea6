"""Calculus of App. A: the rule of Eq. 14, softmax, the norm, the commutation matrix."""

from __future__ import annotations

import torch

from derivations.matrix import Dense
from derivations.normalization import RMSNormAt
from derivations.softmax import SoftmaxAt
from derivations.vecr import sandwich
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, wrong
from hessiankit.ledger.hybridnorm.definitions import rms_norm
from hessiankit.ledger.hybridnorm.jacobians import dense
from hessiankit.ledger.registry import claim


@claim("hybridnorm/eq14", "App. A.1, Eq. 14", "HOLDS", uses=[sandwich])
def eq14(seed: int) -> Evidence:
    r"""$\partial (AWB)/\partial W = A\otimes B^\top$, row-wise"""
    draw = Draw(seed)
    A, W, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(dense(sandwich(Dense(A), Dense(B))), jacobian_of(lambda W: A @ W @ B, W), "against autograd")


@claim("hybridnorm/eq19", "Lemma A.1, Eq. 19", "HOLDS", uses=[SoftmaxAt])
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


@claim("hybridnorm/eq20", "Lemma A.1, Eq. 20", "HOLDS", uses=[RMSNormAt])
def eq20(seed: int) -> Evidence:
    r"""$\frac{\partial X_N}{\partial X} = \mathrm{blockdiag}\left(\frac{\sqrt d}{\|X_i\|}\left(I_d - \frac{X_i
    X_i^\top}{\|X_i\|^2}\right)\right)$"""
    X = Draw(seed).normal(3, 5)
    reference = jacobian_of(rms_norm, X)
    closed = dense(RMSNormAt(X).jacobian("X"))
    return agrees([printed_norm_jacobian(X), closed], [reference] * 2, "as printed and the closed form, against autograd")


@claim("hybridnorm/eq21", "Lemma A.1, Eq. 21", "HOLDS", uses=[RMSNormAt])
def eq21(seed: int) -> Evidence:
    """the same for $Q$, $K$, $V$, with $d_k$ in place of $d$"""
    draw = Draw(seed)
    X, W = draw.normal(4, 5), draw.normal(5, 3)
    reference = jacobian_of(lambda W: rms_norm(X @ W), W)
    chained = printed_norm_jacobian(X @ W) @ torch.kron(X, torch.eye(3, dtype=torch.float64))
    return agrees(chained, reference, "through Q = X W_Q, against autograd")


@claim("hybridnorm/eq20-eps", "Lemma A.1, Eqs. 20-21, as the models run", "WRONG AS PRINTED", uses=[RMSNormAt])
def eq20_eps(seed: int) -> Evidence:
    r"""Eqs. 20 and 21 are the Jacobians of the norm of the experiments, which has $\epsilon > 0$ and a gain

    Correct: $\mathrm{diag}(\alpha)\,\rho^{-1}(I - xx^\top/(d\rho^2))$ with $\rho^2 = \overline{x^2} + \epsilon$
    """
    draw = Draw(seed)
    X, gain, eps = draw.normal(3, 5), draw.uniform(5, low=0.5, high=1.5), 1e-2
    reference = jacobian_of(lambda X: rms_norm(X, eps) * gain, X)
    scaled = torch.diag(gain.repeat(3)) @ printed_norm_jacobian(X)  # the gain forgiven, eps not
    return wrong(scaled, reference, "eps = 0.01", corrected=dense(RMSNormAt(X, gamma=gain, eps=eps).jacobian("X")))
