"""Figures and tables: what a small computation can say of them, and what would have to be trained."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.convergence import running_means
from hessiankit.ledger.curvature_gap.point import layer_norm
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import measured
from hessiankit.ledger.registry import claim


def slope(differences: Tensor, start: int = 10) -> float:
    """Return the slope of log |L_{k+1} - L_k| over log k from k = start on."""
    k = torch.arange(1, len(differences) + 1, dtype=differences.dtype)[start:].log()
    y = differences[start:].log()
    k, y = k - k.mean(), y - y.mean()
    return float(k @ y / (k @ k))


def average_differences(losses: Tensor, orders: int, draw: Draw) -> Tensor:
    """Return |L_{k+1} - L_k| averaged over orders of the samples."""
    shuffled = [losses[torch.randperm(len(losses), generator=draw.generator)] for _ in range(orders)]
    return torch.stack([running_means(x).diff().abs() for x in shuffled]).mean(0)


@claim("curvature-gap/fig6-slope", "Fig. 6", "REPRODUCED")
def fig6_slope(seed: int) -> Evidence:
    r"""$|\mathcal{L}_{k+1}(w) - \mathcal{L}_k(w)|$ falls as $1/k$: slope $-1$ in log-log scale"""
    draw = Draw(seed)
    tokens, W, target = draw.normal(600, 1, 4), draw.normal(4, 4), draw.normal(600, 1, 4)
    losses = torch.stack([(layer_norm(x @ W) - t).square().mean() for x, t in zip(tokens, target, strict=True)])
    found = slope(average_differences(losses, 40, draw))
    return measured(found, abs(found + 1) < 0.1, "600 samples, one LayerNorm of random weights, 40 orders of the samples")


@claim("curvature-gap/fig6-evidence", "Fig. 6 and Sec. 6", "NOT REPRODUCED")
def fig6_evidence(seed: int) -> Evidence:
    """the log-log trend of Fig. 6 supports Theorem 7 and a local geometry of the Transformer that settles"""
    draw = Draw(seed)
    found = slope(average_differences(draw.uniform(600), 40, draw))
    detail = (
        "the same slope for 600 uniform random numbers, without any model; the protocol has w = w*, where the Hessian term is 0"
    )
    return measured(found, abs(found + 1) < 0.1, detail)
