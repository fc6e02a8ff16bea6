r"""Sharp bounds on the Jacobians of one attention head: HybridNorm, Theorem A.3, corrected.

For s tokens x_i of width d, a head of width d_k, and

    S   = A X_N W_V W_O,   A   = softmax(X_N W_Q W_K^T X_N^T / sqrt(d_k)),  X_N = RMSNorm(X)           (Pre-Norm, Eq. 12)
    S_N = A_N V_N W_O,     A_N = softmax(Q_N K_N^T / sqrt(d_k)),  Q_N = RMSNorm(X W_Q), K_N, V_N alike (QKV-Norm, Eq. 13)

with eps = 0 and no gains. Each bound is attained; the proofs are those of the comments below. A causal mask changes nothing:
the proofs only use that the rows of A are probabilities.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from derivations.arrays import Array, as_array, to_float


class AttentionGradientBounds(NamedTuple):
    """Bounds on the Frobenius norms of dS/dW_Q, dS/dW_K, dS/dW_V and dS/dW_O."""

    W_Q: float
    W_K: float
    W_V: float
    W_O: float


def largest_gain(X: Array, W: Array) -> float:
    r"""Return rho_W = max_i ||x_i|| / ||W^T x_i||, how much a norm of X W magnifies.

    It takes the place of 1 / sigma_min of Theorem A.3, and is invariant under the scale of X.

    Args:
        X: s x d, without zero rows.
        W: d x d_k.

    Raises:
        ValueError: if a row of X W is zero, where a norm with eps = 0 has no value.

    >>> largest_gain(torch.eye(2), torch.diag(torch.tensor([0.5, 4.0])))
    2.0
    """
    x, w = to_float(as_array(X)), to_float(as_array(W))
    projected = (x @ w).norm(dim=1)
    if not bool((projected > 0).all()):
        raise ValueError(f"largest_gain: row {int((projected == 0).nonzero()[0])} of X W is zero, and has no norm with eps = 0")
    return float((x.norm(dim=1) / projected).max())


def pre_norm_gradient_bounds(s: int, W_Q: Array, W_K: Array, W_V: Array, W_O: Array) -> AttentionGradientBounds:
    r"""Return sharp bounds on the Jacobians of a Pre-Norm head (HybridNorm, Eqs. 26-29, corrected).

        ||dS/dW_Q||_F <= sqrt(s) d^(3/2) / sqrt(d_k) ||W_K|| ||W_V|| ||W_O||,   dS/dW_K with W_Q in place of W_K
        ||dS/dW_V||_F <= sqrt(s d) ||W_O||_F,                                   ||dS/dW_O||_F <= d sqrt(s) ||W_V||

    (spectral norms unless F). Printed are s^(3/2) / 2, s and s in place of sqrt(s).

    Args:
        s: number of tokens.
        W_Q, W_K: d x d_k.
        W_V: d x d_v.
        W_O: d_v x d.

    >>> I = torch.eye(4)
    >>> pre_norm_gradient_bounds(9, I, 2 * I, I, I)
    AttentionGradientBounds(W_Q=24.0, W_K=12.0, W_V=12.0, W_O=12.0)
    """
    Q, K, V, out = (to_float(as_array(W)) for W in (W_Q, W_K, W_V, W_O))
    d, d_k = Q.shape
    # Row block i of dS/dW_Q is x_i^T (x) W_O^T W_V^T C_i W_K / sqrt(d_k) with the covariance C_i of the tokens under row i of A:
    # positive semi-definite, so that ||C_i||_F <= tr C_i <= d; and the squares of ||x_i|| add up to s d.
    logits = math.sqrt(s) * d**1.5 / math.sqrt(d_k) * _spectral(V) * _spectral(out)
    # The rows of A X_N are convex combinations of vectors of norm sqrt(d).
    values, output = math.sqrt(s * d) * float(out.norm()), d * math.sqrt(s) * _spectral(V)
    return AttentionGradientBounds(logits * _spectral(K), logits * _spectral(Q), values, output)


def qkv_norm_gradient_bounds(X: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array) -> AttentionGradientBounds:
    r"""Return sharp bounds on the Jacobians of a head with QKV-Norm (HybridNorm, Eqs. 30-33, corrected).

        ||dS_N/dW_Q||_F <= sqrt(s) d_k rho_Q ||W_O||,        dS_N/dW_K with rho_K
        ||dS_N/dW_V||_F <= sqrt(s d_k) rho_V ||W_O||_F,      ||dS_N/dW_O||_F <= sqrt(s d d_k)

    with rho_W = ``largest_gain(X, W)``. Printed are s^(3/2) d_k / sigma_min, s sqrt(d_k) / sigma_min with the spectral norm of
    W_O, and s d; they are violated, whichever matrix sigma_min is taken of.

    Args:
        X: s x d, not normalised.
        W_Q, W_K, W_V: d x d_k.
        W_O: d_k x d.

    >>> I = torch.eye(4)
    >>> qkv_norm_gradient_bounds(torch.ones(9, 4), I, 0.5 * I, I, I)
    AttentionGradientBounds(W_Q=12.0, W_K=24.0, W_V=12.0, W_O=12.0)
    """
    out = to_float(as_array(W_O))
    s, (d_k, d) = int(X.shape[0]), out.shape
    rho_Q, rho_K, rho_V = (largest_gain(X, W) for W in (W_Q, W_K, W_V))
    # Row block i of dS_N/dW_Q is x_i^T (x) W_O^T C_i G_i / sqrt(d_k): C_i, the covariance of v and k under row i of A_N, has
    # ||C_i||_F <= d_k, and ||G_i|| = sqrt(d_k) / ||W_Q^T x_i||. That of dS_N/dW_V is sum_j A_ij x_j^T (x) W_O^T G_j.
    logits = math.sqrt(s) * d_k * _spectral(out)
    return AttentionGradientBounds(
        logits * rho_Q, logits * rho_K, math.sqrt(s * d_k) * rho_V * float(out.norm()), math.sqrt(s * d * d_k)
    )


def _spectral(W: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(W, 2))
