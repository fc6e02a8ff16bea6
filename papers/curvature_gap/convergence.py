"""Losses over a growing data set: Sec. 4.3, Theorem 7, Assumption 1, Fig. 6."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import torch
from torch import Tensor

from derivations.bounds import AttentionNorms, attention_a_priori
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.curvature_gap.attention_printed import theorem_7_corrected, theorem_7_printed
from papers.curvature_gap.attention_problems import AttentionProblem, column, global_minimum, sample
from papers.curvature_gap.block_bounds import closed_form
from papers.curvature_gap.point import BlockPoint, BlockSizes, point
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, measured, small, violated
from papers.notation import eye, layer_norm, spectral
from papers.registry import claim


def running_means(losses: Tensor) -> Tensor:
    """Return L_1, L_2, ..., the means of the first k losses."""
    return losses.cumsum(0) / torch.arange(1, len(losses) + 1, dtype=losses.dtype)


def bowl(seed: int) -> AttentionProblem:
    """Return attention whose target is its output: a minimum with zero loss and zero gradient for every sample."""
    p = sample(seed)[0]
    return replace(p, target=p.at.value)


@claim("eq10", "Sec. 4.3, Eq. 10", "HOLDS UNDER ASSUMPTION")
def eq10(seed: int) -> Evidence:
    r"""$\mathcal{L}_k(w)\approx\mathcal{L}_k(w^*) + \frac12(w - w^*)^\top H^{(k)}(w^*)(w - w^*)$, to third order
    Needs: the gradient vanishes at $w^*$ (Assumption 1), the loss is smooth there, and $w$ is near: the rest has no bound"""
    p = bowl(seed)
    direction = Draw(seed).normal(p.vector.numel())
    direction = direction / direction.norm()

    def rest(p: AttentionProblem, step: float) -> float:
        quadratic = 0.5 * step**2 * float(direction @ p.hessian @ direction)
        return float(p.loss(p.vector + step * direction)) - float(p.loss(p.vector)) - quadratic

    near = small(abs(rest(p, 1e-3) / rest(p, 5e-4) / 8 - 1), "halving w - w* divides the rest by 8", below=0.05)
    moved = replace(p, target=p.target + 1.0)  # a gradient that does not vanish
    off = abs(rest(moved, 1e-3) / rest(moved, 5e-4) / 8 - 1)
    return assumed(near, off, above=0.7)


@claim("thm7-identity", "Theorem 7; C.7", "HOLDS", uses=[theorem_7_printed])
def thm7_identity(seed: int) -> Evidence:
    r"""$\mathcal{L}_{k+1} - \mathcal{L}_k = (l_{k+1} - \mathcal{L}_k)/(k+1)$, whence the rate $1/(k+1)$
    Correct: it holds for any bounded numbers and needs no Hessian"""
    losses = Draw(seed).uniform(30)
    means = running_means(losses)
    k = torch.arange(1, 30, dtype=losses.dtype)
    return agrees((losses[1:] - means[:-1]) / (k + 1), means[1:] - means[:-1], "30 random numbers")


def difference(new: AttentionProblem, w: Tensor) -> float:
    """Return |L_2(w) - L_1(w)| for a first sample whose loss is zero everywhere."""
    return float(new.loss(w)) / 2


def corrected_right(new: AttentionProblem, w: Tensor) -> float:
    """Return the right side of the corrected theorem for that: the Hessian bound of a ball around w*."""
    distance = float((w - new.vector).norm())
    at = AttentionNorms.measured(new.X, new.W_Q, new.W_K, new.W_V, new.target)
    M = attention_a_priori(at.inflated(distance)).whole
    gradient = float(jacobian_of(new.loss, new.vector).norm())
    return theorem_7_corrected(1, float(new.loss(new.vector)), M, distance, gradient_difference=gradient)


@claim(
    "thm7",
    "Theorem 7, self-attention, with the M of Theorem 1",
    "WRONG AS PRINTED",
    uses=[theorem_7_printed, theorem_7_corrected],
)
def thm7(seed: int) -> Evidence:
    r"""$|\mathcal{L}_{k+1}(w) - \mathcal{L}_k(w)|\le\frac{2L}{k+1} + \frac{M\|w - w^*\|_2^2}{k+1}$
    Correct: the $M$ of Theorem 1 is exceeded by the Hessian at $w^*$, so that this fails to second order, too. Beyond it:
    $\frac{1}{k+1}[L + \|\nabla l_{k+1}(w^*) - \nabla\mathcal{L}_k(w^*)\|\,\|w - w^*\| + M_{seg}\|w - w^*\|^2]$,
    $M_{seg}$ a bound on the segment from $w^*$ to $w$
    Severity: false
    Follows: thm1"""
    p = global_minimum(100.0)  # Assumption 1 holds: the other sample's loss is identically zero
    step = 0.01
    w = p.vector + torch.tensor([0.0, step, 0.0], dtype=torch.float64)
    detail = "one sample without loss, one with W_Q = 100; W_K from 0 to 0.01: the losses, and their second-order terms"
    printed, second = theorem_7_printed(1, 0.0, p.theorem_1().M, step), mpmath.tanh(100 * mpmath.mpf(step)) ** 2 / 2
    curved = step**2 / 4 * float(p.hessian[1, 1])
    return violated(
        [difference(p, w), curved],
        [printed] * 2,
        detail,
        corrected=[corrected_right(p, w)] * 2,
        above=200,
        second=[second, mpmath.mpf(100 * step) ** 2 / 2],
        by="tanh(q W_K)^2 / 2 and its Taylor series, mpmath",
    )


def quadratic_ratios(seed: int, *, first_step: bool = False) -> list[float]:
    """Return left over right side of Theorem 7, or of its proof's first step, for losses that are quadratic about one minimum."""
    draw, found = Draw(seed), []
    first, second = (root @ root.T for root in (draw.normal(6, 6), draw.normal(6, 6)))
    M = max(spectral(first), spectral(second))
    for _ in range(20):
        v, (a, b) = draw.normal(len(first)), draw.uniform(2)  # the step, and the losses at w*
        left, square = abs(float(b - a + v @ (second - first) @ v / 2)) / 2, float(v @ v)
        step = float(abs(b - a)) / 2 + square / 4 * spectral(second - first)
        found.append(left / (step if first_step else theorem_7_printed(1, 1.0, M, math.sqrt(square))))
    return found


