"""Statements of the papers that hold, by definition or in one line: tests in place of rows."""

from __future__ import annotations

import math

import pytest

from papers.curse_of_depth.stacks import attention_head, exponent, layers
from papers.curse_of_depth.variance import grown, var
from papers.curvature_gap.point import point
from papers.drawing import Draw
from papers.notation import norm, rms_norm, spectral
from papers.sharpness_disparity.points import FeedForwardPoint

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_closing_the_curvature_gap_eq13(seed):
    """||dS/dW_1|| <= ||W_2|| ||Y||, and it is not far from it."""
    p = point(seed)
    ratio = spectral(p.first("S", "1")) / (spectral(p.weights["2"]) * spectral(p.block.Y))
    assert 0.1 < ratio <= 1 + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_sharpness_disparity_estimate_for_w_1(seed):
    p = FeedForwardPoint.draw(seed)
    right = norm(p.q) * norm(p.dA) * norm(p.W_2) * norm(p.X_norm)
    assert 0 < norm(p.gradient("W_1")) <= right * (1 + 1e-12)


def test_curse_of_depth_eq52_attention():
    """With its input divided by the root of l, the variance of attention goes as 1 / l where the logits are small."""
    draw = Draw(0)
    N, W = rms_norm(draw.normal(64, 16)), [0.03 * draw.normal(16, 16) for _ in range(3)]
    depths = [1.0, 4.0, 16.0, 64.0]
    variances = [var(attention_head(N / math.sqrt(k), *W)) for k in depths]
    assert abs(exponent(depths, variances) + 1) < 0.05


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_curse_of_depth_variance_with_layernorm_scaling(rho):
    L, c = 200, 0.7
    value, k = float(grown(L, c, rho, lns=True)[-1]), layers(L - 1)
    least, most = 1 + c * c * float((1 / k).sum()), (1 + c * float(k.rsqrt().sum())) ** 2
    assert least * (1 - 1e-12) <= value <= most * (1 + 1e-12)
    assert rho not in (0.0, 1.0) or min(value / least - 1, 1 - value / most) < 1e-12
