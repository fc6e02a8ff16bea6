r"""Theorem A.3 of HybridNorm (Eqs. 26-34) with the constants of its proof: Frobenius norms of the Jacobians of one head.

``derivations.gradient_bounds`` has the sharp ones. s tokens of width d, head width d_k, eps = 0, no gains; Pre-Norm
S = A X_N W_V W_O (Eq. 12), QKV-Norm S_N = A_N V_N W_O (Eq. 13). The print is in O(); its constants are those of the proof, which
gives 1/2 for both W_Q and W_K where Eq. 29 drops it.
"""

from __future__ import annotations

import math

from derivations.gradient_bounds import AttentionGradientBounds


def theorem_a3_pre_norm_printed(
    s: int, d: int, d_k: int, w_Q: float, w_K: float, w_V: float, w_O: float, w_O_F: float
) -> AttentionGradientBounds:
    r"""Return Eqs. 26-29 of HybridNorm, as printed; they HOLD, with a factor of sqrt(s) (26, 27) or s/2 (28, 29) too much.

        dS/dW_O  s d ||W_V||                                       (26; sharp: sqrt(s) d ||W_V||)
        dS/dW_V  s sqrt(d) ||W_O||_F                               (27; sharp: sqrt(s d) ||W_O||_F)
        dS/dW_Q  (s d)^(3/2) / (2 sqrt(d_k)) ||W_K|| ||W_V|| ||W_O||    (28; sharp: sqrt(s) d^(3/2) / sqrt(d_k))
        dS/dW_K  the same with ||W_Q||                             (29)

    Args:
        s: number of tokens.
        d: width.
        d_k: width of the head.
        w_Q: ||W_Q||_2; w_K, w_V and w_O alike.
        w_K: ||W_K||_2.
        w_V: ||W_V||_2.
        w_O: ||W_O||_2.
        w_O_F: ||W_O||_F.

    >>> theorem_a3_pre_norm_printed(4, 4, 4, 1.0, 2.0, 1.0, 1.0, 2.0)
    AttentionGradientBounds(W_Q=32.0, W_K=16.0, W_V=16.0, W_O=16.0)
    """
    logits = (s * d) ** 1.5 / (2 * math.sqrt(d_k)) * w_V * w_O
    return AttentionGradientBounds(logits * w_K, logits * w_Q, s * math.sqrt(d) * w_O_F, s * d * w_V)


def theorem_a3_qkv_norm_printed(
    s: int, d: int, d_k: int, w_O: float, *, sigma_Q: float, sigma_K: float, sigma_V: float
) -> AttentionGradientBounds:
    r"""Return Eqs. 30-33 (with 34) of HybridNorm, as printed; 31-33 are VIOLATED, 30 where d_k > s d.

        dS_N/dW_O  s d                                   (30; needs d_k <= s d; sharp: sqrt(s d d_k))
        dS_N/dW_V  s sqrt(d_k) / sigma_V ||W_O||         (31, 34)
        dS_N/dW_Q  s^(3/2) d_k / (2 sigma_Q) ||W_O||     (32)
        dS_N/dW_K  the same with sigma_K                 (33)

    The print takes sigma = the least singular value of X W: then X -> c X leaves the left side and divides the right by c. With
    that of W, which the proof uses, they fail for d_k < d. With 1 / ``largest_gain`` 32 and 33 hold for two and more tokens and
    31 still fails, by sqrt(d_k - 1) for an orthogonal W_O and one token.

    Args:
        s: number of tokens.
        d: width.
        d_k: width of the head.
        w_O: ||W_O||_2.
        sigma_Q: least singular value of X W_Q, or what else is to be read for it.
        sigma_K: that of X W_K.
        sigma_V: that of X W_V.

    >>> theorem_a3_qkv_norm_printed(4, 4, 4, 1.0, sigma_Q=1.0, sigma_K=2.0, sigma_V=1.0)
    AttentionGradientBounds(W_Q=16.0, W_K=8.0, W_V=8.0, W_O=16.0)
    """
    logits = s**1.5 * d_k / 2 * w_O
    return AttentionGradientBounds(logits / sigma_Q, logits / sigma_K, s * math.sqrt(d_k) / sigma_V * w_O, float(s * d))