@claim(
    "thm7-true-m",
    "Theorem 7, with the true Hessian norms",
    "HOLDS UNDER ASSUMPTION",
    uses=[theorem_7_printed, theorem_7_corrected],
)
def thm7_true_m(seed: int) -> Evidence:
    r"""the same with $M = \max_i\|H_i(w^*)\|_2$
    Needs: losses that are their second-order Taylor polynomials at $w^*$ ('we suppose that decomposition to the second order will
    be sufficient', Sec. 4.3). Beyond, the loss can grow even if $H(w^*) = 0$
    Correct: without it $M_{seg}$, a bound on the segment from $w^*$ to $w$, in place of $M$"""
    p = AttentionProblem(column(1.0, -1.0), column(0.0), column(0.0), column(0.0), column(0.0, 0.0))
    w = torch.ones(3, dtype=torch.float64)  # the loss is tanh(1)^2 there, with all weights 1
    right = theorem_7_printed(1, 0.0, p.norm, math.sqrt(3))
    detail = "quadratic losses; attention at w* = 0, a global minimum with H = 0, and w = (1, 1, 1)"
    return assumed(bounded(quadratic_ratios(seed), detail), difference(p, w) / right if right else math.inf, above=10)


def hidden_scale(seed: int) -> BlockPoint:
    """Return large tokens with W_Q = W_K = 0, W_V = I and the block's output as target: a global minimum."""
    sizes = BlockSizes(3, 4, 2, 5)
    drawn = point(seed, sizes)
    nothing = torch.zeros_like(drawn.weights["Q"])
    W = {i: 1e-3 * drawn.weights[i] for i in ("1", "2")} | {"K": nothing, "Q": nothing.clone(), "V": eye(sizes.d_V)}
    p = BlockPoint(sizes, 1e8 * drawn.X, W, drawn.target)
    return replace(p, target=p.block.Z)


def block_loss(X: Tensor, W: dict[str, Tensor], target: Tensor) -> Any:
    """Return the block's loss with 40 digits, row by row."""
    with mpmath.workdps(40):
        X_, T = mpmath.matrix(X.tolist()), mpmath.matrix(target.tolist())
        Q, K, V, W_1, W_2 = (mpmath.matrix(W[i].tolist()) for i in "QKV12")
        scores = X_ * Q * K.T * X_.T / mpmath.sqrt(K.cols)
        total = mpmath.mpf(0)
        for i in range(X_.rows):
            peak = max(scores[i, :])
            a = mpmath.matrix([[mpmath.exp(s - peak) for s in scores[i, :]]])
            y = standardised_row(X_[i, :] + a * X_ * V / mpmath.fsum(a))
            inner = (y * W_1).apply(lambda u: max(u, mpmath.mpf(0)))
            total += mpmath.norm(standardised_row(inner * W_2 + y) - T[i, :]) ** 2
        return total / (X_.rows * X_.cols)


def standardised_row(y: Any) -> Any:
    """Return a row of mpmath less its mean, over its deviation."""
    centred = y - mpmath.fsum(y) / len(y) * mpmath.ones(1, len(y))
    return centred * mpmath.sqrt(len(y)) / mpmath.norm(centred)


