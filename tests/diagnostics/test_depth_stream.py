"""Variance, alignment, angles and growth laws against values by hand, and identities that hold before anything is measured."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from depth_reference import language_model, stream_of, tokens

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS, Placement
from hessiankit.blocks.placements import steps
from hessiankit.diagnostics.depth import DepthReport, angular_distance, depth_diagnostics, growth_laws

IDS, LABELS = tokens(3, 5), tokens(3, 5, seed=1)


def test_stream_statistics():
    model = language_model()
    report = depth_diagnostics(model, IDS, what="variance")
    xs = [x.numpy().reshape(15, 4) for x in stream_of(model, IDS)]
    found = report.stream
    assert np.allclose(found.variance, [x.var(axis=1).mean() for x in xs], rtol=1e-12)
    assert np.allclose(found.second_moment, [(x**2).mean() for x in xs], rtol=1e-12)
    for k, (x, y) in enumerate(pairwise(xs)):
        f = y - x
        sizes = np.sqrt((f**2).sum(1)), np.sqrt((x**2).sum(1))
        assert found.rho["block"][k] == pytest.approx(((x * f).sum(1) / sizes[0] / sizes[1]).mean(), rel=1e-12)
        assert found.update_ratio["block"][k] == pytest.approx((sizes[0] / sizes[1]).mean(), rel=1e-12)


def post_in_halves(b, X):
    """A placement of one's own: Y is a norm's output, and the network's norm is given something else."""
    Y = b.norm_1(X + 0.5 * b.attention(X))
    return b.norm_2(Y + 0.5 * b.feedforward(Y))


def test_the_stream_between_the_sub_layers_of_every_placement(monkeypatch):
    """x' is what the block's own equation calls Y: the network's branch starts from it."""
    monkeypatch.setitem(PLACEMENTS, "post-in-halves", Placement("post-in-halves", post_in_halves, "halves", "a test"))
    for name in PLACEMENTS:
        model = language_model(2, name, d_model=4)
        found = depth_diagnostics(model, IDS, what="variance").stream
        assert found.middle_variance is not None, name
        x = model.embedding(IDS).detach()
        if model.embedding_norm is not None:
            x = model.embedding_norm(x).detach()
        for k, block in enumerate(model.blocks):
            with torch.no_grad():
                values = dict(steps(block.own_placement.equation, block, x))
            Y, y = values["Y"], values[""]
            assert found.middle_variance[k] == pytest.approx(float(Y.var(-1, correction=0).mean()), rel=1e-10), name
            for kind, a, b in (("attention", x, Y), ("feedforward", Y, y)):
                cosine = torch.cosine_similarity(a, b - a, dim=-1, eps=0)
                ratio = (b - a).norm(dim=-1) / a.norm(dim=-1)
                assert found.rho[kind][k] == pytest.approx(float(cosine.mean()), rel=1e-9), name
                assert found.update_ratio[kind][k] == pytest.approx(float(ratio.mean()), rel=1e-9), name
            x = y


def test_a_branch_of_zeros_has_no_direction():
    model = language_model(2)
    for p in (model.blocks[0].attention.W_O, model.blocks[0].feedforward.W_2):
        p.data.zero_()
    found = depth_diagnostics(model, IDS, what="variance").stream
    assert found.rho["block"][0] == found.update_ratio["block"][0] == 0.0


