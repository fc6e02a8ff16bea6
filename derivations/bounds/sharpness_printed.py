r"""Theorems 4.1-4.3 of the Sharpness Disparity paper as printed: bounds on the norms of gradients.

n tokens of width D, hidden width M, loss Q with the gradient dQ/dY at the branch's output, h = 1 head, LayerNorm with eps = 0.
All end bounds hold but that of Theorem 4.3, which leaves out ||dQ/dY||_F (claim D6); all have n sqrt(D) where sqrt(n D) is
enough (claims B13t, C8t). Upper bounds with the same Psi do not order the blocks: what does is the number of parameters.
Corrected and attained ones are in ``sharpness_bounds``.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class FeedForwardBounds(NamedTuple):
    """Psi of Theorem 4.1 and its bounds on the norms of dQ/dW_1, dQ/dW_2 and dQ/dgamma."""

    Psi: float
    W_1: float
    W_2: float
    gamma: float


class AttentionGradientBounds(NamedTuple):
    """Phi and Psi of Theorem 4.2 and its bounds on the norms of the gradients."""

    Phi: float
    Psi: float
    W_Q: float
    W_K: float
    W_V: float
    W_O: float
    gamma: float


class EmbeddingBounds(NamedTuple):
    """Psi of Theorem 4.3 and its bounds on the norms of dQ/dW_E and dQ/dgamma."""

    Psi: float
    W_E: float
    gamma: float


def theorem_4_1_printed(n: int, D: int, gradient: float, dA: float, w_1: float, w_2: float, gamma: float) -> FeedForwardBounds:
    r"""Return Psi = n sqrt(D) ||dQ/dY||_F ||dA/dM||_F ||W_1||_F ||W_2||_F ||gamma|| and Psi / ||theta||_F for W_1, W_2, gamma.

    HOLDS for (leaky) ReLU (claim B13). The W_2 and gamma lines of its proof are wrong (claims B10, B10b, B11); the ends are not.

    Args:
        n: number of tokens.
        D: width.
        gradient: ||dQ/dY||_F.
        dA: ||dA/dM||_F, the slopes of the activation.
        w_1: ||W_1||_F.
        w_2: ||W_2||_F.
        gamma: ||gamma||.

    >>> theorem_4_1_printed(2, 4, 1.0, 1.0, 2.0, 4.0, 1.0)
    FeedForwardBounds(Psi=32.0, W_1=16.0, W_2=8.0, gamma=32.0)
    """
    Psi = n * math.sqrt(D) * gradient * dA * w_1 * w_2 * gamma
    return FeedForwardBounds(Psi, Psi / w_1, Psi / w_2, Psi / gamma)


def theorem_4_2_printed(
    n: int, D: int, gradient: float, dA: float, a: float, w_Q: float, w_K: float, w_V: float, w_O: float, gamma: float
) -> AttentionGradientBounds:
    r"""Return Theorem 4.2: Phi / ||W|| for W_Q, W_K, Psi / ||W|| for W_V, W_O and (2 Phi + Psi) / ||gamma||.

        Phi = (n sqrt(D))^3 / sqrt(D) ||dQ/dY|| ||dA/dM|| ||W_K|| ||W_Q|| ||W_V|| ||W_O|| ||gamma||^3
        Psi = n sqrt(D) ||dQ/dY|| ||A|| ||W_V|| ||W_O|| ||gamma||                            (Frobenius norms)

    HOLDS (claim C8); the first line of the bound for gamma is wrong (claim C9).

    Args:
        n: number of tokens.
        D: width.
        gradient: ||dQ/dY||_F.
        dA: ||dA/dM||_F of the softmax.
        a: ||A||_F.
        w_Q: ||W_Q||_F; w_K, w_V, w_O alike.
        w_K: ||W_K||_F.
        w_V: ||W_V||_F.
        w_O: ||W_O||_F.
        gamma: ||gamma||.

    >>> theorem_4_2_printed(1, 4, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    AttentionGradientBounds(Phi=8.0, Psi=2.0, W_Q=4.0, W_K=8.0, W_V=2.0, W_O=2.0, gamma=18.0)
    """
    Phi = (n * math.sqrt(D)) ** 3 / math.sqrt(D) * gradient * dA * w_K * w_Q * w_V * w_O * gamma**3
    Psi = n * math.sqrt(D) * gradient * a * w_V * w_O * gamma
    return AttentionGradientBounds(Phi, Psi, Phi / w_Q, Phi / w_K, Psi / w_V, Psi / w_O, (2 * Phi + Psi) / gamma)


def theorem_4_3_printed(n: int, D: int, gamma: float, least_row: float) -> EmbeddingBounds:
    r"""Return Theorem 4.3: Psi = n sqrt(D) ||gamma||, Psi / min_i ||w_i|| for W_E and Psi / ||gamma||; VIOLATED (claim D6).

    It bounds dY, not dQ: multiplying the loss by 1000 multiplies the gradient and leaves Psi. ``theorem_4_3`` of
    ``sharpness_bounds`` has the factor ||dQ/dY||_F.

    Args:
        n: number of tokens.
        D: width.
        gamma: ||gamma||.
        least_row: the least norm of a row of W_E minus its mean.

    >>> theorem_4_3_printed(2, 4, 2.0, 0.5)
    EmbeddingBounds(Psi=8.0, W_E=16.0, gamma=4.0)
    """
    Psi = n * math.sqrt(D) * gamma
    return EmbeddingBounds(Psi, Psi / least_row, Psi / gamma)
