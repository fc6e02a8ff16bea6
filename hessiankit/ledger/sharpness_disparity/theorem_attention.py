"""Theorem 4.2: the gradients of an attention layer and its norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.matrix import Commutation
from derivations.normalization import LayerNormAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, small, wrong
from hessiankit.ledger.registry import claim
from hessiankit.ledger.sharpness_disparity.points import (
    AttentionSublayer,
    dense,
    eye,
    if_it_conforms,
    ones,
    standardised,
)

VOCABULARY = 9
"""d of the paper, which is not the width D."""
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")


def front(point: AttentionSublayer) -> Tensor:
    """Return (I_n (x) W_O^T W_V^T X_N^T) dA/dM / sqrt(D)."""
    n, D = point.sizes
    return torch.kron(eye(n), point.W_O.T @ point.W_V.T @ point.X_norm.T) @ point.dA / math.sqrt(D)


def printed(point: AttentionSublayer, letter: str) -> Tensor:
    """Return dY/dW as App. B.2 prints it."""
    N, A, D = point.X_norm, point.closed.A, point.sizes[1]
    if letter == "W_V":
        return torch.kron(A @ N, point.W_O.T.contiguous())
    if letter == "W_O":
        return torch.kron(A @ N @ point.W_V, eye(D))
    return front(point) @ torch.kron(N, N @ (point.W_K if letter == "W_Q" else point.W_Q))


def gamma_formula(point: AttentionSublayer, d: int) -> Tensor:
    """Return dY/dgamma as App. B.2 prints it, with I_d."""
    n, N = point.sizes[0], point.X_norm
    K = dense(Commutation(n, n))
    scores = torch.kron(eye(n), N @ point.W_K @ point.W_Q.T) + K @ torch.kron(eye(n), N @ point.W_Q @ point.W_K.T)
    outer = front(point) @ scores + torch.kron(point.closed.A, point.W_O.T @ point.W_V.T)
    return outer @ standardised(point.X).reshape(-1).diag() @ torch.kron(ones(n), eye(d))


def jacobian_row(seed: int, letter: str) -> Evidence:
    """Compare a printed Jacobian times dQ/dY, the attention chapter and automatic differentiation."""
    point = AttentionSublayer.draw(seed)
    reference = point.gradient(letter)
    found = [point.q @ printed(point, letter), point.closed_gradient(letter)]
    return agrees(found, [reference, reference], "dQ/dY times the printed matrix and the closed form against autograd")


@claim("sharpness-disparity/b2-wq", "App. B.2, dY/dW_Q", "HOLDS", uses=[AttentionAt.jacobian])
def w_q(seed: int) -> Evidence:
    r"""$(I_n\otimes W_O^\top W_V^\top X_{\mathrm{Norm}}^\top)\frac{\partial A}{\partial
    M}\left(\frac{X_{\mathrm{Norm}}\otimes X_{\mathrm{Norm}}W_K}{\sqrt D}\right)$"""
    return jacobian_row(seed, "W_Q")


@claim("sharpness-disparity/b2-wk", "App. B.2, dY/dW_K", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def w_k(seed: int) -> Evidence:
    r"""$(I_n\otimes W_O^\top W_V^\top X_{\mathrm{Norm}}^\top)\frac{\partial A}{\partial
    M}\left(\frac{X_{\mathrm{Norm}}\otimes X_{\mathrm{Norm}}W_Q}{\sqrt D}\right)$

    Correct: $K_{n,n}$ before the last factor, or $\frac{X_{\mathrm{Norm}}W_Q\otimes X_{\mathrm{Norm}}}{\sqrt D}K_{D,D}$ for
    it: what is printed is $\frac{\partial\,\mathrm{vec}(M^\top)}{\partial W_K}$
    """
    point = AttentionSublayer.draw(seed)
    n, D = point.sizes
    N, reference = point.X_norm, point.gradient("W_K")
    inner = torch.kron(N, N @ point.W_Q)
    corrected = [
        point.q @ front(point) @ dense(Commutation(n, n)) @ inner,
        point.q @ front(point) @ torch.kron(N @ point.W_Q, N) @ dense(Commutation(D, D)),
        point.closed_gradient("W_K"),
    ]
    as_printed = point.q @ printed(point, "W_K")
    return wrong([as_printed] * 3, [reference] * 3, "against autograd", corrected=corrected, above=0.05)


@claim("sharpness-disparity/b2-gamma", "App. B.2, dY/dgamma", "WRONG AS PRINTED", uses=[AttentionAt.jacobian, LayerNormAt])
def gamma(seed: int) -> Evidence:
    r"""$\left(\frac{1}{\sqrt D}(I_n\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial M}\left(I_n\otimes
    X_NW_KW_Q^\top + K_{n,n}(I_n\otimes X_NW_QW_K^\top)\right) + A\otimes W_O^\top
    W_V^\top\right)\mathrm{diag}(\mathrm{vec}(X_{\mathrm{std}}))(1_{n\times1}\otimes I_d)$

    Correct: $I_D$ in place of $I_d$, nothing else: $K_{n,n}$ stands where it belongs
    """
    point = AttentionSublayer.draw(seed)
    reference = point.gradient("gamma")
    corrected = [point.q @ gamma_formula(point, 5), point.closed_gradient("gamma")]
    bad = if_it_conforms(lambda: point.q @ gamma_formula(point, VOCABULARY))
    return wrong([bad] * 2, [reference] * 2, f"D = 5, d = {VOCABULARY}: the factors do not conform", corrected=corrected)


@claim("sharpness-disparity/b2-x-norm", "App. B.2, definition of X_Norm", "WRONG AS PRINTED", uses=[LayerNormAt])
def x_norm(seed: int) -> Evidence:
    r"""$X_{\mathrm{Norm}} = X_{\mathrm{std}}\odot\gamma$

    Correct: $X_{\mathrm{std}}\odot(1_{n\times1}\otimes\gamma)$, as in Theorem 4.1 and App. B.1: $\gamma$ is $1\times D$
    """
    draw = Draw(seed)
    X, gain = draw.normal(4, 5), draw.normal(1, 5)

    def hadamard(A: Tensor, B: Tensor) -> Tensor:
        if A.shape != B.shape:
            raise RuntimeError("a Hadamard product needs equal shapes")
        return A * B

    X_std, reference = standardised(X), F.layer_norm(X, (5,), gain[0], eps=0.0)
    bad, corrected = if_it_conforms(lambda: hadamard(X_std, gain)), hadamard(X_std, torch.kron(ones(4), gain))
    return wrong([bad], [reference], "shapes 4 x 5 and 1 x 5", corrected=[corrected])


@claim("ours/attention-euler", "Sharpness Disparity, Theorem 4.2", "HOLDS", uses=[AttentionAt.jacobian])
def euler(seed: int) -> Evidence:
    r"""$\langle W_Q,\nabla\mathcal{Q}\rangle = \langle W_K,\nabla\mathcal{Q}\rangle$, $\langle W_V,\nabla\mathcal{Q}\rangle =
    \langle W_O,\nabla\mathcal{Q}\rangle = \langle\nabla_Y\mathcal{Q}, S\rangle$, and $\langle\gamma,\nabla\mathcal{Q}\rangle$
    is the sum of those of $W_Q$, $W_K$ and $W_V$"""
    point = AttentionSublayer.draw(seed, causal=True)
    products = {x: float(point.gradient(x) @ getattr(point, x).reshape(-1)) for x in (*WEIGHTS, "gamma")}
    output = float(point.q @ point.closed.value.reshape(-1))
    scale = float(point.q.norm() * point.closed.value.norm())
    errors = [
        products["W_Q"] - products["W_K"],
        products["W_V"] - output,
        products["W_O"] - output,
        products["gamma"] - products["W_Q"] - products["W_K"] - products["W_V"],
    ]
    return small([abs(e) / scale for e in errors], "autograd's gradients; errors relative to the product of the norms")
