r"""Theorem 1 of "Closing the Curvature Gap" as printed: a bound on the Hessian norm of self-attention that does not hold.

``attention_a_priori`` is the bound to use. These are here to be compared with, in the letters of the paper: x = ||X||_2, w_Q,
w_K, w_V the spectral norms of the weights, t = ||Target||_2, and the loss ||F - Target||_F^2 / (L d_V).

Theorem 1 is violated without bound at a global minimum with uniform attention: the maximum leaves out
the blocks (K, K) and (V, K), so that nothing grows with ||W_Q||^2. With those blocks it holds for uniform attention only, as
||dA/dT|| <= 1/L does (claim b:dA/dT<=1/L).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class PrintedAttentionBlocks(NamedTuple):
    """The terms of the maximum in Theorem 1, and the two blocks it leaves out (None as printed)."""

    VV: float
    QQ: float
    VQ: float
    QK: float
    KK: float | None = None
    VK: float | None = None

    @property
    def M(self) -> float:
        """3 times the maximum: the bound M of Theorem 1."""
        return 3 * max(value for value in self if value is not None)


def theorem_1_printed(
    length: int, d_V: int, d_K: int, x: float, w_Q: float, w_K: float, w_V: float, t: float, *, swapped: bool = False
) -> PrintedAttentionBlocks:
    r"""Return the terms of Theorem 1, main text, as printed; VIOLATED without bound.

    With m = sqrt(min(L, d_V)) and R = L x w_V + t,

        VV  2 L x^2 / d_V
        QQ  8 w_K^2 w_V^2 x^6 / (L^3 d_V d_K) + 12 m R w_V w_K^2 x^5 / (d_V d_K)
        VQ  4 w_V w_K x^4 / (L d_V sqrt(d_K)) + 4 m R w_K x^3 / (L^2 sqrt(d_K))
        QK  8 w_K w_Q w_V^2 x^6 / (L^3 d_V d_K) + 4 m R w_V (3 L w_K w_Q x^5 + d_V x^3 / L) / (L d_V sqrt(d_K))

    At L = 2, d_V = d_K = 1, X = (1, -1)^T, W_Q = q, W_K = 0, W_V = 1, Target = 0 the true norm is 2 q^2, and M is 24:

    >>> theorem_1_printed(2, 1, 1, math.sqrt(2), 100.0, 0.0, 1.0, 0.0).M
    24.000000000000007

    Args:
        length, d_V, d_K: L and the widths of tokens and queries.
        x, w_Q, w_K, w_V, t: spectral norms of X, the weights and the target.
        swapped: add the blocks (K, K) and (V, K), made from (Q, Q) and (V, Q) by exchanging W_Q and W_K. It then holds where
            attention is uniform, and fails for long sequences otherwise.
    """
    L, m = length, math.sqrt(min(length, d_V))
    R = L * x * w_V + t

    def own(w: float) -> float:
        return 8 * w**2 * w_V**2 * x**6 / (L**3 * d_V * d_K) + 12 * m * R * w_V * w**2 * x**5 / (d_V * d_K)

    def with_V(w: float) -> float:
        return 4 * w_V * w * x**4 / (L * d_V * math.sqrt(d_K)) + 4 * m * R * w * x**3 / (L**2 * math.sqrt(d_K))

    QK = 8 * w_K * w_Q * w_V**2 * x**6 / (L**3 * d_V * d_K)
    QK += 4 * m * R * w_V * (3 * L * w_K * w_Q * x**5 + d_V * x**3 / L) / (L * d_V * math.sqrt(d_K))
    added = (own(w_Q), with_V(w_Q)) if swapped else (None, None)
    return PrintedAttentionBlocks(2 * L * x**2 / d_V, own(w_K), with_V(w_K), QK, *added)


def theorem_1_appendix_printed(
    length: int,
    d_V: int,
    d_K: int,
    x: float,
    w_Q: float,
    w_K: float,
    w_V: float,
    t: float,
    *,
    rank: int | None = None,
    swapped: bool = False,
) -> PrintedAttentionBlocks:
    r"""Return the terms of Theorem 1 at the end of Appendix C.1, as printed; VIOLATED.

    They are those of the main text with other constants, sums of ``outer_printed`` and ``functional_printed``. Never above the
    main text's.

    Args:
        length, d_V, d_K, x, w_Q, w_K, w_V, t, swapped: as in ``theorem_1_printed``.
        rank: of F(X) - Target; None for min(L, d_V), with which the paper simplifies.

    >>> theorem_1_appendix_printed(2, 1, 1, math.sqrt(2), 100.0, 0.0, 1.0, 0.0).M
    24.000000000000007
    """
    sizes, m = (length, d_V, d_K), math.sqrt(min(length, d_V) if rank is None else rank)
    outer, functional = outer_printed(*sizes, x, w_Q, w_K, w_V), functional_printed(*sizes, x, w_Q, w_K, w_V, t, m)
    terms = [a + b for a, b in zip(outer[:4], functional[:4], strict=True)]
    if swapped:
        turned = outer_printed(*sizes, x, w_K, w_Q, w_V), functional_printed(*sizes, x, w_K, w_Q, w_V, t, m)
        terms += [turned[0].QQ + turned[1].QQ, turned[0].VQ + turned[1].VQ]
    return PrintedAttentionBlocks(*terms)


def outer_printed(length: int, d_V: int, d_K: int, x: float, w_Q: float, w_K: float, w_V: float) -> PrintedAttentionBlocks:
    r"""Return the bounds on the outer-product Hessian blocks of Appendix C.1, as printed.

        VV  2 L x^2 / d_V                            VALID, L times the sharp 2 x^2 / d_V
        QQ  2 w_K^2 w_V^2 x^6 / (L^3 d_V d_K)        uniform attention only, else off by up to L^2/4
        VQ  2 w_V w_K x^4 / (L d_V sqrt(d_K))        VIOLATED for long sequences, valid for uniform attention
        QK  2 w_K w_Q w_V^2 x^6 / (L^3 d_V d_K)      as QQ

    >>> outer_printed(1, 2, 1, 1.0, 1.0, 1.0, 1.0)
    PrintedAttentionBlocks(VV=1.0, QQ=1.0, VQ=1.0, QK=1.0, KK=None, VK=None)
    """
    L = length
    cube = 2 * w_V**2 * x**6 / (L**3 * d_V * d_K)
    return PrintedAttentionBlocks(
        2 * L * x**2 / d_V, cube * w_K**2, 2 * w_V * w_K * x**4 / (L * d_V * math.sqrt(d_K)), cube * w_K * w_Q
    )


def functional_printed(
    length: int, d_V: int, d_K: int, x: float, w_Q: float, w_K: float, w_V: float, t: float, m: float
) -> PrintedAttentionBlocks:
    r"""Return the bounds on the functional Hessian blocks of Appendix C.1, as printed.

    With R = L x w_V + t:

        VV  0
        QQ  12 m R w_V w_K^2 x^5 / (d_V d_K)                                       VALID by slack
        VQ  2 m R w_K x^3 / (L^2 sqrt(d_V d_K))                                    uniform attention only, else off by L/4
        QK  2 m R w_V (3 L w_K w_Q x^5 + d_V x^3 / L) / (L d_V sqrt(d_V d_K))      VALID by slack for d_V <= 121 L^2 d_K

    Args:
        length, d_V, d_K, x, w_Q, w_K, w_V, t: as in ``theorem_1_printed``.
        m: the root of the rank of F - Target, or of min(L, d_V).

    >>> functional_printed(1, 1, 1, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0)
    PrintedAttentionBlocks(VV=0.0, QQ=0.0, VQ=2.0, QK=0.0, KK=None, VK=None)
    """
    L, R = length, length * x * w_V + t
    QQ = 12 * m * R * w_V * w_K**2 * x**5 / (d_V * d_K)
    VQ = 2 * m * R * w_K * x**3 / (L**2 * math.sqrt(d_V * d_K))
    QK = 2 * m * R * w_V * (3 * L * w_K * w_Q * x**5 + d_V * x**3 / L) / (L * d_V * math.sqrt(d_V * d_K))
    return PrintedAttentionBlocks(0.0, QQ, VQ, QK)


class PrintedSteps(NamedTuple):
    """The bounds that the proof of Theorem 1 passes through, as printed."""

    dA: float
    A: float
    d2A: float
    Z_1: float
    Z_2: float
    S: float
    residual: float


def theorem_1_steps_printed(length: int, d_V: int, x: float, w_V: float, t: float, *, rank: int | None = None) -> PrintedSteps:
    r"""Return the bounds of the steps of Appendix C.1, as printed.

        ||dA/dT|| <= 1/L       ONLY UNDER uniform attention or L <= 2; the sharp constant is 1/2
        ||A|| <= L             VALID, sharp is sqrt(L)
        ||d2A/dT2|| <= 6       VALID, 22 times the true constant sqrt(6)/9; its step is false (claim b:maxblock)
        ||Z_1|| <= x^3 / L     ONLY UNDER uniform attention or L <= 2
        ||Z_2|| <= 6 x^5       VALID
        ||S|| <= sqrt(d_V)     VALID, an equality
        ||R_m|| <= sqrt(rank) (L x w_V + t)    VALID

    >>> theorem_1_steps_printed(4, 9, 2.0, 0.0, 1.0)
    PrintedSteps(dA=0.25, A=4.0, d2A=6.0, Z_1=2.0, Z_2=192.0, S=3.0, residual=2.0)
    """
    m = math.sqrt(min(length, d_V) if rank is None else rank)
    return PrintedSteps(1 / length, float(length), 6.0, x**3 / length, 6 * x**5, math.sqrt(d_V), m * (length * x * w_V + t))


def theorem_7_printed(k: int, loss_bound: float, M: float, distance: float) -> float:
    r"""Return 2 L / (k+1) + M ||w - w*||^2 / (k+1), Theorem 7 as printed; VIOLATED without bound.

    (Bounds review, items 38 and 39.)

    It is to bound |L_{k+1}(w) - L_k(w)|. The Taylor series it rests on is cut off without a remainder: H(w*) = 0 at
    X = (1, -1)^T, Target = 0, w* = 0, but at w = (1, 1, 1) the loss is tanh(1)^2. ``theorem_7_corrected`` holds.

    Args:
        k: number of samples so far.
        loss_bound: the bound L on the losses at w*.
        M: the bound on the Hessians at w*.
        distance: ||w - w*||.

    >>> theorem_7_printed(1, 0.0, 0.0, math.sqrt(3))  # the true difference is 0.29
    0.0
    """
    return (2 * loss_bound + M * distance**2) / (k + 1)


def theorem_7_corrected(
    k: int, loss_bound: float, M_segment: float, distance: float, *, gradient_difference: float = 0.0
) -> float:
    r"""Return [L + ||grad l_{k+1}(w*) - grad L_k(w*)|| ||D|| + M_seg ||D||^2] / (k+1), which Theorem 7 should say.

    With D = w - w*, and M_seg a bound on the Hessians of the k + 1 losses on the segment from w* to w:
    ``attention_a_priori(norms.inflated(||D||)).whole``, for one. For smooth losses, or where no kink of a ReLU is crossed;
    the difference of gradients is zero under Assumption 1.

    Args:
        k: number of samples so far.
        loss_bound: the bound L on the losses at w*; they lie in [0, L].
        M_segment: see above.
        distance: ||D||.
        gradient_difference: ||grad l_{k+1}(w*) - grad L_k(w*)||.

    >>> theorem_7_corrected(3, 1.0, 2.0, 2.0, gradient_difference=0.5)
    2.5
    """
    return (loss_bound + gradient_difference * distance + M_segment * distance**2) / (k + 1)
