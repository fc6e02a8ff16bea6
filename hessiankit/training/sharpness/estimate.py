r"""A mean over label draws, with its standard error and a confidence interval.

Replicates x[k, d] of micro-batch k and draw d: independent, within a micro-batch identically distributed, each a sum of squares
of nearly Gaussian scores, sum_i lambda_i z_i^2, so positive and skewed. The estimate is X = sum_k w_k mean_d x[k, d]; its
variance V = sum_k w_k^2 s_k^2 / D takes nothing from the differences between micro-batches, which are no noise. A t-interval
covers too seldom: where X happens to be small, V is too. So X is taken for a constant plus a gamma variable, X = (1 - 1/rho) X
+ Y:

    rho = X / sqrt(D V), between 1 and 2
    Y = X / rho,  q = V / (Y^2 - V)                                        (E V / E Y^2 = q / (1 + q))
    tau^2 = log(1 + q),  log Y ~ N(log E Y - tau^2 / 2, tau^2)
    1 / m = 1 / m_V + q,  m_V = (D + 1) V^2 / sum_k (w_k^2 s_k^2 / D)^2 - 2    (m at least 1)
    from X - Y + Y exp(tau^2 / 2 - t_m tau) to X - Y + Y exp(tau^2 / 2 + t_m tau)

rho is the skewness relative to that of a gamma variable of the same mean and variance, (sum lambda)(sum lambda^3) / (sum
lambda^2)^2, at least 1 and at most (sum lambda) / sqrt(sum lambda^2). Too noisy to be estimated from a few draws, it was 1.1 to
2.2 for the block types of the models in figures/sharpness_coverage.py: a bulk with a few large directions. m_V is
Satterthwaite's number of degrees of freedom of V, without its bias at small D (D - 1 for one micro-batch), and q the loss
from the skewness of the x: for a gamma variable Var log q = 2 (1 / m_V + q), up to terms of higher order in 1 / D. Quotients are
estimated on the logarithmic scale by the delta method, with 1 / m = 1 / m_V + 3 max(q): their variance is not correlated with
their value, which for a gamma variable takes 2 q off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scipy.special import ndtri, stdtrit
from torch import Tensor


@dataclass(frozen=True)
class SharpnessEstimate:
    """A number measured with sampled labels.

    Attributes:
        value: The mean over the draws.
        standard_error: Error from the drawing of labels alone, the data as they are; 0 where nothing is drawn, NaN for one draw.
        low: Lower end of the interval for what infinitely many draws would give on the same data.
        high: Upper end.
        entries: Number of entries it is the mean of.
        confidence: Probability with which such an interval is to cover.
        data_standard_error: Error from micro-batch to micro-batch, drawing included, as if they were a random sample of all
            data; None for a single micro-batch.
    """

    value: float
    standard_error: float
    low: float
    high: float
    entries: int
    confidence: float
    data_standard_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, None for numbers that are not finite."""
        return {k: v if v is None or math.isfinite(v) else None for k, v in vars(self).items()}

    @property
    def shown(self) -> tuple[str, str]:
        """Standard error and interval as text: empty for exact values, n.a. where they are not known.

        >>> nan = math.nan
        >>> SharpnessEstimate(2.0, 1.0, 0.5, 6.0, 1, 0.95).shown, SharpnessEstimate(2.0, nan, nan, nan, 1, 0.95).shown
        (('1', '0.5 to 6'), ('n.a.', 'n.a.'))
        """
        if self.standard_error == 0:
            return "", ""
        error = "n.a." if math.isnan(self.standard_error) else f"{self.standard_error:.1g}"
        return error, "n.a." if math.isnan(self.low) else f"{self.low:.3g} to {self.high:.3g}"

    def __str__(self) -> str:
        error, interval = self.shown
        return f"{self.value:.3g} +- {error} ({self.confidence:.0%}: {interval})" if error else f"{self.value:.4g}"


def estimate(x: Tensor, weights: Tensor, *, entries: int, confidence: float, exact: bool = False) -> SharpnessEstimate:
    """Return the estimate that replicates x (micro-batches, draws) give, with weights (micro-batches,) that sum to 1;
    ``exact``: nothing was drawn, so that there is no error.

    >>> import torch
    >>> result = estimate(torch.tensor([[1.0, 3.0]]).double(), torch.ones(1).double(), entries=1, confidence=0.95)
    >>> result.value, result.standard_error
    (2.0, 1.0)
    """
    value = float(weights @ x.mean(1))
    batch_error = _between(x.mean(1), weights)
    if exact:
        return SharpnessEstimate(value, 0.0, value, value, entries, confidence, batch_error)
    variance, freedom = _variance(x, weights)
    low, high = _interval(value, variance, freedom, x.shape[1], confidence)
    return SharpnessEstimate(value, math.sqrt(variance), low, high, entries, confidence, batch_error)


