"""Theorem A.3 as printed, and heads at which bounds are attained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from derivations.gradient_bounds import AttentionGradientBounds
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.hybridnorm.definitions import LETTERS, HeadPoint
from hessiankit.ledger.hybridnorm.jacobians import printed_pre_norm, printed_qkv_norm


def spectral(W: Tensor) -> float:
    """Return the largest singular value."""
    return float(torch.linalg.matrix_norm(W, 2))


def pre_norm_norms(head: HeadPoint) -> AttentionGradientBounds:
    """Return the Frobenius norms of the Jacobians of S, by Lemma A.1."""
    return AttentionGradientBounds(*(float(printed_pre_norm(head, letter).norm()) for letter in LETTERS))


def qkv_norm_norms(head: HeadPoint) -> AttentionGradientBounds:
    """Return the Frobenius norms of the Jacobians of S_N, by Lemma A.2."""
    return AttentionGradientBounds(*(float(printed_qkv_norm(head, letter).norm()) for letter in LETTERS))


def printed_pre_norm_bounds(head: HeadPoint) -> AttentionGradientBounds:
    """Return the right sides of Eqs. 28, 29, 27, 26, with the constants of their proof."""
    s, d, d_k = head.sizes
    logits = (s * d) ** 1.5 / (2 * math.sqrt(d_k)) * spectral(head.W_V) * spectral(head.W_O)
    return AttentionGradientBounds(
        logits * spectral(head.W_K),
        logits * spectral(head.W_Q),
        s * math.sqrt(d) * float(head.W_O.norm()),
        s * d * spectral(head.W_V),
    )


Sigma = Callable[[Tensor, Tensor], float]


def sigma_of_product(X: Tensor, W: Tensor) -> float:
    """Return the smallest singular value of X W, as printed."""
    return float(torch.linalg.svdvals(X @ W)[-1])


def sigma_of_weight(X: Tensor, W: Tensor) -> float:
    """Return the min(d, d_k)-th singular value of W, the reading of the proof."""
    return float(torch.linalg.svdvals(W)[-1])


def printed_qkv_norm_bounds(head: HeadPoint, sigma: Sigma) -> AttentionGradientBounds:
    """Return the right sides of Eqs. 32, 33, 31, 30, with the constants of their proof and a reading of sigma_min."""
    s, d, d_k = head.sizes
    smallest = [sigma(head.X, W) for W in head.weights[:3]]
    inverse = [1 / value if value else math.inf for value in smallest]
    logits = s**1.5 * d_k / 2 * spectral(head.W_O)
    return AttentionGradientBounds(
        logits * inverse[0], logits * inverse[1], s * math.sqrt(d_k) * inverse[2] * spectral(head.W_O), s * d
    )


def sample(seed: int, count: int = 40, *, least: int = 1) -> Iterator[HeadPoint]:
    """Yield heads of different sizes and scales; ``least`` tokens or more."""
    draw = Draw(seed)
    for _ in range(count):
        s, d, d_k = (int(draw.integers(low, high)) for low, high in ((least, 6), (2, 6), (2, 5)))
        head = HeadPoint.draw(draw, s, d, d_k)
        a, b, c, e, f = (10 ** float(v) for v in draw.uniform(5, low=-1, high=1))
        yield HeadPoint(a * head.X, b * head.W_Q, c * head.W_K, e * head.W_V, f * head.W_O)


def opposite_tokens(seed: int, s: int = 4, d: int = 5, d_k: int = 3) -> HeadPoint:
    """Return tokens x and -x in turn, queries and keys at right angles (attention is uniform), and W_O along the values."""
    draw = Draw(seed)
    x, basis = draw.normal(d), draw.orthogonal(d_k)
    signs = torch.tensor([(-1.0) ** i for i in range(s)], dtype=torch.float64)
    u = x / x.norm()
    W_Q, W_K, W_V = (size * torch.outer(u, basis[k]) for size, k in ((1.5, 0), (0.5, 1), (2.0, 2)))
    return HeadPoint(torch.outer(signs, x), W_Q, W_K, W_V, torch.outer(basis[2], draw.normal(d)))


def equal_tokens(seed: int, s: int = 4, d: int = 5, d_k: int = 3) -> HeadPoint:
    """Return equal tokens, W_V of rank one along them, and W_O at right angles to the values."""
    draw = Draw(seed)
    x, basis = draw.normal(d), draw.orthogonal(d_k)
    W_V = 2.0 * torch.outer(x / x.norm(), basis[0])
    W_Q, W_K = draw.normal(d, d_k), draw.normal(d, d_k)
    return HeadPoint(x.expand(s, d).clone(), W_Q, W_K, W_V, torch.outer(basis[1], draw.normal(d)))


def ratios(found: AttentionGradientBounds, bound: AttentionGradientBounds) -> AttentionGradientBounds:
    """Return left side over right side, letter by letter."""
    return AttentionGradientBounds(*(a / b if b else math.inf for a, b in zip(found, bound, strict=True)))
