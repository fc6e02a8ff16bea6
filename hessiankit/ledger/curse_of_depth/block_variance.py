"""Assumption 3.1 and Appendix A.1: what a block adds to the variance of the stream."""

from __future__ import annotations

import math

import torch

from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import Network, rms_norm
from hessiankit.ledger.curse_of_depth.variance import var
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import wrong
from hessiankit.ledger.registry import claim

ROUNDS = 0.1
"""Relative error allowed to what is estimated from random numbers."""


@claim("curse-of-depth/assumption3.1", "Assumption 3.1", "WRONG AS PRINTED")
def assumption(seed: int) -> Evidence:
    r"""$x_\ell$, $x'_\ell$ and $W_\ell$ are normal and independent

    Correct: $x'_\ell = x_\ell + \mathrm{Attn}(\mathrm{LN}(x_\ell))$ and $x_\ell$ have correlation
    $\sigma_{x_\ell}/\sigma_{x'_\ell}$ where the weights are fresh; with $\rho = 0$ the term $1/\sigma_x$ of Eq. 6 vanishes
    """
    draw, N = Draw(seed), 256
    X = draw.normal(N, N, std=2.0)
    Y = X + rms_norm(X) @ draw.normal(N, N, std=1 / math.sqrt(N))
    found = torch.corrcoef(torch.stack([X.reshape(-1), Y.reshape(-1)]))[0, 1]
    return wrong(0.0, found, "correlation of x' and x", corrected=math.sqrt(var(X) / var(Y)), below=0.02)


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
    return wrong(printed, var(total), f"{branches} correlated branches, sample covariances", corrected=corrected, above=0.05)


@claim("curse-of-depth/eq21", "App. A.1, Eq. 21", "WRONG AS PRINTED")
def eq21(seed: int) -> Evidence:
    r"""$\mathrm{Var}(x'_\ell) = \mathrm{Var}(x_\ell) + \mathrm{Var}(\mathrm{Attn}) +
    \mathrm{Cov}(\mathrm{Attn},\mathrm{Var}(x_\ell)) = \sigma_{x_\ell}^2 + \sigma_{\mathrm{Attn}}^2 +
    \rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}}$

    Correct: $+\,2\,\mathrm{Cov}(\mathrm{Attn}, x_\ell) = 2\rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}}$
    """
    return variance_row(seed, 1)


@claim("curse-of-depth/eq22", "App. A.1, Eq. 22", "WRONG AS PRINTED")
def eq22(seed: int) -> Evidence:
    r"""$\sigma_{x_{\ell+1}}^2 = \sigma_{x'_\ell}^2 + \sigma_{\mathrm{FFN}}^2 + \rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$

    Correct: $2\rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$
    """
    return variance_row(seed + 1, 1)


@claim("curse-of-depth/eq23", "App. A.1, Eq. 23", "WRONG AS PRINTED")
def eq23(seed: int) -> Evidence:
    r"""$\sigma_{x_{\ell+1}}^2 = \sigma_{x_\ell}^2 + \sigma_{\mathrm{Attn}}^2 + \sigma_{\mathrm{FFN}}^2 +
    \rho_1\sigma_{x_\ell}\sigma_{\mathrm{Attn}} + \rho_2\sigma_{x'_\ell}\sigma_{\mathrm{FFN}}$

    Correct: both covariances twice
    """
    return variance_row(seed, 2)


@claim("curse-of-depth/lemma-a1", "Lemma A.1, Eq. 26", "WRONG AS PRINTED")
def lemma_a1(seed: int) -> Evidence:
    r"""for i.i.d. $X_i$ with finite variance $\lim\mathbb{E}[\sum_i(p_i - \frac1n)^2] = 0$, $p = \mathrm{softmax}(X)$

    Correct: it needs $\mathbb{E}\,e^{2X} < \infty$ or the like: logits with the tail $P(X > t) = t^{-3}$ put all weight on
    one
    """
    draw, N, rounds = Draw(seed), 100_000, 20
    p = (draw.uniform(rounds, N, low=1e-12) ** (-1 / 3)).softmax(1)
    found, light = (p - 1 / N).square().sum(1).mean(), (draw.normal(N).softmax(0) - 1 / N).square().sum()
    detail = f"the expectation with 10^5 logits of that tail (Gaussian ones: {float(light):.1e}); one weight for all of it"
    return wrong(0.0, found, detail, corrected=p.amax(1).square().mean(), below=0.05)


@claim("curse-of-depth/lemma-a1-uniform", "Lemma A.1, below Eq. 26", "WRONG AS PRINTED")
def lemma_a1_uniform(seed: int) -> Evidence:
    r"""the softmax becomes 'asymptotically indistinguishable, in expectation, from the uniform distribution'

    Correct: for standard normal logits the distance $\frac12\sum_i|p_i - \frac1N|$ tends to $2\Phi(\frac12) - 1 = 0.383$; the
    sum of squares in Eq. 26 is at most $\max_ip_i$ and tells little
    """
    N = 200_000
    distance = (Draw(seed).normal(N).softmax(0) - 1 / N).abs().sum() / 2
    return wrong(0.0, distance, "the distance with 2 10^5 logits", corrected=math.erf(0.5 / math.sqrt(2)), below=0.03)