def ratio(
    top: Tensor, bottom: Tensor, weights: Tensor, *, entries: int, confidence: float, exact: bool = False
) -> SharpnessEstimate:
    """Return the quotient of two means from the same draws, on the logarithmic scale by the delta method; as
    :func:`estimate`.

    >>> import torch
    >>> ones = torch.ones(1, 4).double()
    >>> ratio(6 * ones, 2 * ones, torch.ones(1).double(), entries=1, confidence=0.95).value
    3.0
    """
    numerator, denominator = float(weights @ top.mean(1)), float(weights @ bottom.mean(1))
    if denominator == 0.0:
        value = math.nan if numerator == 0.0 else math.inf
        return SharpnessEstimate(value, math.nan, 0.0, math.inf, entries, confidence)
    value = numerator / denominator
    if exact or numerator == 0.0:
        return SharpnessEstimate(value, 0.0 if exact else math.nan, value, value, entries, confidence)
    difference = top / numerator - bottom / denominator
    variance, freedom = _variance(difference, weights)
    batch_error = _between(value * difference.mean(1), weights)
    spreads = [_spread(mean, _variance(x, weights)[0]) for mean, x in ((numerator, top), (denominator, bottom))]
    if math.isnan(variance) or math.isinf(max(spreads)):
        interval = (math.nan, math.nan) if math.isnan(variance) else (0.0, math.inf)
        return SharpnessEstimate(value, value * math.sqrt(variance), *interval, entries, confidence, batch_error)
    centre = math.log(value) + (spreads[0] - spreads[1]) / 2
    half = _quantile(confidence, _reduced(freedom, 3 * max(math.expm1(spread) for spread in spreads))) * math.sqrt(variance)
    return SharpnessEstimate(
        value, value * math.sqrt(variance), _exp(centre - half), _exp(centre + half), entries, confidence, batch_error
    )


def _variance(x: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the variance of the weighted mean, from the draws of each micro-batch alone, and its degrees of freedom."""
    draws = x.shape[1]
    if draws < 2:
        return math.nan, math.nan
    parts = weights.square() * x.var(1, unbiased=True) / draws
    variance, squares = float(parts.sum()), float(parts.square().sum())
    if squares == 0.0:
        return 0.0, math.inf
    return variance, max((draws + 1) * variance**2 / squares - 2, draws - 1)


def _between(means: Tensor, weights: Tensor) -> float | None:
    """Return the standard error of the weighted mean from the differences between micro-batches (a ratio estimate's)."""
    k = means.shape[0]
    if k < 2:
        return None
    deviations = weights * (means - weights @ means)
    return math.sqrt(k / (k - 1) * float(deviations.square().sum()))


def _interval(value: float, variance: float, freedom: float, draws: int, confidence: float) -> tuple[float, float]:
    if math.isnan(variance):
        return math.nan, math.nan
    if variance == 0.0:
        return value, value
    rho = min(max(value / math.sqrt(draws * variance), 1.0), 2.0)
    gamma_mean = value / rho
    tau2 = _spread(gamma_mean, variance)
    if math.isinf(tau2):
        return 0.0, math.inf
    half = _quantile(confidence, _reduced(freedom, math.expm1(tau2))) * math.sqrt(tau2)
    return value - gamma_mean + gamma_mean * _exp(tau2 / 2 - half), value - gamma_mean + gamma_mean * _exp(tau2 / 2 + half)


def _spread(value: float, variance: float) -> float:
    """Return log(1 + q) for q = V / (X^2 - V); infinite where the noise is as large as the value."""
    rest = value**2 - variance
    return math.log1p(variance / rest) if rest > 0 else math.inf


def _reduced(freedom: float, q: float) -> float:
    """Return a variance's reduced degrees of freedom."""
    reciprocal = 1.0 / freedom + q
    return max(1.0 / reciprocal, min(freedom, 1.0)) if reciprocal else math.inf


def _quantile(confidence: float, freedom: float) -> float:
    level = 0.5 + confidence / 2
    return float(ndtri(level) if math.isinf(freedom) else stdtrit(freedom, level))


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.0 else math.inf


def as_weights(terms: Tensor) -> Tensor:
    """Return each micro-batch's share of the terms, float64."""
    return terms.double() / terms.sum()
