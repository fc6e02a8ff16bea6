"""What is known of the diagnostics before they are measured: identities, and laws at initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from depth_reference import language_model, tokens

import hessiankit as hk
from hessiankit.blocks import initialise
from hessiankit.diagnostics.depth import DepthReport, depth_diagnostics

IDS, LABELS = tokens(2, 4), tokens(2, 4, seed=1)


def twin(model: hk.Transformer, placement: str, **options) -> hk.Transformer:
    """A model of another placement with the same weights."""
    other = language_model(len(model.blocks), placement, **options)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(weights[name])
    return other


def assert_same_function(a: DepthReport, b: DepthReport) -> None:
    """Everything that depends on the function of the states alone, to rounding."""
    pairs = [
        (a.stream.variance, b.stream.variance),
        (a.stream.rho["block"], b.stream.rho["block"]),
        (a.angles.all.flatten().tolist(), b.angles.all.flatten().tolist()),
        (a.drop.loss_change, b.drop.loss_change),
        ([r.value for r in a.jacobians.rms], [r.value for r in b.jacobians.rms]),
        ([s.value for s in a.jacobians.spectral], [s.value for s in b.jacobians.spectral]),
        ([a.jacobians.gain.value], [b.jacobians.gain.value]),
    ]
    for mine, theirs in pairs:
        x, y = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        assert (x - y).abs().max() <= 1e-10 * x.abs().max()


def test_layernorm_scaling_is_pre_norm_with_gains_over_the_root_of_the_layer():
    """Also: the Hessian in the gains differs by the factor l, the one in all other parameters not at all."""
    lns = language_model(3, "lns")
    pre = twin(lns, "pre")
    with torch.no_grad():
        for layer, block in enumerate(pre.blocks, 1):
            for norm in (block.norm_1, block.norm_2):
                norm.weight.mul_(layer**-0.5)
    what = ("variance", "angles", "drop", "jacobian", "hessian")
    a, b = (depth_diagnostics(model, IDS, LABELS, what=what, exact_below=64) for model in (lns, pre))
    assert_same_function(a, b)
    diagonal = hk.hessian_diagonal(lns, IDS, LABELS, loss="cross_entropy").traces
    for k in range(3):
        gains = diagonal[f"blocks.{k}.norm_1.weight"] + diagonal[f"blocks.{k}.norm_2.weight"]
        expected = a.hessian.trace[k].value + k * gains
        assert b.hessian.trace[k].value == pytest.approx(expected, abs=1e-12)
    assert abs(a.hessian.trace[2].value - b.hessian.trace[2].value) > 1e-5


def test_scaling_in_front_of_the_norm_does_nothing():
    """Table 8's "Before LN" is Pre-LN but for eps: its 0.24 of perplexity is noise."""
    before = language_model(3, "lns-before-ln", eps=0.0)
    what = ("variance", "angles", "drop", "jacobian")
    reports = [depth_diagnostics(m, IDS, LABELS, what=what) for m in (before, twin(before, "pre", eps=0.0))]
    assert_same_function(*reports)
    other = depth_diagnostics(twin(before, "lns", eps=0.0), IDS, LABELS, what=what)
    assert abs(other.stream.variance[-1] / reports[0].stream.variance[-1] - 1) > 1e-2


def deep(placement: str, seed: int, *, n_layers: int = 32, d_model: int = 48, d_ff: int = 96, **options) -> hk.Transformer:
    """A model at initialisation: std 1 / sqrt(2.5 d), and an embedding of a fixed standard deviation."""
    settings = {"norm": "rmsnorm", "causal": True, "rotary": True, "affine": False} | options
    model = hk.Transformer(50, d_model, d_ff, n_layers, 2, placement, initialisation=None, **settings).double()
    return initialise(model, seed=seed, embedding_std=0.6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_variance_grows_linearly_in_pre_norm_and_as_a_logarithm_with_scaling(seed):
    """Independent layers, rho near 0: the lower ends of both bands (claims 7 and 14, corrected)."""
    ids = tokens(4, 16, vocabulary=50)
    for placement, law, other in (("pre", "linear", "logarithmic"), ("lns", "logarithmic", "linear")):
        found = depth_diagnostics(deep(placement, seed), ids, what="variance").laws
        assert found.laws[law].r_squared > 0.95, (placement, str(found))
        assert found.laws[law].r_squared > found.laws[other].r_squared
        assert found.laws[law].r_squared > found.laws["exponential"].r_squared


def test_gain_of_the_stack_is_the_ratio_of_its_sizes_with_branches_of_degree_one():
    """ReLU behind RMSNorm: a random direction grows as the stream does, on average over weights. SwiGLU has degree two: more.

    Without attention, which averages random directions over tokens but not what the tokens share.
    """
    ids = tokens(2, 12, vocabulary=50)
    for activation, low, high in (("relu", 0.88, 1.08), ("swiglu", 1.5, 2.0)):
        ratios = []
        for seed in range(3):
            model = deep("pre", seed, n_layers=12, d_model=32, d_ff=64, activation=activation)
            for block in model.blocks:
                block.attention.W_O.data.zero_()
            report = depth_diagnostics(model, ids, what=("variance", "jacobian"), draws=4, products=2)
            second = report.stream.second_moment
            ratios.append(report.jacobians.gain.value / math.sqrt(second[-1] / second[0]))
        print(activation, ratios)
        assert low < sum(ratios) / 3 < high, (activation, ratios)


def test_angles_at_initialisation_follow_from_the_sizes():
    """Branches at right angles to the stream, on average: cos = sigma_l / sigma_{l+n}."""
    report = depth_diagnostics(deep("pre", 0), tokens(4, 16, vocabulary=50), what=("variance", "angles"))
    sizes = torch.tensor(report.stream.second_moment, dtype=torch.float64).sqrt()
    rows, columns = torch.triu_indices(33, 33, 1)
    expected = (sizes[rows] / sizes[columns]).clamp(max=1).arccos() / math.pi
    error = (report.angles.all[rows, columns] - expected).abs()
    assert error[rows == 0].max() < 0.03
    assert error.mean() < 0.03
    assert error.max() < 0.12
    assert expected.max() - expected.min() > 0.35
