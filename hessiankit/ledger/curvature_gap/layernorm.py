"""LayerNorm's Jacobian: Theorems 2 and 8."""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.layernorm_theorems import LayerNormTheorems, theorem2_jacobian
from derivations.normalization import LayerNormAt
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, eye, if_it_conforms, kron, ones
from hessiankit.ledger.curvature_gap.point import layer_norm
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, relative_error
from hessiankit.ledger.registry import claim

GENERIC, EQUAL = (3, 4), (3, 3)
"""L x d_V."""


def centred(X: Tensor) -> Tensor:
    """Return M."""
    return X - X.mean(1, keepdim=True)


def scales(X: Tensor) -> Tensor:
    """Return sigma, a column."""
    return centred(X).square().mean(1, keepdim=True).sqrt()


def inverse_scales(X: Tensor) -> Tensor:
    """Return P."""
    return torch.diag(1 / scales(X)[:, 0])


def tokens(seed: int, shape: tuple[int, int] = GENERIC) -> Tensor:
    """Return the X of a seed."""
    return Draw(seed).normal(*shape)


@claim("curvature-gap/thm2", "Theorem 2; C.2", "HOLDS", uses=[theorem2_jacobian, LayerNormAt])
def thm2(seed: int) -> Evidence:
    r"""$\partial\mathrm{LN}/\partial X = (P\otimes I_{d_V})(I_{Ld_V} - \frac{1}{d_V}(I_L\otimes 1_{d_V\times d_V})) +
    (I_L\otimes M^\top)\,\partial P/\partial X$

    Correct: shorter: $(P\otimes I)(I_L\otimes C - \frac{1}{d_V}VV^\top)$, $V = \mathrm{blockdiag}(\hat x_i)$
    """
    X = tokens(seed)
    L, d = X.shape
    P, dP = inverse_scales(X), jacobian_of(inverse_scales, X)
    printed = kron(P, eye(d)) @ (eye(L * d) - kron(eye(L), ones(d, d)) / d) + kron(eye(L), centred(X).T) @ dP
    closed = [dense(theorem2_jacobian(X)), dense(LayerNormAt(X).jacobian("X"))]
    return agrees([printed, *closed], [jacobian_of(layer_norm, X)] * 3, "as printed, Theorem 8 expanded, the shorter form")


@claim("curvature-gap/thm8-dp", "Theorem 8", "HOLDS", uses=[LayerNormTheorems])
def thm8_dp(seed: int) -> Evidence:
    r"""$\frac{\partial P}{\partial X} = \frac{1}{\sqrt{d_V}}(-D^{-1}\otimes
    D^{-\top})E\,[\mathrm{diag}^{-1}(\mathrm{vec}_r^{1/2}(M^{\circ 2}1))(I_L\otimes 1^\top)\mathrm{diag}(\mathrm{vec}_r
    M)\frac{\partial M}{\partial X}]$"""
    X = tokens(seed)
    return agrees(dense(LayerNormTheorems(X).dP), jacobian_of(inverse_scales, X), "against autograd")


@claim("curvature-gap/thm8-tau", "C.2, proof", "HOLDS UNDER ASSUMPTION", uses=[LayerNormTheorems])
def thm8_tau(seed: int) -> Evidence:
    r"""$\tau = Q\,1_L$ with $Q = M^{\circ 2}$

    Needs: $L = d_V$; the next line has $1_{d_V}$

    Correct: $\tau = Q\,1_{d_V}$
    """
    square, wide = tokens(seed, EQUAL), tokens(seed)

    def printed(X: Tensor) -> Tensor:
        return centred(X).square() @ ones(X.shape[0])

    references = [3 * scales(square).square(), 4 * scales(wide).square()]
    holds = agrees([printed(square), LayerNormTheorems(wide).norms ** 2], references, "L = d_V = 3; corrected at L = 3, d_V = 4")
    return assumed(holds, relative_error(if_it_conforms(printed, wide), references[1]), above=1.0)
