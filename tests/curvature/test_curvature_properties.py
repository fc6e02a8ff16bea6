"""What holds for every Hessian: splitting, decomposition, symmetry, repeatability, precision, scale, and the report."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, gauss_newton, largest_error, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.dense import spectral_norm

LABELS = torch.tensor([[0, 3, 1], [2, -100, 0], [1, 1, -100]])
LOSSES: dict[str, tuple[Tensor, Any]] = {"mse": (draw(3, 3, 4, seed=7), mse), "cross_entropy": (LABELS, cross_entropy)}


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(4, 5, **{"d_k": 2, "activation": "gelu", **options}))


def test_progress_counts_samples():
    for size, expected in ((2, [(2, 3), (3, 3)]), (1, [(1, 3), (2, 3), (3, 3)]), (3, [(3, 3)])):
        seen: list[tuple[int, int]] = []
        hk.hessian(block(), draw(3, 3, 4), draw(3, 3, 4), batch_size=size, progress=lambda *at, seen=seen: seen.append(at))
        assert seen == expected
    for size in (0, -1):
        with pytest.raises(hk.InputError, match=f"batch_size={size} leaves no sample"):
            hk.hessian(block(), draw(3, 3, 4), draw(3, 3, 4), batch_size=size)


def mixed(*rows):
    """A module that mixes these samples of six, and leaves the others apart."""
    first = draw(6, 4)[list(rows), :1]

    def forward(s, x):
        y, both = torch.tanh(x @ s.W), torch.isin(x[:, :1], first)
        return y + both * (y * both).sum(0)

    return forward


MIXING = {
    **{f"samples {i} and {j}": mixed(i, j) for i, j in ((2, 3), (1, 3), (1, 5))},  # apart in one binary digit, each another
    "mean of the batch": lambda s, x: torch.tanh(x @ s.W) - torch.tanh(x @ s.W).mean(0),
    "behind a gate that is closed": lambda s, x: x @ s.W + s.a * torch.tanh(x @ s.W).mean(0),
    "in groups of two": lambda s, x: (x @ s.W) * torch.tanh(x @ s.W).unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "the last two": lambda s, x: torch.cat([torch.tanh(x[:-2] @ s.W), torch.tanh(x[-2:] @ s.W).softmax(0)]),
    "by attention over samples": lambda s, x: torch.softmax(x @ s.W @ x.T, -1) @ x,
}


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_are_mixed_are_kept_together(name, size):
    module, x, target = Formula(MIXING[name], W=(4, 4), a=(1,)), draw(6, 4), draw(6, 4, seed=7)
    module.a.data.zero_()
    found = hk.hessian(module, x, target, batch_size=size)
    assert largest_error(found, reverse_over_reverse(module, x, target, mse)) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_outer_part_is_gauss_newton(loss):
    module, x, (target, function) = block(), draw(3, 3, 4), LOSSES[loss]
    found = hk.hessian(module, x, target, loss=loss)
    outer, expected = found.outer(), gauss_newton(module, x, target, function)
    assert (outer - expected).abs().max() <= 1e-13 * outer.abs().max()
    assert torch.equal(outer, outer.T)
    assert (outer + found.functional() - found.matrix).abs().max() <= 1e-15 * found.matrix.abs().max()
    assert float(torch.linalg.eigvalsh(outer)[0]) >= -1e-14 * float(outer.abs().max())


def test_a_linear_model_has_no_functional_part():
    found = hk.hessian(nn.Linear(4, 2).double(), draw(5, 4), torch.tensor([0, 1, 1, -100, 0]), loss="cross_entropy")
    assert torch.equal(found.functional(), torch.zeros(10, 10, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"n_heads": 2, "placement": "pre", "norm": "rmsnorm"}])
def test_symmetric_and_repeatable_to_the_bit(options):
    x, target = draw(3, 3, 4), draw(3, 3, 4, seed=7)
    runs = [hk.hessian(block(**options), x, target) for _ in range(2)]
    assert torch.equal(runs[0].matrix, runs[0].matrix.T)
    assert torch.equal(runs[0].matrix, runs[1].matrix)
    assert torch.equal(runs[0].outer(), runs[1].outer())
    assert runs[0].loss == runs[1].loss


@pytest.mark.parametrize("options", [{}, {"placement": "pre", "norm": "rmsnorm", "n_heads": 2}])
@pytest.mark.parametrize("loss", LOSSES)
def test_single_precision(loss, options):
    """Within 1e-5 of the double-precision matrix's largest entry: about a hundred roundings of float32."""
    module, x, (target, _) = block(**options), draw(3, 3, 4), LOSSES[loss]
    double = hk.hessian(module, x, target, loss=loss)
    target = target.float() if loss == "mse" else target
    single = hk.hessian(module.float(), x.float(), target, loss=loss)
    assert single.matrix.dtype == torch.float32
    assert (single.matrix.double() - double.matrix).abs().max() <= 1e-5 * double.matrix.abs().max()
    assert torch.equal(single.matrix, single.matrix.T)


