"""What the paper leaves out: gains, shifts, eps, biases, W_O, masks, heads, other activations and losses, depth."""

from __future__ import annotations

from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.normalization import LayerNormAt, RMSNormAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, spectral
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees
from hessiankit.ledger.registry import claim


@claim("ours/norm-norms", "Closing the Curvature Gap, in place of Lemma 4", "HOLDS", uses=[norm_jacobian_norm, norm_hessian_norm])
def norm_norms(seed: int) -> Evidence:
    r"""$\|J\|_2 = 1/\min_is_i$ and $\|H\|_2 = \max_i\frac{\rho_i}{\sqrt d\,s_i^2}\sqrt{\max(d-2+9(1-\rho_i^2)^2, 2)}$,
    $\rho_i^2 = \|\hat x_i\|^2/d$; for RMSNorm $d - 1$ in place of $d - 2$"""
    draw = Draw(seed)
    found, references = [], []
    for eps in (0.0, 0.3):
        X = draw.normal(3, 5)
        for kind, at in (("layernorm", LayerNormAt(X, eps=eps)), ("rmsnorm", RMSNormAt(X, eps=eps))):
            found += [norm_jacobian_norm(X, eps, norm=kind), norm_hessian_norm(X, eps, norm=kind)]
            references += [spectral(dense(at.jacobian("X"))), spectral(dense(at.hessian("X", "X")))]
    return agrees(found, references, "eps = 0 and 0.3, by singular values of the closed forms")