def test_angles():
    model = language_model()
    found = depth_diagnostics(model, IDS, what="angles").angles
    xs = stream_of(model, IDS)
    for i in range(4):
        for j in range(4):
            cos = torch.nn.functional.cosine_similarity(xs[i], xs[j], dim=-1, eps=0).clamp(-1, 1)
            d = cos.arccos() / math.pi
            assert float(found.all[i, j]) == pytest.approx(float(d.mean()), abs=3e-8 if i == j else 1e-12)
            assert float(found.last[i, j]) == pytest.approx(float(d[:, -1].mean()), abs=3e-8 if i == j else 1e-12)
    assert found.all.dtype == torch.float64
    assert torch.equal(found.all.diagonal(), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(found.all, found.all.T)
    small = torch.tensor([[1.0, 0.0], [1.0, 1e-9]], dtype=torch.float64)
    assert float(angular_distance(*small)) == pytest.approx(1e-9 / math.pi, rel=1e-12)  # arccos of the cosine is 0


def test_the_triangle_of_angles():
    found = depth_diagnostics(language_model(5), IDS, what="angles").angles
    for raw, square in ((found.by_distance(), found.all), (found.by_distance("last"), found.last)):
        assert raw.shape == (5, 5)
        for n in range(1, 6):
            for k in range(1, 6):
                assert (
                    float(raw[n - 1, k - 1]) == float(square[k - 1, k + n - 1]) if k + n <= 6 else math.isnan(raw[n - 1, k - 1])
                )


LAYERS = np.arange(1, 13, dtype=float)


@pytest.mark.parametrize(
    ("name", "values", "a", "b"),
    [
        ("linear", 0.3 + 2 * LAYERS, 0.3, 2.0),
        ("quadratic", 5 - 0.25 * LAYERS**2, 5.0, -0.25),
        ("logarithmic", 1 + 3 * np.log(LAYERS), 1.0, 3.0),
        ("exponential", 0.5 * np.exp(0.4 * LAYERS), 0.5, 0.4),
        ("exponential", 7 * np.exp(-1.5 * LAYERS), 7.0, -1.5),
        ("exponential", 1e-30 * np.exp(3.7 * LAYERS), 1e-30, 3.7),
    ],
)
def test_each_law_is_found_in_its_own_values(name, values, a, b):
    found = growth_laws(values)
    assert found.best == name
    law = found.laws[name]
    assert law.r_squared == pytest.approx(1.0, abs=1e-9)
    assert (law.a, law.b) == (pytest.approx(a, rel=1e-4), pytest.approx(b, rel=1e-5))
    assert all(other.r_squared < 0.99 for other in found.laws.values() if other.name != name)


def test_exponential_fit_is_the_best_on_the_scale_of_the_variance():
    """Against SciPy's general least squares from several starts."""
    from scipy.optimize import curve_fit

    values = np.array([1.0, 1.3, 2.9, 3.1, 6.0, 11.0, 14.0])
    layers = np.arange(1, 8, dtype=float)
    (a, b), _ = curve_fit(lambda x, a, b: a * np.exp(b * x), layers, values, p0=(1.0, 0.3), xtol=1e-14, ftol=1e-14)
    law = growth_laws(values).laws["exponential"]
    assert (law.a, law.b) == (pytest.approx(a, rel=1e-6), pytest.approx(b, rel=1e-6))


def test_a_variance_that_does_not_change_has_no_law():
    assert growth_laws(1 + 3 * (LAYERS - 1) ** 2).exponent == pytest.approx(2)
    assert math.isnan(growth_laws([2.0, 1.0, 3.0]).exponent)
    found = growth_laws([1.0, 1.0 + 1e-9, 1.0])
    assert found.best == "constant"
    assert math.isnan(found.laws["linear"].r_squared)
    assert "constant" in str(found)
    assert growth_laws([1.0, 1.00001, 1.00002]).best == "linear"  # small, but no rounding


@pytest.mark.parametrize(("placement", "words"), [("pre", "const * L^2"), ("lns", "log L"), ("post", "no law")])
def test_theory_follows_the_placement(placement, words):
    report = depth_diagnostics(language_model(2, placement), IDS, what="variance")
    assert words in str(report)


def test_one_block_has_no_law():
    assert depth_diagnostics(language_model(1), IDS, what="variance").laws is None


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
    lns = language_model(2, "lns")
    pre = twin(lns, "pre")
    with torch.no_grad():
        for layer, block in enumerate(pre.blocks, 1):
            for norm in (block.norm_1, block.norm_2):
                norm.weight.mul_(layer**-0.5)
    what = ("variance", "angles", "drop", "jacobian", "hessian")
    a, b = (depth_diagnostics(model, IDS, LABELS, what=what, exact_below=64) for model in (lns, pre))
    assert_same_function(a, b)
    diagonal = hk.hessian_diagonal(lns, IDS, LABELS, loss="cross_entropy").traces
    for k in range(2):
        gains = diagonal[f"blocks.{k}.norm_1.weight"] + diagonal[f"blocks.{k}.norm_2.weight"]
        expected = a.hessian.trace[k].value + k * gains
        assert b.hessian.trace[k].value == pytest.approx(expected, abs=1e-12)
    assert abs(a.hessian.trace[1].value - b.hessian.trace[1].value) > 1e-5
