"""Facts that the proof of Theorem A.3 rests on."""

from __future__ import annotations

import torch

from derivations.bounds import row_stochastic_norm_bound, softmax_jacobian_bound
from derivations.matrix import Dense, Identity, Kronecker, kron
from derivations.normalization import RMSNormAt
from derivations.norms import kronecker_norm, product_norm_bound
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, bounded
from hessiankit.ledger.hybridnorm.jacobians import dense
from hessiankit.ledger.registry import claim


def _four(seed: int) -> tuple[torch.Tensor, ...]:
    draw = Draw(seed)
    return draw.normal(3, 3), draw.normal(4, 4), draw.normal(3, 3), draw.normal(4, 4)


@claim("hybridnorm/fact-kron-trace", "Proof of Theorem A.3, fact 1", "HOLDS", uses=[Kronecker])
def fact_trace(seed: int) -> Evidence:
    r"""$\mathrm{tr}(B\otimes C) = \mathrm{tr}(B)\,\mathrm{tr}(C)$"""
    B, C, _, _ = _four(seed)
    return agrees(dense(kron(Dense(B), Dense(C))).trace(), B.trace() * C.trace())


@claim("hybridnorm/fact-kron-product", "Proof of Theorem A.3, fact 2", "HOLDS", uses=[Kronecker])
def fact_product(seed: int) -> Evidence:
    r"""$(B\otimes C)(D\otimes E) = BD\otimes CE$"""
    B, C, D, E = _four(seed)
    return agrees(dense(kron(Dense(B), Dense(C)) @ kron(Dense(D), Dense(E))), torch.kron(B @ D, C @ E))


@claim("hybridnorm/fact-kron-frobenius", "Proof of Theorem A.3, fact 3", "HOLDS", uses=[Kronecker])
def fact_frobenius(seed: int) -> Evidence:
    r"""$\|B\otimes C\|_F = \|B\|_F\|C\|_F$"""
    B, C, _, _ = _four(seed)
    return agrees(dense(kron(Dense(B), Dense(C))).norm(), B.norm() * C.norm())


@claim("hybridnorm/fact-kron-spectral", "Proof of Theorem A.3, fact 4", "HOLDS", uses=[kronecker_norm])
def fact_spectral(seed: int) -> Evidence:
    r"""$\|B\otimes C\|_2 = \|B\|_2\|C\|_2$"""
    B, C, _, _ = _four(seed)
    return agrees(kronecker_norm(Dense(B), Dense(C)), torch.linalg.matrix_norm(torch.kron(B, C), 2))


@claim("hybridnorm/fact-product-spectral", "Proof of Theorem A.3, fact 5", "HOLDS", uses=[product_norm_bound])
def fact_submultiplicative(seed: int) -> Evidence:
    r"""$\|BC\|_2\le\|B\|_2\|C\|_2$"""
    draw = Draw(seed)
    ratios = []
    for _ in range(50):
        B, C = draw.normal(3, 4), draw.normal(4, 5)
        ratios.append(float(torch.linalg.matrix_norm(B @ C, 2)) / product_norm_bound(Dense(B), Dense(C)))
    aligned = product_norm_bound(Dense(torch.eye(3)), Identity(3))
    return bounded([*ratios, 1.0 / aligned], "50 pairs, attained at B = C = I", attained=1 - 1e-12)


@claim("hybridnorm/fact-product-frobenius", "Proof of Theorem A.3, fact 6", "HOLDS")
def fact_mixed(seed: int) -> Evidence:
    r"""$\|BC\|_F\le\|B\|_2\|C\|_F\le\|B\|_F\|C\|_F$"""
    draw = Draw(seed)
    ratios = []
    for _ in range(50):
        B, C = draw.normal(3, 4), draw.normal(4, 5)
        left, middle, right = (B @ C).norm(), torch.linalg.matrix_norm(B, 2) * C.norm(), B.norm() * C.norm()
        ratios += [float(left / middle), float(middle / right)]
    return bounded(ratios, "50 pairs")


@claim("hybridnorm/fact-softmax-half", "Proof of Theorem A.3, fact 7", "HOLDS UNDER ASSUMPTION", uses=[softmax_jacobian_bound])
def fact_half(seed: int) -> Evidence:
    r"""$p_i\ge 0$ and $\sum_i p_i$ [nothing follows in print] give $\|\mathrm{diag}(p) - pp^\top\|_2\le 1/2$

    Needs: $\sum_i p_i = 1$
    """

    def norm(p: torch.Tensor) -> float:
        return float(torch.linalg.matrix_norm(torch.diag(p) - torch.outer(p, p), 2))

    draw = Draw(seed)
    ratios = [norm(draw.probabilities(5)) / softmax_jacobian_bound() for _ in range(200)]
    half = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    holds = bounded([*ratios, norm(half) / 0.5], "200 draws, attained at (1/2, 1/2, 0)", attained=1 - 1e-12)
    return assumed(holds, norm(torch.tensor([10.0, 0.0], dtype=torch.float64)) / 0.5, above=100)


@claim("hybridnorm/fact-stochastic", "Proof of Theorem A.3, fact 8", "HOLDS", uses=[row_stochastic_norm_bound])
def fact_stochastic(seed: int) -> Evidence:
    r"""$\|A\|_2\le\|A\|_F\le\sqrt s$ for a stochastic $s\times s$ matrix $A$"""
    draw = Draw(seed)
    matrices = [draw.probabilities(4, 4) for _ in range(100)]
    matrices.append(torch.eye(4, dtype=torch.float64)[[0, 0, 0, 0]])  # all rows on one column
    spectral = [float(torch.linalg.matrix_norm(A, 2) / A.norm()) for A in matrices]
    frobenius = [float(A.norm()) / row_stochastic_norm_bound(4) for A in matrices]
    return bounded([*spectral, *frobenius], "100 draws, attained where all rows are on one column", attained=1 - 1e-12)


@claim("hybridnorm/fact-normed-frobenius", "Proof of Theorem A.3, fact 9", "HOLDS UNDER ASSUMPTION", uses=[RMSNormAt])
def fact_normed(seed: int) -> Evidence:
    r"""$\|X_N\|_F = \sqrt{sd}$

    Needs: $\epsilon = 0$ and no zero row; with $\epsilon > 0$ it is smaller
    """
    X = Draw(seed).normal(4, 5)
    holds = agrees(RMSNormAt(X).value.norm(), 20**0.5, "eps = 0")
    return assumed(holds, abs(float(RMSNormAt(X, eps=0.1).value.norm()) / 20**0.5 - 1), above=1e-3)
