"""Row-wise calculus: App. B.1 and B.2."""

from __future__ import annotations

import torch

from derivations.matrix import Dense
from derivations.vecr import (
    kronecker_rule,
    sandwich,
    vec_r,
)
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, kron
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees
from hessiankit.ledger.registry import claim


@claim("curvature-gap/property2", "App. B.1, Property 2", "HOLDS", uses=[sandwich])
def property2(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r(AXB) = (A\otimes B^\top)\,\mathrm{vec}_r(X)$"""
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(sandwich(Dense(A), Dense(B)) @ vec_r(X), vec_r(A @ X @ B))


@claim("curvature-gap/proposition4", "App. B.2, Proposition 4", "HOLDS", uses=[kronecker_rule])
def proposition4(seed: int) -> Evidence:
    r"""$\frac{\partial(A\otimes B)}{\partial X} = (I_n\otimes K_{p,q}\otimes I_r)\left[(\mathrm{vec}_r A\otimes
    I_{pr})\frac{\partial B}{\partial X} + (I_{nq}\otimes\mathrm{vec}_r B)\frac{\partial A}{\partial X}\right]$"""
    X = Draw(seed).normal(2, 3)
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = kronecker_rule(Dense(X.sin()), Dense(dA), Dense(X.T.cos().contiguous()), Dense(dB))
    reference = jacobian_of(lambda X: kron(X.sin(), X.T.cos()), X)
    return agrees(dense(found), reference, "A = sin X, B = cos X^T, against autograd")
