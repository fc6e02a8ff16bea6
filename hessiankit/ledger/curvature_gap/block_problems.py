"""Blocks with the norms of their factors and of their Hessians: samples, and the points that break bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from derivations.bounds import (
    PostBlockNorms,
    post_block_a_priori,
    theorem_6_factors_printed,
    theorem_6_printed,
)
from derivations.bounds.block_printed import (
    PrintedBlockBound,
    PrintedFactors,
    phi_printed,
    sigma_min_printed,
)
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import eye, spectral
from hessiankit.ledger.curvature_gap.point import ATTENTION_PAIRS, WEIGHTS, BlockPoint, BlockSizes, point
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import bounded

SIZES = (BlockSizes(3, 4, 2, 5), BlockSizes(2, 3, 2, 4), BlockSizes(3, 3, 3, 3))


@cache
def problems(seed: int) -> tuple[BlockPoint, ...]:
    """Return points of several sizes, the last with a target within 10 percent of Z."""
    found = [point(seed, sizes) for sizes in SIZES]
    near = point(seed + 1, SIZES[0])
    return (*found, with_target(near, near.block.Z + 0.1 * Draw(seed).normal(*near.X.shape)))


def with_target(p: BlockPoint, target: Tensor) -> BlockPoint:
    """Return the point with another target."""
    return BlockPoint(p.sizes, p.X, p.weights, target)


def norms(p: BlockPoint) -> dict[str, float]:
    """Return the spectral norms of the tokens and the weights, in the letters of the printed bounds."""
    return {"x": spectral(p.X), **{f"w_{i}": spectral(p.weights[i]) for i in ("Q", "K", "V", "1", "2")}}


def exact_phi(p: BlockPoint) -> dict[str, float]:
    """Return the norms of the Phi blocks, by autograd."""
    return {k + m: spectral(p.second("F", k, m)) for k, m in ATTENTION_PAIRS}


def residual(p: BlockPoint) -> float:
    """Return ||Z - Target||_F."""
    return float((p.block.Z - p.target).norm())


def bound(p: BlockPoint, factors: PrintedFactors, phi: dict[str, float]) -> PrintedBlockBound:
    """Return Theorem 6 from given norms of its factors."""
    L, d_V, _, d_ff = p.sizes
    return theorem_6_printed(L, d_V, d_ff, factors, phi, norms(p)["w_1"], norms(p)["w_2"], residual(p))


def closed_form(p: BlockPoint, reading: str) -> PrintedBlockBound:
    """Return Theorem 6 from norms of the input, the weights and the target, and the smallest deviations of rows."""
    named, (L, d_V, d_K, d_ff) = norms(p), p.sizes
    before = p.X + p.at.value
    sigma, prime = sigma_min_printed(before, reading=reading), sigma_min_printed(p.block.S, reading=reading)
    factors = theorem_6_factors_printed(L, d_V, d_K, d_ff, **named, sigma=sigma, sigma_prime=prime)
    return bound(p, factors, phi_printed(L, d_V, d_K, *(named[n] for n in ("x", "w_Q", "w_K", "w_V"))))


def whole(p: BlockPoint) -> float:
    """Return the spectral norm of the Hessian of the loss, by autograd."""
    return spectral(torch.cat([torch.cat([p.second("loss", i, j) for j in WEIGHTS], 1) for i in WEIGHTS]))


def a_priori(p: BlockPoint) -> float:
    """Return the bound that holds."""
    W = p.weights
    measured = PostBlockNorms.measured(p.X, W["Q"], W["K"], W["V"], W["1"], W["2"], p.target)
    return post_block_a_priori(measured).whole


Side = Callable[[BlockPoint], float]


def over(left: float, right: float) -> float:
    """Return left / right, and 0 where both vanish, as they do if no ReLU is active."""
    return left / right if right else (math.inf if left > 1e-12 else 0.0)


def never_above(seed: int, left: Side, right: Side, detail: str, *, attained: float | None = None) -> Evidence:
    """Find an inequality to hold on the problems."""
    return bounded([over(left(p), right(p)) for p in problems(seed)], f"four points, {detail}", attained=attained)


def attention_point(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> BlockPoint:
    """Return a point whose feed-forward network returns 0, off the kinks."""
    L, d = X.shape
    nothing, inner = torch.zeros(1, d, dtype=torch.float64), torch.arange(1.0, d + 1, dtype=torch.float64).square().reshape(-1, 1)
    return BlockPoint(
        BlockSizes(L, d, W_Q.shape[1], 1), X, {"1": inner, "2": nothing, "K": W_K, "Q": W_Q, "V": W_V}, torch.zeros_like(X)
    )


def uniform_pair(n: int) -> BlockPoint:
    """Return tokens e_1, -e_1, 0, ... with W_Q = 0, W_K = e_1, W_V = I: uniform attention, L = d_V = n, d_K = 1."""
    X = torch.zeros(n, n, dtype=torch.float64)
    X[0, 0], X[1, 0] = 1.0, -1.0
    first = eye(n)[:, :1]
    return attention_point(X, torch.zeros_like(first), first, eye(n))


def crossed_pairs() -> BlockPoint:
    """Return tokens e_1, -e_1, e_2, -e_2 with the weights of ``uniform_pair``: A X = 0, rows that a norm can take."""
    X = torch.cat([eye(4)[:1], -eye(4)[:1], eye(4)[1:2], -eye(4)[1:2]])
    first = eye(4)[:, :1]
    return attention_point(X, torch.zeros_like(first), first, eye(4))


def peaked_identity(n: int) -> BlockPoint:
    """Return X = W_K = W_V = I_n and a first row of A that is ((1 + 1/sqrt 3)/2, (1 - 1/sqrt 3)/2, 0, ...)."""
    far, gap = 60.0, math.log((math.sqrt(3) + 1) / (math.sqrt(3) - 1))
    W_Q = torch.zeros(n, n, dtype=torch.float64)
    W_Q[0] = -far
    W_Q[0, 0], W_Q[0, 1] = gap, 0.0
    return attention_point(eye(n), W_Q * math.sqrt(n), eye(n), eye(n))


def single_row(n: int) -> BlockPoint:
    """Return one token of unit deviation, all weights near zero, and Target = Z: a global minimum."""
    draw = Draw(n)
    x = draw.normal(1, n)
    X = (x - x.mean()) / x.std(unbiased=False)
    W = {i: 1e-3 * draw.normal(*shape) for i, shape in {"1": (n, n), "2": (n, n), "K": (n, 1), "Q": (n, 1), "V": (n, n)}.items()}
    p = BlockPoint(BlockSizes(1, n, 1, n), X, W, X)
    return with_target(p, p.block.Z)