# The report -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> hk.Hessian:
    return hk.hessian(block(), draw(3, 3, 4), draw(3, 3, 4, seed=7))


def test_norms_and_eigenvalues(report):
    matrix = report.matrix.numpy()
    assert report.spectral_norm() == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-12)
    assert report.frobenius_norm() == pytest.approx(np.linalg.norm(matrix), rel=1e-14)
    assert np.allclose(report.eigvalsh().numpy(), np.linalg.eigvalsh(matrix), rtol=0, atol=1e-13 * abs(matrix).max())
    for i, j in report.pairs():
        part = report.block(i, j).numpy()
        assert report.spectral_norm(i, j) == pytest.approx(np.linalg.norm(part, 2), rel=1e-10)
        assert report.frobenius_norm(i, j) == pytest.approx(np.linalg.norm(part), rel=1e-14)
    assert report.spectral_norm("norm_1.bias") == report.spectral_norm("norm_1.bias", "norm_1.bias")


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (1, 1), (520, 520)])
def test_spectral_norm(shape):
    a = draw(*shape)
    assert spectral_norm(a) == pytest.approx(np.linalg.norm(a.numpy(), 2), rel=1e-12)
    if shape[0] == shape[1]:
        symmetric = a + a.T - 3 * torch.eye(shape[0], dtype=a.dtype)
        assert spectral_norm(symmetric, symmetric=True) == pytest.approx(np.linalg.norm(symmetric.numpy(), 2), rel=1e-10)
    for c in (1e-200, 1e200):
        assert spectral_norm(c * a) == pytest.approx(c * np.linalg.norm(a.numpy(), 2), rel=1e-12)
    assert spectral_norm(torch.zeros(shape)) == 0.0


def test_blocks_slices_and_names(report):
    module = block()
    assert report.names == tuple(n for n, _ in module.named_parameters())
    assert report.shapes == {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert [report.slices[n].start for n in report.names[1:]] == [report.slices[n].stop for n in report.names[:-1]]
    assert report.block("attention.W_Q", "norm_1.bias").shape == (8, 4)
    assert torch.equal(report.block("norm_1.bias", "attention.W_Q").T, report.block("attention.W_Q", "norm_1.bias"))
    assert len(list(report.pairs())) == 9 * 10 // 2
    assert report.short_names[:4] == ("W_Q", "W_K", "W_V", "norm_1.weight")
    with pytest.raises(hk.InputError, match=r"no parameter 'W_Q'; did you mean 'attention\.W_Q'"):
        report.block("W_Q", "attention.W_Q")


def test_short_names_tell_parameters_apart():
    found = hk.hessian(Formula(lambda s, x: x @ s.W @ s.V, W=(4, 2), V=(2, 2)), draw(3, 4), draw(3, 2))
    assert found.short_names == ("W", "V")
    stack = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).double()
    assert hk.hessian(stack, draw(3, 4), draw(3, 2)).short_names == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_dictionary_is_plain_data(report):
    read = json.loads(json.dumps(report.to_dict()))
    assert read["parameters"] == report.matrix.shape[0]
    assert read["dtype"] == "torch.float64"
    assert read["shapes"]["attention.W_Q"] == [4, 2]
    assert read["fallbacks"] == []
    assert len(read["blocks"]) == 45
    first = read["blocks"][0]
    assert (first["row"], first["column"]) == ("attention.W_Q", "attention.W_Q")
    assert first["spectral_norm"] == report.spectral_norm("attention.W_Q")


def test_what_it_prints(report):
    size = report.matrix.shape[0]
    for text in (report.table(), report._repr_html_()):
        assert f"{size} x {size}" in text
        assert all(name in text for name in report.names)
        assert f"{report.frobenius_norm('norm_2.bias'):.4g}" in text
        assert "differentiated automatically" not in text
    assert "4 x 2" in report.table()
    fallback = hk.hessian(Formula(lambda s, x: torch.sinc(x @ s.W), W=(4, 2)), draw(3, 4), draw(3, 2))
    assert "differentiated automatically: aten.sinc.default" in fallback.table()
    assert "aten.sinc.default" in fallback._repr_html_()