@claim("curse-of-depth/eq27", "App. A.1.1, Eq. 27", "WRONG AS PRINTED")
def eq27(seed: int) -> Evidence:
    r"""for uniform attention $\mathrm{Var}(AV) = \frac1n\sum_id_{\mathrm{head}}\mathrm{Var}(V_i) =
    d_{\mathrm{head}}\sigma_V^2 = \sigma_W^2d$

    Correct: $\sigma_V^2/n$ with $\sigma_V^2 = d\,\sigma_W^2$ for $n$ independent tokens, $\sigma_V^2$ for equal ones; the
    output projection is missing
    """
    draw, n, d, d_head, std = Draw(seed), 16, 64, 64, 0.05
    values = [var((rms_norm(draw.normal(n, d)) @ draw.normal(d, d_head, std=std)).mean(0)) for _ in range(100)]
    found = sum(values) / len(values)
    printed = [d_head * d * std**2, d * std**2]  # the two right sides
    return wrong(printed, found, "16 tokens, 100 draws", corrected=d * std**2 / n, above=5, below=ROUNDS)


@claim("curse-of-depth/eq29", "App. A.1.2, Eq. 29", "WRONG AS PRINTED")
def eq29(seed: int) -> Evidence:
    r"""$\sigma_{\mathrm{FFN}}^2\sim\sigma_{W_1}^2\cdot\sigma_{W_2}^2 = \sigma_W^4$

    Correct: $\frac12d\,d_{\mathrm{ffn}}\sigma_W^4$ for ReLU ($d\,d_{\mathrm{ffn}}\sigma_W^4$ without activation); Eq. 31 has
    $d^2$ in its place
    """
    draw, d, d_ff, std = Draw(seed), 64, 256, 0.0693
    values = [var(Network.draw(draw, d, d_ff, std)(rms_norm(draw.normal(64, d)))) for _ in range(20)]
    found = sum(values) / len(values)
    printed = [std**4, std**4 * d**2]
    return wrong(printed, found, "20 draws; also Eq. 31's d^2", corrected=d * d_ff * std**4 / 2, above=0.3, below=ROUNDS)


@claim("curse-of-depth/eq30-correlation", "App. A.1.2, Eq. 30, second line", "WRONG AS PRINTED")
def eq30_correlation(seed: int) -> Evidence:
    r"""$\sigma_x^2 + \sigma_W^2 + \rho_2\sigma_x\sigma_W = \sigma_x^2\left(1 + \frac{\sigma_W}{\sigma_x} +
    \frac{\sigma_W^2}{\sigma_x^2}\right)$

    Correct: $\rho_2$ stays: $\frac{\rho_2\sigma_W}{\sigma_x}$; without it $\Theta(1 + \frac{1}{\sigma_x})$ of the third line
    needs $\rho_2 > 0$
    """
    x, w, rho = (float(v) for v in Draw(seed).uniform(3, low=0.2, high=0.8))
    left = x * x + w * w + rho * x * w
    return wrong(x * x * (1 + w / x + w * w / x**2), left, "random numbers", corrected=x * x * (1 + rho * w / x + w * w / x**2))


@claim("curse-of-depth/eq31", "App. A.1.2, Eq. 31, second line", "WRONG AS PRINTED")
def eq31(seed: int) -> Evidence:
    r"""$\rho_2\sigma_{x'}\sigma_W^2d\approx\rho_2\sigma_x\sigma_W^2d + \frac{\rho_2\sigma_W^4d^2}{2\sigma_x} +
    \frac{\rho_2^2\sigma_W^3d\,\sigma_x}{2}$ for $\sigma_{x'} = \sigma_x\sqrt{1 + \frac{\sigma_W^2}{\sigma_x^2} +
    \rho_2\frac{\sigma_W}{\sigma_x}}$

    Correct: $\frac{\rho_2\sigma_W^4d}{2\sigma_x} + \frac{\rho_2^2\sigma_W^3d}{2}$: $d$, not $d^2$, and no $\sigma_x$
    """
    x, w, rho = (float(v) for v in Draw(seed).uniform(3, low=0.3, high=0.8))
    d, t = 64.0, torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = rho * x * w**2 * d * (1 + t * (w**2 / x**2 + rho * w / x)).sqrt()
    (first_order,) = torch.autograd.grad(value, t)
    printed = rho * w**4 * d**2 / (2 * x) + rho**2 * w**3 * d * x / 2
    corrected = rho * w**4 * d / (2 * x) + rho**2 * w**3 * d / 2
    return wrong(printed, first_order, "first order of the root by autograd", corrected=corrected, above=0.1)
