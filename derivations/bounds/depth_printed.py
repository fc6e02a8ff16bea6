r"""Bounds of "The Curse of Depth" on dy_L/dx_1 through Pre-LN layers: Eqs. 9 and 14-18 as printed, and what the product gives.

For L layers with weights of standard deviation sigma, width d, h heads of width d_h, hidden width d_ff, s tokens, and the
standard deviation sigma_l of the input of layer l. ``sigmas`` are sigma_1, ..., sigma_L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class DepthConstants(NamedTuple):
    """A and B of a factor 1 + A / sigma_l + B / sigma_l^2."""

    A: float
    B: float


def equation_9_constants_printed(d: int, d_ff: int, h: int, s: int, sigma: float) -> DepthConstants:
    r"""Return A and B of Eq. 9 as printed in (47) and (48); WRONG, the product of (36) gives others (``equation_9_constants``).

        A = sigma^2 / (sqrt(d) + sqrt(d_ff))^2 + 2 d h (sqrt(s) + 2 + 1/sqrt(s)) sigma^2 (d sqrt(d_h) + 1 + sqrt(d_h/d))
        B = 2 d h (sqrt(s) + 2 + 1/sqrt(s)) sigma^4 d sqrt(d_h),    d_h = d / h

    sigma^2 was lost from the first term in the bracket, (41) divides by what it should multiply with, and B is not the product
    of the two branches.

    Args:
        d: width.
        d_ff: hidden width.
        h: number of heads.
        s: number of tokens.
        sigma: standard deviation of the weights.

    >>> [float(f"{v:.3g}") for v in equation_9_constants_printed(64, 256, 4, 32, 0.0693)]
    [4960.0, 23.7]
    """
    d_h, tokens = d / h, math.sqrt(s) + 2 + 1 / math.sqrt(s)
    a = sigma**2 / (math.sqrt(d) + math.sqrt(d_ff)) ** 2
    shared = 2 * d * h * tokens
    return DepthConstants(
        a + shared * sigma**2 * (d * math.sqrt(d_h) + 1 + math.sqrt(d_h / d)), shared * sigma**4 * d * math.sqrt(d_h)
    )


def equation_9_constants(d: int, d_ff: int, h: int, s: int, sigma: float) -> DepthConstants:
    r"""Return A = a + b and B = a b, corrected, of (1 + a / sigma_l)(1 + b / sigma_l).

        a = sigma^2 (sqrt(d) + sqrt(d_ff))^2                                                         of the feed-forward network
        b = 2 d h (sqrt(s) + 2 + 1/sqrt(s)) sigma^2 (sigma^2 d sqrt(d_h) + 1 + sqrt(d_h/d))          of attention, (36) and (45)

    sigma_l has to be the least standard deviation of a token.

    Args: as ``equation_9_constants_printed``.

    >>> [float(f"{v:.3g}") for v in equation_9_constants(64, 256, 4, 32, 0.0693)]
    [55.3, 145.0]
    """
    d_h, tokens = d / h, math.sqrt(s) + 2 + 1 / math.sqrt(s)
    a = sigma**2 * (math.sqrt(d) + math.sqrt(d_ff)) ** 2
    b = 2 * d * h * tokens * sigma**2 * (sigma**2 * d * math.sqrt(d_h) + 1 + math.sqrt(d_h / d))
    return DepthConstants(a + b, a * b)


def equation_9_printed(sigmas: Sequence[float], constants: DepthConstants) -> float:
    r"""Return prod_{l=1}^{L-1} (1 + A / sigma_l + B / sigma_l^2), Eq. 9 as printed: one factor short of its L layers (Eq. 8).

    >>> equation_9_printed([1.0, 2.0, 5.0], DepthConstants(2.0, 4.0))
    21.0
    """
    return _product(sigmas[:-1], constants)


def equation_9_corrected(sigmas: Sequence[float], constants: DepthConstants) -> float:
    r"""Return the product over all L layers. It holds, and is vacuous: e^231 at 64 layers for a true norm of 48.

    Args:
        sigmas: the least standard deviation of a token at the input of every layer.
        constants: ``equation_9_constants``.

    >>> equation_9_corrected([1.0, 2.0], DepthConstants(2.0, 4.0))
    21.0
    """
    return _product(sigmas, constants)


def equation_14_printed(L: int, epsilon: float) -> tuple[float, float]:
    r"""Return L and L^(2 - epsilon), 1/2 <= epsilon < 1, between which Eq. 14 puts sigma_L^2.

    With LayerNorm scaling, and up to Theta.

    The lower bound is WRONG: independent branches give log L, aligned ones L, so that log L <= sigma_L^2 <= L.

    Raises:
        ValueError: if epsilon is not in [1/2, 1).

    >>> equation_14_printed(16, 0.5)
    (16.0, 64.0)
    """
    if not 0.5 <= epsilon < 1:
        raise ValueError(f"equation_14_printed: epsilon = {epsilon}; expected 1/2 <= epsilon < 1")
    return float(L), float(L) ** (2 - epsilon)


def equation_15_printed(sigmas: Sequence[float], constants: DepthConstants) -> float:
    r"""Return prod_{l=1}^{L-1} (1 + A / (l sigma_l) + B / (l^2 sigma_l^2)), Eq. 15 as printed; Eq. 18 has the same form.

    LayerNorm scaling divides the branch of layer l by sqrt(l), not l: ``equation_15_corrected``. Eq. 16 concludes "<= omega(1)"
    for sigma_l^2 = l^(2 - epsilon), which is no upper bound (the product is O(1)); Eq. 17 has Theta(L) for sigma_l^2 = l, where
    this product is O(1), too. Eq. 18 puts it before dy_L/dW_1 with A' and B' that are never defined.

    >>> equation_15_printed([1.0, 1.0, 9.0], DepthConstants(2.0, 4.0))
    21.0
    """
    return math.prod(1 + constants.A / (n * s) + constants.B / (n * s) ** 2 for n, s in enumerate(sigmas[:-1], start=1))


def equation_15_corrected(sigmas: Sequence[float], constants: DepthConstants) -> float:
    r"""Return prod_{l=1}^{L} (1 + A / (sqrt(l) sigma_l) + B / (l sigma_l^2)), by the chain rule of a branch divided by sqrt(l).

    The scale stands behind the norm: it divides the input of a branch, whose Jacobian in it (41, 44) is bounded without it.

    >>> equation_15_corrected([1.0], DepthConstants(2.0, 4.0))
    7.0
    """
    return math.prod(1 + constants.A / (math.sqrt(n) * s) + constants.B / (n * s**2) for n, s in enumerate(sigmas, start=1))


def _product(sigmas: Sequence[float], constants: DepthConstants) -> float:
    return math.prod(1 + constants.A / s + constants.B / s**2 for s in sigmas)
