"""Lemma 4.1 and Theorem 4.2: the variance and the Jacobian with LayerNorm Scaling."""

from __future__ import annotations

import math

import mpmath
import torch
from torch import Tensor

from derivations.feedforward import FeedForwardAt
from hessiankit.blocks import TransformerBlock
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.curse_of_depth.stacks import Network, StackSizes, block_jacobian, exponent, layers, log_product, make_block
from papers.curse_of_depth.variance import constants_multiply, grown, recurrence, var
from papers.drawing import Draw
from papers.evidence import assumed, bounded, loose, measured, small, violated, wrong
from papers.notation import dense, rms_norm
from papers.registry import claim
from papers.second import variance

DEPTHS = [1, 4, 16, 64]


@claim("eq13", "Lemma 4.1, Eq. 13; Eqs. 54-55", "WRONG AS PRINTED")
def eq13(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2 = \sigma_{x_1}^2\Theta\left(\prod_{k=1}^{\ell-1}(1 + \frac{1}{\sqrt k\,\sigma_{x_k}})\right)$
    Correct: as in Eq. 6 the constants of $\ell$ steps multiply; the formula is right with constants 1
    Severity: scope
    Follows: eq6"""
    return constants_multiply(100, lns=True)


@claim("eq52-ffn", "App. A.3, Eq. 52", "HOLDS UNDER ASSUMPTION", uses=[TransformerBlock])
def eq52_ffn(seed: int) -> Evidence:
    r"""$\sigma_{\mathrm{FFN}}^2\sim\frac{\sigma_{W_1}^2}{\ell}\cdot\frac{\sigma_{W_2}^2}{\ell} = \frac{\sigma_W^4}{\ell^2}$
    Needs: SwiGLU with small pre-activations, a product of two linear maps; for the network of Eq. 28 (ReLU) it is
    $\frac1\ell$ exactly"""
    N, slopes = rms_norm(Draw(seed).normal(64, 16)), {}
    for activation, size in (("swiglu", 0.1), ("relu", 1.0)):
        network = make_block(seed, activation=activation).feedforward
        slopes[activation] = exponent([float(k) for k in DEPTHS], [var(network(size * N / math.sqrt(k))) for k in DEPTHS])
    holds = small(abs(slopes["swiglu"] + 2), f"exponent {slopes['swiglu']:.3f} of SwiGLU, inputs times 0.1", below=0.1)
    return assumed(holds, abs(slopes["relu"] + 2), above=0.9)


@claim("eq53", "App. A.3, Eq. 53", "WRONG AS PRINTED")
def eq53(seed: int) -> Evidence:
    r"""$\sigma_{x'_\ell}^2 = \sigma_{x_\ell}^2 + \sigma_W^2 + \rho_2\sigma_{x_\ell}\frac{\sigma_W}{\sqrt\ell}$
    Correct: $\frac{\sigma_W^2}{\ell}$ for $\sigma_W^2$, after Eq. 52 (and $2\rho_2$, see Eq. 21)
    Severity: slip of print"""
    draw, layer = Draw(seed), 9
    x = draw.normal(1000)
    f = (0.5 * x + draw.normal(1000)) / math.sqrt(layer)
    w, covariance = layer * var(f), float(((x - x.mean()) * (f - f.mean())).mean())
    printed, corrected = var(x) + w + covariance, var(x) + w / layer + 2 * covariance
    second = variance(x + f)
    return wrong(printed, var(x + f), "l = 9, sample covariances", corrected=corrected, second=second, by="rational numbers")


@claim("eq57", "App. A.3, Eq. 57", "WRONG AS PRINTED")
def eq57(seed: int) -> Evidence:
    r"""for $\sigma_{x_\ell}^2 = \ell$: $\exp\left(\sum_{k=1}^{\ell-1}(\frac1k - \frac{1}{2k})\right) = \Theta(\exp(\log L))$
    Correct: the printed sum gives $\Theta(\sqrt L)$; Eq. 56 has $\frac1k - \frac{1}{2k^2}$, which gives $\Theta(L)$
    Severity: slip of print"""

    def growth(second: float) -> float:
        sums = [float((1 / layers(L - 1) - 1 / (2 * layers(L - 1) ** second)).sum()) for L in (100, 10_000)]
        return math.exp(sums[1] - sums[0])

    detail = f"growth of the printed sum from L = 100 to 10 000: Theta(L), Theta(sqrt L); with Eq. 56's sum {growth(2):.4g}"
    second = mpmath.exp((mpmath.harmonic(9999) - mpmath.harmonic(99)) / 2)
    return wrong(
        100.0, growth(1), detail, corrected=10.0, above=0.5, below=0.02, second=float(second), by="harmonic numbers, mpmath"
    )


@claim("eq58-exponent", "App. A.3, Eq. 58", "WRONG AS PRINTED")
def eq58_exponent(seed: int) -> Evidence:
    r"""for $\sigma_{x_k}^2 = k^{2-\epsilon}$: $\frac{1}{\sqrt k\,\sigma_{x_k}} = \frac{1}{k^{2-\epsilon/2}}$
    Correct: $k^{-(3-\epsilon)/2}$
    Severity: constant"""
    k, epsilon = layers(50)[1:], 0.75
    reference = 1 / (k.sqrt() * (k ** (2 - epsilon)).sqrt())
    printed, corrected = k ** -(2 - epsilon / 2), k ** (-(3 - epsilon) / 2)
    second = [float(1 / mpmath.sqrt(n * mpmath.mpf(n) ** (2 - epsilon))) for n in range(2, 51)]
    return wrong(
        printed, reference, "epsilon = 3/4, k = 2 to 50", corrected=corrected, above=0.1, second=torch.tensor(second), by="mpmath"
    )


@claim("eq58", "App. A.3, Eq. 58", "DOES NOT FOLLOW")
def eq58(seed: int) -> Evidence:
    r"""assuming $\sigma_{x_\ell}^2 = \ell^{2-\epsilon}$ in Eq. 55: $\sigma_{x_\ell}^2 = \sigma_{x_1}^2\prod_k(1 +
    \ldots)\le\Theta(\ell^{2-\epsilon})$, the upper bound of Eq. 14
    Correct: the assumption contradicts Eq. 55, whose product then converges. The conclusion is right: the solution with
    constants 1 grows like $\ell$"""
    epsilon, lengths = 0.75, (1_000, 1_000_000)
    logs = [float(torch.log1p(layers(L) ** (-(3 - epsilon) / 2)).sum()) for L in lengths]
    growth, assumed_growth = math.exp(logs[1] - logs[0]), 1000 ** (2 - epsilon)
    start = recurrence(1000, lns=True, root=mpmath.sqrt)
    solution = recurrence(1_000_000, lns=True) / recurrence(1000, lns=True)
    second = (mpmath.sqrt(start) + mpmath.sqrt(10**6) - mpmath.sqrt(1000)) ** 2 / start  # of y' = sqrt(y / l)
    detail = (
        f"growth from L = 10^3 to 10^6 of the solution with constants 1; the product with sigma^2 = l^(2 - eps): {growth:.3g}"
    )
    by = "the differential equation, mpmath"
    return wrong(assumed_growth, solution, detail, corrected=1000.0, below=0.01, second=float(second), by=by)


@claim("eq14-lower", "Lemma 4.1, Eq. 14, lower bound", "HOLDS UNDER ASSUMPTION")
def eq14_lower(seed: int) -> Evidence:
    r"""$\Theta(L)\le\sigma_{x_L}^2$ with LNS
    Needs: branches of size $1/\sqrt\ell$ whose correlation with the stream is at least $\rho_0 > 0$: then
    $\sigma_{x_L}^2/L\to4\rho^2$, and 1 by Eq. 13 with constants 1. Uncorrelated branches, as at initialisation, add up to
    $\log L$"""
    L = 10_000
    found = [2 * rho**2 * L / float(grown(L, rho=rho, lns=True)[-1]) for rho in (0.1, 0.5, 1.0)]
    holds = bounded(
        [*found, L / recurrence(L, lns=True) / 2], "half of the limit over sigma_L^2 / L at L = 10^4, rho = 0.1, 0.5, 1; Eq. 13"
    )
    return assumed(holds, L / float(grown(L, lns=True)[-1]), above=100)


@claim("eq14-upper", "Lemma 4.1, Eq. 14, upper bound", "LOOSE")
def eq14_upper(seed: int) -> Evidence:
    r"""$\sigma_{x_L}^2\le\Theta(L^{2-\epsilon})$, $\frac12\le\epsilon < 1$
    Correct: $\sigma_{x_L}\le\sigma_{x_1} + c\sum\ell^{-1/2}$: at most $4c^2L$, for branches of size $c/\sqrt\ell$"""
    L = 10_000
    found = [float(grown(L, rho=rho, lns=True)[-1]) / (4 * L**1.5) for rho in (0.0, 0.5, 1.0)]
    return loose(found, "sigma_L^2 / (4 L^{3/2}) at L = 10^4, correlations up to 1", factor=50)


@claim("eq59", "App. A.4, Eq. 59", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def eq59(seed: int) -> Evidence:
    r"""$1 +
    \|\frac{\partial\,\mathrm{FFN}}{\partial\,\mathrm{LN}}\|_2\|\frac{1}{\sqrt\ell}\|_2\|\frac{\partial\,\mathrm{LN}}{\partial
    x'}\|_2 = 1 + \frac{\sigma_\ell^2}{\ell\,\sigma_{x'_\ell}(\sqrt d + \sqrt{d_{\mathrm{FFN}}})^2}$
    Correct: $\frac{1}{\sqrt\ell}$ for $\frac1\ell$ (and the factor of Eq. 40 for its inverse): with ReLU the branch's
    Jacobian is $\frac{1}{\sqrt\ell}$ times that of Pre-LN
    Severity: constant"""
    draw, layer = Draw(seed), 9
    network, x = Network.draw(draw, 6, 8, 1.0), draw.normal(3, 6)
    scaled = jacobian_of(lambda x: network(rms_norm(x) / math.sqrt(layer)), x)
    closed = dense(FeedForwardAt(rms_norm(x), *network, residual=False).jacobian("Y")) @ jacobian_of(rms_norm, x)
    return wrong(closed / layer, scaled, "l = 9, against autograd", corrected=closed / math.sqrt(layer), above=0.1)


@claim("eq15", "Theorem 4.2, Eq. 15; Eqs. 61-62", "WRONG AS PRINTED", uses=[TransformerBlock])
def eq15(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_L}{\partial x_1}\|_2\le\prod_{\ell=1}^{L-1}\left(1 + \frac{A}{\ell\,\sigma_{x_\ell}} +
    \frac{B}{\ell^2\sigma_{x_\ell}^2}\right)$, factor by factor, with $A$ and $B$ of Eqs. 47-48
    Correct: $\frac{A}{\sqrt\ell\,\sigma_{x_\ell}} + \frac{B}{\ell\,\sigma_{x_\ell}^2}$ with $A = a + b$, $B = ab$, and $L$
    factors: the $\frac1\ell$ holds for a branch that is quadratic in its input (SwiGLU with small pre-activations)
    Severity: constant
    Follows: eq59, eq47, eq48"""
    draw, layer, size = Draw(seed), 10**9, StackSizes(d=16, d_ffn=64, h=1, s=1, sigma=0.25)
    X, network = draw.normal(1, 16), Network.draw(draw, 16, 64, 0.25)
    W_V, W_O = draw.normal(16, 16, std=0.25), draw.normal(16, 16, std=0.25)

    def branches(X: Tensor) -> Tensor:  # of one token: its attention is the identity
        first = rms_norm(X) @ W_V @ W_O / math.sqrt(layer)
        return first + network(rms_norm(X + first) / math.sqrt(layer))

    J, sigma = jacobian_of(branches, X), float(X.square().mean().sqrt())
    left = float(torch.linalg.eigvalsh(J + J.T)[-1] / 2)  # ||I + J|| - 1 is at least the largest x J x
    printed, at_2 = (size.A_printed / (k * sigma) + size.B_printed / (k * sigma) ** 2 for k in (layer, 2))
    roots = (math.sqrt(layer) * sigma, math.sqrt(2) * sigma)
    corrected, right_at_2 = ((size.ffn + size.attention) / r + size.ffn * size.attention / r**2 for r in roots)
    detail = f"one block at l = 10^9, d = 16, h = s = 1: norm less 1 against factor less 1, A = {size.A_printed:.0f}"
    return violated(
        left, printed, detail, corrected=corrected, at={"printed at l = 2": at_2, "corrected right side at l = 2": right_at_2}
    )


@claim("eq16", "Theorem 4.2, Eq. 16; Eqs. 63-65", "WRONG AS PRINTED")
def eq16(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2\sim\ell^{2-\epsilon}$: $\|\frac{\partial y_L}{\partial x_1}\|_2\le\omega(1)$, 'a growth strictly
    greater than a constant'
    Correct: the exponents $2-\frac\epsilon2$ and $4-\epsilon$ are above 1: the sums converge and the bound is $O(1)$;
    $\omega(1)$ would be a lower bound
    Severity: false"""
    A, B, epsilon = 1.0, 1.0, 0.75
    p, q, k = 2 - epsilon / 2, 4 - epsilon, layers(1_000_000)
    logs = torch.log1p(A / k**p + B / k**q).cumsum(0)
    growth = float((logs[-1] - logs[999]).exp())
    tail = A * 1000 ** (1 - p) / (p - 1) + B * 1000 ** (1 - q) / (q - 1)
    detail = "growth of the product from L = 10^3 to 10^6: above any constant, say 2; at most exp of the tail of the sum"
    series = ((A, p), (B, q), (-A * A / 2, 2 * p), (-A * B, p + q), (A**3 / 3, 3 * p))  # of log(1 + x), x < 2e-5
    terms = sum(c * (mpmath.zeta(s, 1001) - mpmath.zeta(s, 10**6 + 1)) for c, s in series)
    return violated(
        [2.0, growth],
        [growth, math.inf],
        detail,
        corrected=[math.inf, math.exp(tail)],
        second=[2.0, mpmath.exp(terms)],
        by="Hurwitz zeta functions, mpmath",
    )


@claim("eq17", "Theorem 4.2, Eq. 17", "LOOSE")
def eq17(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2\sim\ell$: $\|\frac{\partial y_L}{\partial x_1}\|_2\le\Theta(L)$
    Correct: Eq. 15 gives $\prod(1 + A\,\ell^{-3/2} + B\,\ell^{-3}) = O(1)$; with the right factor $\frac{1}{\sqrt\ell}$ it is
    $\prod(1 + \frac{A}{\ell} + \frac{B}{\ell^2}) = \Theta(L^A)$, and the statement fails for $A > 1$"""
    L = 1_000_000
    return loose(
        math.exp(log_product(1.0, 1.0, layers(L) ** 1.5)) / L, "the product of Eq. 15 over L at 10^6, A = B = 1", factor=1e4
    )


@claim("eq17-factor", "Theorem 4.2, Eq. 17, with the factor of the chain rule", "DOES NOT FOLLOW")
def eq17_factor(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_L}{\partial x_1}\|_2\le\Theta(L)$ for $\sigma_{x_\ell}^2\sim\ell$
    Correct: the product bound with $\frac{1}{\sqrt\ell}$ for $\frac1\ell$ is $\Theta(L^A)$: it gives $\Theta(L)$ for $A\le1$ only
    Follows: eq59"""
    A, B, logs = 3.0, 1.0, []
    for L in (10_000, 100_000):
        logs.append(log_product(A, B, layers(L)))
    slope = (logs[1] - logs[0]) / math.log(10)
    roots = mpmath.polyroots([1, A, B])  # k^2 + A k + B = (k - r)(k - r')
    ends = [sum(mpmath.loggamma(L + 1 - r) for r in roots) - 2 * mpmath.loggamma(L + 1) for L in (10_000, 100_000)]
    return wrong(
        1.0,
        slope,
        "exponent of L for A = 3, from L = 10^4 to 10^5",
        corrected=A,
        above=0.5,
        below=0.01,
        second=float(mpmath.re(ends[1] - ends[0]) / mpmath.log(10)),
        by="Gamma functions, mpmath",
    )


@claim("sec4.1-conclusion", "Sec. 4.1, after Theorem 4.2", "NOT SEEN AT THIS SIZE", uses=[TransformerBlock])
def conclusion(seed: int) -> Evidence:
    r"""with LNS 'fewer layers act as identity mappings compared to the original Pre-LN'
    Correct: at initialisation the opposite holds: at depth $\ell$ the stream is smaller, but the branch is smaller by
    $\frac{1}{\sqrt\ell}$, so $\|J_\ell - I\|$ is below that of Pre-LN. This says nothing about trained models"""
    last = {}
    for name in ("pre", "lns"):
        X = Draw(seed).normal(4, 16)
        for layer in range(1, 32):
            X = make_block(seed, layer, name)(X)
        J = block_jacobian(make_block(seed, 32, name), X)
        last[name] = float((J - torch.eye(64, dtype=torch.float64)).norm() / 8)
    ratio = last["lns"] / last["pre"]
    return measured(ratio, ratio < 0.9, f"rms of J - I at block 32, LNS {last['lns']:.3f} over Pre-LN {last['pre']:.3f}")
