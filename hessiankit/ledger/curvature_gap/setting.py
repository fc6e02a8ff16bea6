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
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.derivatives import hessian_of, jacobian_of
from hessiankit.ledger.curvature_gap.notation import dense, eye
from hessiankit.ledger.curvature_gap.point import PAIRS, point
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, false, off, relative_error
from hessiankit.ledger.registry import claim


@claim("curvature-gap/eq1", "Sec. 3, Eq. 1", "HOLDS", uses=[AttentionAt])
def eq1(seed: int) -> Evidence:
    r"""$F(X) = \mathrm{softmax}(XW_QW_K^\top X^\top/\sqrt{d_K})\,XW_V$"""
    p = point(seed)
    Q, K, V = (p.X @ p.weights[i] for i in ("Q", "K", "V"))
    reference = F.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
    return agrees(p.at.value, reference, "the closed form against torch's fused attention")


@claim("curvature-gap/eq2", "Sec. 3, Eq. 2; Sec. 4.2, Eqs. 4-5", "HOLDS", uses=[PostNormBlockAt])
def eq2(seed: int) -> Evidence:
    r"""the block: $Y = \mathrm{LN}(X + F(X))$, $Z = \mathrm{LN}(Y + \mathrm{FFN}(Y))$"""
    p = point(seed)
    W, d = p.weights, p.sizes.d_V
    layer = torch.nn.TransformerEncoderLayer(d, 1, p.sizes.d_ff, 0.0, batch_first=True, bias=False, layer_norm_eps=0.0)
    layer = layer.double()
    square = Draw(seed)
    W_Q, W_K = square.normal(d, d), square.normal(d, d)  # torch's layer has d_K = d_V
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([W_Q.T, W_K.T, W["V"].T]))
        layer.self_attn.out_proj.weight.copy_(eye(d))
        layer.linear1.weight.copy_(W["1"].T)
        layer.linear2.weight.copy_(W["2"].T)
        reference = layer(p.X[None])[0]
    found = PostNormBlockAt(p.X, W_Q, W_K, W["V"], W["1"], W["2"]).value
    return agrees(found, reference, "the closed form against torch.nn.TransformerEncoderLayer, one head, no biases, eps = 0")


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


@claim("curvature-gap/sec4.2-ln", "Sec. 4.2, items 1-2", "HOLDS", uses=[LayerNormAt])
def sec42_ln(seed: int) -> Evidence:
    r"""$\mathrm{LN}(X)_{ij} = \gamma_j(X_{ij}-\mu_i)/\sqrt{\sigma_i^2} + \beta_j$, $\mu_i$ and $\sigma_i^2$ over $j = 1..d_V$
    (a row's mean, although it is called feature-wise)"""
    draw = Draw(seed)
    X, gamma, beta = draw.normal(3, 4), draw.normal(4), draw.normal(4)
    return agrees(LayerNormAt(X, gamma, beta).value, F.layer_norm(X, (4,), gamma, beta, eps=0.0), "against torch")


@claim("curvature-gap/sec4.2-gb", "Sec. 4.2, item 2", "WRONG AS PRINTED", uses=[LayerNormAt])
def sec42_gb(seed: int) -> Evidence:
    r"""$\gamma,\beta\in\mathbb{R}^m$, with $m$ the number of rows in Sec. 3

    Correct: $\gamma,\beta\in\mathbb{R}^{d_V}$
    """
    X = Draw(seed).normal(3, 4)
    fits = []
    for n in range(1, 7):
        try:
            LayerNormAt(X, torch.ones(n, dtype=torch.float64))
        except ValueError:
            continue
        fits.append(n)
    return false(fits[0] if len(fits) == 1 else fits, X.shape[0], "entries of gamma for three rows of four features")


@claim("curvature-gap/assumption2", "Sec. 3, Assumption 2", "HOLDS", uses=[LayerNormAt])
def assumption2(seed: int) -> Evidence:
    r"""$\min_i\sigma_i^2 > 0$ is what the derivatives of LayerNorm need; $\epsilon > 0$ has the same effect"""
    draw = Draw(seed)
    X = draw.normal(3, 4)
    X[1] = 2.0
    try:
        LayerNormAt(X).jacobian("X")
        refused = False
    except ValueError:
        refused = True
    found = dense(LayerNormAt(X, eps=0.01).jacobian("X"))
    reference = jacobian_of(lambda X: F.layer_norm(X, (4,), eps=0.01), X)
    return agrees([float(refused), found], [torch.tensor(1.0), reference], "a constant row: refused; with eps, against autograd")


@claim("curvature-gap/mse-h", "Sec. 3", "HOLDS", uses=[MeanSquaredErrorAt])
def mse_h(seed: int) -> Evidence:
    r"""$l = \frac{1}{Ld_V}\|\cdot - \mathrm{Target}\|_F^2$ has second derivative $\frac{2}{Ld_V}I$"""
    draw = Draw(seed)
    Z, target = draw.normal(3, 4), draw.normal(3, 4)
    at = MeanSquaredErrorAt(Z, target)
    return agrees(
        [at.value.reshape(()), dense(at.jacobian("Z")), dense(at.hessian("Z", "Z"))],
        [F.mse_loss(Z, target), *(of(lambda Z: F.mse_loss(Z, target), Z) for of in (jacobian_of, hessian_of))],
        "value, gradient and Hessian against torch",
    )


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
    return off(
        relative_error(hessian_of(rows, W_V), reference),
        "three samples of one token, as three rows of one sequence",
        corrected=relative_error(mean, reference),
    )
