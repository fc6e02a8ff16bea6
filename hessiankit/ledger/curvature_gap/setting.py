"""The setting: Secs. 3 and 4.2 up to Theorem 2."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.composition import gauss_newton
from derivations.loss import MeanSquaredErrorAt
from derivations.normalization import LayerNormAt
from hessiankit.ledger.autodiff import hessian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense
from hessiankit.ledger.curvature_gap.point import PAIRS, point
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, relative_error, wrong
from hessiankit.ledger.registry import claim


def printed_statistics(U: Tensor) -> Tensor:
    """Return LayerNorm as Sec. 3 prints it for U of shape m x n: sums over j = 1..m, divided by m."""
    m = U.shape[0]
    first = U[:, :m]
    mean = first.sum(1, keepdim=True) / m
    return (U - mean) / ((first - mean).square().sum(1, keepdim=True) / m).sqrt()


@claim("curvature-gap/sec3-ln", "Sec. 3, below Eq. 2", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt])
def sec3_ln(seed: int) -> Evidence:
    r"""for $U$ of shape $m\times n$: $\mu_i = \frac1m\sum_{j\le m}U_{ij}$, $\sigma_i^2 = \frac1m\sum_{j\le
    m}(U_{ij}-\mu_i)^2$

    Needs: $m = n$

    Correct: the sums run over the $n$ features of a row and are divided by $n$
    """
    draw = Draw(seed)
    square, wide = draw.normal(3, 3), draw.normal(3, 4)
    found = [printed_statistics(square), LayerNormAt(square).value, LayerNormAt(wide).value]
    holds = agrees(found, [F.layer_norm(square, (3,), eps=0.0)] * 2 + [F.layer_norm(wide, (4,), eps=0.0)], "m = n = 3, torch")
    return assumed(holds, relative_error(printed_statistics(wide), F.layer_norm(wide, (4,), eps=0.0)), above=1e-2)


@claim("curvature-gap/sec4.2-gb", "Sec. 4.2, item 2", "WRONG AS PRINTED", uses=[LayerNormAt])
def sec42_gb(seed: int) -> Evidence:
    r"""$\gamma,\beta\in\mathbb{R}^m$, with $m$ the number of rows in Sec. 3

    Correct: $\gamma,\beta\in\mathbb{R}^{d_V}$
    """
    X = Draw(seed).normal(3, 4)
    fits = []
    for n in range(1, 7):
        try:
            F.layer_norm(X, (4,), torch.ones(n, dtype=X.dtype))
        except RuntimeError:
            continue
        fits.append(n)
    detail = "entries of gamma that torch takes for three rows of four features: m as printed, d_V"
    return wrong([float(X.shape[0])], list(map(float, fits)), detail, corrected=[float(X.shape[1])])


@claim("curvature-gap/eq3", "Sec. 3, Eq. 3", "HOLDS", uses=[gauss_newton])
def eq3(seed: int) -> Evidence:
    r"""$\frac{\partial^2 l(f)}{\partial W_i\partial W_j} = J_i^\top l'' J_j + (l'\otimes I_{p_iq_i})\frac{\partial^2
    f}{\partial W_i\partial W_j}$, $l'$ a row"""
    p = point(seed)
    loss = MeanSquaredErrorAt(p.block.Z, p.target)
    found = [dense(gauss_newton(loss, p.block, f"W_{i}", f"W_{j}").total) for i, j in PAIRS]
    return agrees(found, [p.second("loss", i, j) for i, j in PAIRS], "all 25 blocks of the transformer, against autograd")


@claim("curvature-gap/samples", "Sec. 3, empirical loss over 'L = k samples'", "WRONG AS PRINTED", uses=[AttentionAt])
def samples(seed: int) -> Evidence:
    r"""the Hessian over $k$ samples is that of the formulas with $L = k$ rows

    Correct: $L$ is the number of tokens of one sequence; $H^{(k)} = \frac1k\sum_i H_i$ is a mean over sequences
    """
    draw = Draw(seed)
    k, d = 3, 4
    X, W_Q, W_K, W_V = draw.normal(k, 1, d), draw.normal(d, 2), draw.normal(d, 2), draw.normal(d, d)  # k samples of one token

    def one_by_one(W_V: Tensor) -> Tensor:
        return torch.stack([(x @ W_Q @ W_K.T @ x.T / math.sqrt(2)).softmax(1) @ x @ W_V for x in X]).square().mean()

    def rows(W_V: Tensor) -> Tensor:
        x = X[:, 0]
        return ((x @ W_Q @ W_K.T @ x.T / math.sqrt(2)).softmax(1) @ x @ W_V).square().mean()

    by_sample = [dense(AttentionAt(x, W_Q, W_K, W_V).jacobian("W_V")) for x in X]
    mean = sum(2 / d * G.T @ G for G in by_sample) / k
    reference = hessian_of(one_by_one, W_V)
    detail = "three samples of one token, as three rows of one sequence"
    return wrong(hessian_of(rows, W_V), reference, detail, corrected=mean)
