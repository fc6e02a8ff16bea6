"""Assumption 3.1, Lemma 3.2 and App. A.1: how the variance of the stream grows with depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from papers.claim import Evidence
from papers.curse_of_depth.stacks import Network, layers
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, loose, measured, readings, small, violated, wrong
from papers.notation import rms_norm
from papers.registry import claim
from papers.second import variance


def var(X: Tensor) -> float:
    """Return the variance of all entries."""
    return float(X.var(correction=0))


def grown(L: int, branch: float = 1.0, rho: float = 0.0, *, lns: bool = False, start: float = 1.0) -> Tensor:
    r"""Return sigma_1^2, ..., sigma_L^2 where each block adds a branch of standard deviation ``branch``, correlated by ``rho``.

    With ``lns`` the branch of block l has standard deviation branch / sqrt(l).
    """
    values = [start]
    for layer in range(1, L):
        c = branch / math.sqrt(layer) if lns else branch
        values.append(values[-1] + c * c + 2 * rho * c * math.sqrt(values[-1]))
    return torch.tensor(values, dtype=torch.float64)


def recurrence(L: int, *, lns: bool = False, C: float = 1, root: Callable[[Any], Any] = math.sqrt) -> Any:
    """Return sigma_L^2 of the recurrence of Eq. 6 (Eq. 13 with ``lns``), all constants ``C``; by mpmath with its ``root``."""
    value = root(1)
    for layer in range(1, L):
        value = C * (value + root(value / layer if lns else value))
    return value


def constants_multiply(L: int, *, lns: bool) -> Evidence:
    """Compare Eq. 6 (Eq. 13 with ``lns``) with the recurrence that it solves, each step with the constant 1.1, and 1."""
    C, products, values = 1.1, [], []
    for c in (C, 1.0):
        values.append(recurrence(L, lns=lns, C=c))
        sigmas = [recurrence(k, lns=lns, C=c) ** 0.5 for k in range(1, L)]
        products.append(math.prod(1 + 1 / (s * math.sqrt(k) if lns else s) for k, s in enumerate(sigmas, 1)))
    detail = f"sigma_{L}^2 over 1.1 times the product where each step has the constant 1.1; C^(l - 1) in its place"
    return violated(
        values,
        [C * product for product in products],
        detail,
        corrected=[C ** (L - 1) * products[0], products[1]],
        second=[recurrence(L, lns=lns, C=c, root=mpmath.sqrt) for c in (C, 1)],
        by="mpmath",
    )


@claim("eq6", "Lemma 3.2, Eq. 6; Eq. 32", "WRONG AS PRINTED")
def eq6(seed: int) -> Evidence:
    r"""from $\sigma_{x_{\ell+1}}^2 = \sigma_{x_\ell}^2\Theta(1 + \frac{1}{\sigma_{x_\ell}})$ follows $\sigma_{x_\ell}^2 =
    \sigma_{x_1}^2\Theta\left(\prod_{k=1}^{\ell-1}(1 + \frac{1}{\sigma_{x_k}})\right)$
    Correct: constants of $\ell$ steps multiply: $C^{\ell-1}$; the product is right where each step's constant is 1
    Severity: scope"""
    return constants_multiply(100, lns=False)


@claim("eq6-solution", "Lemma 3.2, Eq. 6, with constants 1", "HOLDS")
def eq6_solution(seed: int) -> Evidence:
    r"""'the growth of $\sigma_{x_\ell}^2$ is sub-exponential'
    Correct: it is $\ell^2/4$: Eq. 6 with constants 1 says $\sigma_{\ell+1}^2 = \sigma_\ell^2 + \sigma_\ell$"""
    return agrees(recurrence(200_000) / (200_000**2 / 4), 1.0, "sigma_L^2 / (L^2 / 4) at L = 2 10^5", below=1e-3)


@claim("eq7-lower", "Lemma 3.2, Eq. 7, lower bound", "HOLDS UNDER ASSUMPTION")
def eq7_lower(seed: int) -> Evidence:
    r"""$\Theta(L)\le\sigma_{x_L}^2$
    Needs: branches of one size that are not anticorrelated with the stream, $\rho\ge0$"""
    L = 1000
    holds = bounded([L / float(grown(L, rho=rho)[-1]) for rho in (0.0, 0.2, 1.0)], "L c^2 / sigma_L^2 at L = 1000")
    return assumed(holds, L / float(grown(L, rho=-0.5)[-1]), above=100)


@claim("eq7-upper", "Lemma 3.2, Eq. 7, upper bound; Abstract, 'exponentially grows'", "LOOSE")
def eq7_upper(seed: int) -> Evidence:
    r"""$\sigma_{x_L}^2\le\Theta(\exp(L))$
    Correct: $\sigma_{x_L}\le\sigma_{x_1} + cL$ by the triangle inequality: at most $L^2$, for branches of one size $c$.
    Exponential growth needs branches that grow like the stream"""
    L = 64
    found = [float(grown(L, rho=rho)[-1]) / math.exp(L) for rho in (0.0, 0.5, 1.0)]
    return loose(found, "sigma_64^2 / e^64 with branches of size 1", factor=1e20)


@claim("ours/variance-band", "The Curse of Depth, Eq. 7", "HOLDS")
def band(seed: int) -> Evidence:
    r"""branches of size $c$ with $0\le\rho\le1$: $\sigma_1^2 + (L-1)c^2\le\sigma_L^2\le(\sigma_1 + (L-1)c)^2$, both attained"""
    L, c = 100, 0.7
    found = []
    for rho in (0.0, 0.3, 0.7, 1.0):
        value = float(grown(L, c, rho)[-1])
        found += [(1 + (L - 1) * c * c) / value, value / (1 + (L - 1) * c) ** 2]
    return bounded(found, "L = 100, c = 0.7", attained=1 - 1e-9)


@cache
def real_stack(seed: int, placement: str) -> list[float]:
    """Return the variance of the stream after 20, 200 and 2000 ReLU sub-layers of width 32, Pre-LN or LNS, from variance 1."""
    draw, found = Draw(seed), []
    X = rms_norm(draw.normal(16, 32))
    for layer in range(1, 2001):
        network = Network.draw(draw, 32, 64, 0.172)
        X = X + network(rms_norm(X) / (layer**0.5 if placement == "lns" else 1.0))
        if layer in (20, 200, 2000):
            found.append(var(X))
    return found


@claim("headline", "Abstract; Sec. 1, 'its output variance exponentially grows with the model depth'", "OPEN")
def headline(seed: int) -> Evidence:
    r"""'Pre-LN ... its output variance exponentially grows with the model depth, which undesirably causes the derivative of
    the deep Transformer blocks to be an identity matrix'
    Correct: not at initialisation: linearly, and at most quadratically while branches keep their size. In training it is open: in
    fig8's small model an exponential fits best at step 40, a square later. Lemma 3.2 itself has 'sub-exponential'"""
    first, second, last = real_stack(seed, "pre")
    exponential = second * (second / first) ** (1800 / 180)  # through the variances at 20 and 200 layers
    linear = second + (second - first) / 180 * 1800
    lns = real_stack(seed, "lns")
    detail = (
        f"last variance over the line's; untrained ReLU stack at 20, 200, 2000 sub-layers, Pre-LN {first:.1f}, {second:.0f}, "
        f"{last:.0f} (line {linear:.0f}, exponential {exponential:.1g}), LNS {lns[0]:.1f}, {lns[1]:.1f}, {lns[2]:.1f}"
    )
    return measured(last / linear, 0.4 < last / linear < 2.5 and exponential > 10 * last, detail)


