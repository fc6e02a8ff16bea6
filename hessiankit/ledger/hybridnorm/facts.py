"""Facts that the proof of Theorem A.3 rests on."""

from __future__ import annotations

import torch

from derivations.bounds import softmax_jacobian_bound
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import assumed, bounded
from hessiankit.ledger.registry import claim


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