@claim("thm7-block", "Theorem 7, block, with M_tr at w*", "HOLDS UNDER ASSUMPTION", uses=[theorem_7_printed])
def thm7_block(seed: int) -> Evidence:
    """the same for the block with a valid bound $M_{tr}$ on the Hessian at $w^*$
    Needs: losses that are their second-order Taylor polynomials at $w^*$, as for attention. LayerNorm hides the scale of $X$, the
    logits do not: with large tokens the polynomial fails within a small ball
    Correct: without it a bound on the segment, which no bound from norms gives over this ball"""
    p = hidden_scale(seed)
    w = p.vector.clone()
    moved = slice(p.place("K").start, p.place("Q").stop)  # W_K and W_Q stand side by side
    w[moved] += 3e-9
    distance = float((w - p.vector).norm())
    right = theorem_7_printed(1, 0.0, closed_form(p, "proof").whole, distance)
    left = float(p.loss(w)) / 2
    moved_weights = {i: w[p.place(i)].reshape(W.shape) for i, W in p.weights.items()}
    second = float(block_loss(p.X, moved_weights, p.target) / 2)  # with 40 digits
    detail = f"quadratic losses; W_Q = W_K = 0, tokens of size 1e8, |w - w*| = {distance:.2g}"
    return assumed(bounded(quadratic_ratios(seed), detail), min(left, second) / right, above=10)


@claim("thm7-first-step", "C.7, first inequality", "HOLDS UNDER ASSUMPTION")
def thm7_first_step(seed: int) -> Evidence:
    r"""$|\mathcal{L}_{k+1}(w) - \mathcal{L}_k(w)|\le\frac{1}{k+1}|l_{k+1}(w^*) - \mathcal{L}_k(w^*)| + \frac{\|w -
    w^*\|^2}{2(k+1)}\|H_{k+1}(w^*) - \frac1k\sum_iH_i(w^*)\|_2$
    Needs: losses that are their second-order Taylor polynomials at $w^*$ (Sec. 4.3); otherwise the third-order remainder is
    missing"""
    p = bowl(seed)
    values, vectors = torch.linalg.eigh(p.hessian)
    flat = vectors[:, int(values.abs().argmin())]  # where the second-order term all but vanishes
    step = 0.5
    w = p.vector + step * flat
    second = step**2 / 4 * abs(float(flat @ p.hessian @ flat))
    detail = "quadratic losses; attention half a unit along a flat direction of H(w*)"
    return assumed(bounded(quadratic_ratios(seed, first_step=True), detail), difference(p, w) / max(second, 1e-300), above=10)


@claim("assumption1", "Sec. 3, Assumption 1, for all $k$", "OMITTED")
def assumption1(seed: int) -> Evidence:
    r"""$\nabla l_{k+1} = (k+1)\nabla\mathcal{L}_{k+1} - k\nabla\mathcal{L}_k$, so that the assumption makes the gradient of
    every sample vanish: it asks for interpolation"""
    gradients = [p.first("loss", "V").reshape(-1) for p in (point(seed + k) for k in range(4))]
    means = [sum(gradients[: k + 1]) / (k + 1) for k in range(4)]
    found = [(k + 1) * means[k] - k * means[k - 1] for k in (1, 2, 3)]
    return agrees(found, gradients[1:], "gradients of four samples in W_V, by autograd")


# Figures and tables: what a small computation can say of them, and what would have to be trained
def slope(differences: Tensor, start: int = 10) -> float:
    """Return the slope of log |L_{k+1} - L_k| over log k from k = start on."""
    k = torch.arange(1, len(differences) + 1, dtype=differences.dtype)[start:].log()
    y = differences[start:].log()
    k, y = k - k.mean(), y - y.mean()
    return float(k @ y / (k @ k))


def average_differences(losses: Tensor, orders: int, draw: Draw) -> Tensor:
    """Return |L_{k+1} - L_k| averaged over orders of the samples."""
    shuffled = [losses[torch.randperm(len(losses), generator=draw.generator)] for _ in range(orders)]
    return torch.stack([running_means(x).diff().abs() for x in shuffled]).mean(0)


@claim("fig6-slope", "Fig. 6", "SEEN AT THIS SIZE")
def fig6_slope(seed: int) -> Evidence:
    r"""$|\mathcal{L}_{k+1}(w) - \mathcal{L}_k(w)|$ falls as $1/k$: slope $-1$ in log-log scale"""
    draw = Draw(seed)
    tokens, W, target = draw.normal(600, 1, 4), draw.normal(4, 4), draw.normal(600, 1, 4)
    losses = torch.stack([(layer_norm(x @ W) - t).square().mean() for x, t in zip(tokens, target, strict=True)])
    found = slope(average_differences(losses, 40, draw))
    return measured(found, abs(found + 1) < 0.1, "600 samples, one LayerNorm of random weights, 40 orders of the samples")


@claim("fig6-evidence", "Fig. 6 and Sec. 6", "DOES NOT FOLLOW")
def fig6_evidence(seed: int) -> Evidence:
    """the log-log trend of Fig. 6 supports Theorem 7 and a local geometry of the Transformer that settles
    Correct: any bounded numbers give the slope $-1$ (thm7-identity), trained, untrained or without a model"""
    draw = Draw(seed)
    found = slope(average_differences(draw.uniform(600), 40, draw))
    detail = (
        "the same slope for 600 uniform random numbers, without any model; the protocol has w = w*, where the Hessian term is 0"
    )
    return measured(found, abs(found + 1) < 0.1, detail)