@claim("headline-lns", "Abstract; Sec. 4.1", "HOLDS")
def headline_lns(seed: int) -> Evidence:
    r"""LNS 'mitigates the output variance explosion of deeper Transformer layers': logarithmic growth at initialisation"""
    draws = 4  # of one the three variances scatter as much as they grow
    first, second, last = (
        sum(variances) / draws for variances in zip(*(real_stack(draws * seed + k, "lns") for k in range(draws)), strict=True)
    )
    detail = (
        f"variance at 20, 200, 2000 sub-layers {first:.2f}, {second:.2f}, {last:.2f}, the mean of {draws} stacks: a decade over "
        "the last, less 1 (linear: 9)"
    )
    return small(abs((last - second) / (second - first) - 1), detail, below=1.0)


@claim("eq33", "App. A.1.2, Eq. 33", "WRONG AS PRINTED")
def eq33(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2\le\sigma_{x_1}^2\prod_k\left(1 + \sqrt{\frac{1}{\sigma_{x_1}}}\right)$
    Correct: $1 + \frac{1}{\sigma_{x_1}}$, as Eq. 32 has it, which is $1 + \sqrt{1/\sigma_{x_1}^2}$; with $\sigma_{x_1} < 1$
    the printed one is too small
    Severity: slip of print"""
    start, L = 0.25, 2
    found = start * (1 + 1 / math.sqrt(start)) ** (L - 1)
    printed = start * (1 + math.sqrt(1 / math.sqrt(start))) ** (L - 1)
    exact = Fraction(1, 4) * (1 + 1 / Fraction(1, 2))
    return violated(
        found,
        printed,
        "sigma_1 = 1/2, one step of Eq. 32",
        corrected=start * (1 + 1 / math.sqrt(start)),
        second=exact,
        by="rational numbers",
    )


@claim("eq34-sum", "App. A.1.2, after Eq. 34", "WRONG AS PRINTED")
def eq34_sum(seed: int) -> Evidence:
    r"""for $\sigma_{x_\ell}^2 = \ell$: $\exp\left(\sum_{k=1}^{\ell-1}(\frac1k - \frac{1}{2k})\right) = \Theta(\exp(\sqrt L))$
    Correct: it is $\Theta(\sqrt L)$, and the sum is not the one of Eq. 34, which has $\frac{1}{\sqrt k} - \frac{1}{2k}$ for
    $\sigma_k^2 = k$
    Severity: slip of print"""
    L = 10_000
    reference = float((1 / layers(L - 1) - 1 / (2 * layers(L - 1))).sum())
    detail = "the exponent at L = 10^4: sqrt(L) as printed, log(L) / 2 + gamma / 2"
    corrected = math.log(L) / 2 + 0.5772156649 / 2
    second = mpmath.harmonic(L - 1) / 2
    return wrong(math.sqrt(L), reference, detail, corrected=corrected, above=5, below=1e-3, second=float(second), by="mpmath")


@claim("eq34-circular", "App. A.1.2, after Eq. 34", "DOES NOT FOLLOW")
def eq34_circular(seed: int) -> Evidence:
    r"""from $\sigma_{x_\ell}^2 = \ell$ in Eq. 34: 'the increasing lower bound ... must grow faster than a linear function'
    Correct: $\sigma_\ell^2 = \ell$ does not solve Eq. 32: inserted into Eq. 34 it gives $e^{2\sqrt\ell}/\sqrt\ell$. The
    conclusion is right: the solution is $\ell^2/4$"""
    L = 10_000
    found, second = (recurrence(L, root=root) for root in (math.sqrt, mpmath.sqrt))
    detail = "Eq. 32 with constants 1 at l = 10^4: l and l^2 / 4"
    return wrong(L, found, detail, corrected=L**2 / 4, below=0.01, second=float(second), by="mpmath")


# Assumption 3.1 and Appendix A.1: what a block adds to the variance of the stream
ROUNDS = 0.1
"""Relative error allowed to what is estimated from random numbers."""


@claim("assumption3.1", "Assumption 3.1, with Eqs. 2, 21 and 22", "INCONSISTENT")
def assumption(seed: int) -> Evidence:
    r"""$x_\ell$, $x'_\ell$ and $W_\ell$ are normal and independent (Assumption 3.1); stream and branch have correlations
    $\rho_1$, $\rho_2$ (App. A.1)
    Correct: $x'_\ell = x_\ell + \mathrm{Attn}(\mathrm{LN}(x_\ell))$ and $x_\ell$ have correlation
    $\sigma_{x_\ell}/\sigma_{x'_\ell}$ where the weights are fresh; with $\rho = 0$ the term $1/\sigma_x$ of Eq. 6 vanishes"""
    draw, N = Draw(seed), 256
    X = draw.normal(N, N, std=2.0)
    Y = X + rms_norm(X) @ draw.normal(N, N, std=1 / math.sqrt(N))
    found = torch.corrcoef(torch.stack([X.reshape(-1), Y.reshape(-1)]))[0, 1]
    second = torch.cosine_similarity((X - X.mean()).reshape(1, -1), (Y - Y.mean()).reshape(1, -1))
    corrected = math.sqrt(var(X) / var(Y))
    return wrong(0.0, found, "correlation of x' and x", corrected=corrected, below=0.02, second=second[0], by="their angle")


def variance_row(seed: int, branches: int) -> Evidence:
    """Compare Eq. 21, 22 (one branch) or 23 (two) with the variance of sums that are correlated."""
    draw, n = Draw(seed), 1000
    x = draw.normal(n)
    total, printed, corrected = x, var(x), var(x)
    for _ in range(branches):
        f = 0.6 * total + draw.normal(n)
        covariance = float(((total - total.mean()) * (f - f.mean())).mean())
        printed += var(f) + covariance
        corrected += var(f) + 2 * covariance
        total = total + f
    detail = f"{branches} correlated branches, sample covariances"
    return wrong(printed, var(total), detail, corrected=corrected, above=0.05, second=variance(total), by="rational numbers")


@claim("eq21", "App. A.1, Eq. 21", "WRONG AS PRINTED")
def eq21(seed: int) -> Evidence:
    r"""$\mathrm{Var}(x'_\ell) = \mathrm{Var}(x_\ell) + \mathrm{Var}(\mathrm{Attn}) +
    \mathrm{Cov}(\mathrm{Attn},\mathrm{Var}(x_\ell)) = \sigma_{x_\ell}^2 + \sigma_{\mathrm{Attn}}^2 +
    \rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}}$
    Correct: $+\,2\,\mathrm{Cov}(\mathrm{Attn}, x_\ell) = 2\rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}}$
    Severity: constant"""
    return variance_row(seed, 1)


@claim("eq22", "App. A.1, Eq. 22", "WRONG AS PRINTED")
def eq22(seed: int) -> Evidence:
    r"""$\sigma_{x_{\ell+1}}^2 = \sigma_{x'_\ell}^2 + \sigma_{\mathrm{FFN}}^2 + \rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$
    Correct: $2\rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$
    Severity: constant
    Follows: eq21"""
    return variance_row(seed + 1, 1)


@claim("eq23", "App. A.1, Eq. 23", "WRONG AS PRINTED")
def eq23(seed: int) -> Evidence:
    r"""$\sigma_{x_{\ell+1}}^2 = \sigma_{x_\ell}^2 + \sigma_{\mathrm{Attn}}^2 + \sigma_{\mathrm{FFN}}^2 +
    \rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}} + \rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$
    Correct: both covariances twice
    Severity: constant
    Follows: eq21"""
    return variance_row(seed, 2)


@claim("lemma-a1", "Lemma A.1, Eq. 26", "WRONG AS PRINTED")
def lemma_a1(seed: int) -> Evidence:
    r"""for i.i.d. $X_i$ with finite variance $\lim\mathbb{E}[\sum_i(p_i - \frac1n)^2] = 0$, $p = \mathrm{softmax}(X)$
    Correct: it needs a condition such as $\mathbb{E}\,e^{2X} < \infty$: logits with the tail $P(X > t) = t^{-3}$ put all
    weight on one of them
    Severity: scope"""
    draw, N, rounds = Draw(seed), 100_000, 20
    p = (draw.uniform(rounds, N, low=1e-12) ** (-1 / 3)).softmax(1)
    found, light = (p - 1 / N).square().sum(1).mean(), (draw.normal(N).softmax(0) - 1 / N).square().sum()
    detail = f"the expectation with 10^5 logits of that tail (Gaussian ones: {float(light):.1e}); one weight for all of it"
    second = (p.square().sum(1) - 1 / N).mean()  # the p sum to 1
    return wrong(0.0, found, detail, corrected=p.amax(1).square().mean(), below=0.05, second=second, by="sum of p^2 less 1/n")


@claim("lemma-a1-uniform", "Lemma A.1, below Eq. 26", "VAGUE")
def lemma_a1_uniform(seed: int) -> Evidence:
    r"""the softmax becomes 'asymptotically indistinguishable, in expectation, from the uniform distribution'
    Correct: in the sum of squares of Eq. 26 it tends to the uniform distribution; in the distance $\frac12\sum_i|p_i -
    \frac1N|$ it does not: for standard normal logits that tends to $2\Phi(\frac12) - 1 = 0.383$"""
    p = Draw(seed).normal(200_000).softmax(0) - 1 / 200_000
    found = {"sum of squares": float(p.square().sum()), "half the sum of absolute values": float(p.abs().sum() / 2)}
    return readings(found, "2 10^5 standard normal logits")


@claim("eq27", "App. A.1.1, Eq. 27", "WRONG AS PRINTED")
def eq27(seed: int) -> Evidence:
    r"""for uniform attention $\mathrm{Var}(AV) = \frac1n\sum_id_{\mathrm{head}}\mathrm{Var}(V_i) =
    d_{\mathrm{head}}\sigma_V^2 = \sigma_W^2d$
    Correct: $\sigma_V^2/n$ with $\sigma_V^2 = d\,\sigma_W^2$ for $n$ independent tokens, $\sigma_V^2$ for equal ones; the
    output projection is missing
    Severity: constant"""
    draw, n, d, d_head, std = Draw(seed), 16, 64, 64, 0.05
    V = torch.stack([rms_norm(draw.normal(n, d)) @ draw.normal(d, d_head, std=std) for _ in range(100)])
    found = V.mean(1).var(1, correction=0).mean()
    printed = [d_head * d * std**2, d * std**2]  # the two right sides
    out = F.scaled_dot_product_attention(torch.zeros_like(V), V, V)  # queries of zero: uniform attention
    second = out[:, 0].square().mean() - out[:, 0].mean(1).square().mean()
    by = "torch's attention with queries of zero"
    return wrong(printed, found, "16 tokens, 100 draws", corrected=d * std**2 / n, above=5, below=ROUNDS, second=second, by=by)


@claim("eq29", "App. A.1.2, Eqs. 29 and 31", "INCONSISTENT")
def eq29(seed: int) -> Evidence:
    r"""$\sigma_{\mathrm{FFN}}^2\sim\sigma_{W_1}^2\cdot\sigma_{W_2}^2 = \sigma_W^4$ (Eq. 29); $\sigma_W^4d^2$ (Eq. 31)
    Correct: $\frac12d\,d_{\mathrm{ffn}}\sigma_W^4$ for ReLU ($d\,d_{\mathrm{ffn}}\sigma_W^4$ without activation)"""
    draw, d, d_ff, std = Draw(seed), 64, 256, 0.0693
    drawn = [(Network.draw(draw, d, d_ff, std), rms_norm(draw.normal(64, d)).numpy()) for _ in range(20)]
    found = sum(var(network(torch.from_numpy(N))) for network, N in drawn) / 20
    second = np.mean([np.var(np.maximum(N @ W_1.numpy(), 0) @ W_2.numpy()) for (W_1, W_2), N in drawn])
    printed, corrected = [std**4, std**4 * d**2], d * d_ff * std**4 / 2
    detail = "20 draws; also Eq. 31's d^2"
    return wrong(printed, found, detail, corrected=corrected, above=0.3, below=ROUNDS, second=second, by="numpy")


@claim("eq30-correlation", "App. A.1.2, Eq. 30, second line", "WRONG AS PRINTED")
def eq30_correlation(seed: int) -> Evidence:
    r"""$\sigma_x^2 + \sigma_W^2 + \rho_2\sigma_x\sigma_W = \sigma_x^2\left(1 + \frac{\sigma_W}{\sigma_x} +
    \frac{\sigma_W^2}{\sigma_x^2}\right)$
    Correct: $\rho_2$ remains: $\frac{\rho_2\sigma_W}{\sigma_x}$; without it $\Theta(1 + \frac{1}{\sigma_x})$ of the third
    line needs $\rho_2 > 0$
    Severity: constant"""
    x, w, rho = (float(v) for v in Draw(seed).uniform(3, low=0.2, high=0.8))
    left, second = (a * a + b * b + r * a * b for a, b, r in ((x, w, rho), map(Fraction, (x, w, rho))))
    printed, corrected = (x * x * (1 + c * w / x + w * w / x**2) for c in (1.0, rho))
    return wrong(printed, left, "random numbers", corrected=corrected, second=second, by="rational numbers")


@claim("eq31", "App. A.1.2, Eq. 31, second line", "WRONG AS PRINTED")
def eq31(seed: int) -> Evidence:
    r"""$\rho_2\sigma_{x'}\sigma_W^2d\approx\rho_2\sigma_x\sigma_W^2d + \frac{\rho_2\sigma_W^4d^2}{2\sigma_x} +
    \frac{\rho_2^2\sigma_W^3d\,\sigma_x}{2}$ for $\sigma_{x'} = \sigma_x\sqrt{1 + \frac{\sigma_W^2}{\sigma_x^2} +
    \rho_2\frac{\sigma_W}{\sigma_x}}$
    Correct: $\frac{\rho_2\sigma_W^4d}{2\sigma_x} + \frac{\rho_2^2\sigma_W^3d}{2}$: $d$, not $d^2$, and no $\sigma_x$
    Severity: constant"""
    x, w, rho = (float(v) for v in Draw(seed).uniform(3, low=0.3, high=0.8))
    d, t = 64.0, torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = rho * x * w**2 * d * (1 + t * (w**2 / x**2 + rho * w / x)).sqrt()
    (first_order,) = torch.autograd.grad(value, t)
    printed = rho * w**4 * d**2 / (2 * x) + rho**2 * w**3 * d * x / 2
    corrected = rho * w**4 * d / (2 * x) + rho**2 * w**3 * d / 2
    second = mpmath.diff(lambda t: rho * x * w**2 * d * mpmath.sqrt(1 + t * (w**2 / x**2 + rho * w / x)), 0)
    detail = "first order of the root by autograd"
    return wrong(printed, first_order, detail, corrected=corrected, above=0.1, second=second, by="mpmath.diff")
