"""Jacobians, lambda_max and trace by layer, by both routes, against dense matrices of autograd."""

from __future__ import annotations

import math

import pytest
import torch
from curvature_reference import gradient_twice
from depth_reference import dense_jacobian, gradient_of, language_model, stream_of, tokens
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.diagnostics.depth import depth_diagnostics
from hessiankit.diagnostics.depth.products import trace_of
from hessiankit.support.errors import InputError, TraceError

IDS, LABELS = tokens(2, 3), tokens(2, 3, seed=1)
LABELS[1, 2] = -100
SHARP = {"tol": 1e-11, "products": 600, "exact_below": 10_000}


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), LABELS.flatten())


def dense_ggn(model: nn.Module, parameters: list[nn.Parameter]) -> torch.Tensor:
    """J^T L'' J with J one row of autograd a logit and L'' = diag p - p p^T in closed form."""
    kept = LABELS.flatten() != -100
    logits = model(IDS).flatten(0, 1)[kept]
    J = torch.stack([gradient_of(z, parameters) for z in logits.flatten()])
    p = logits.softmax(-1).detach()
    curved = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)) / len(p)
    return J.T @ curved @ J


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_against_dense_matrices(placement):
    model = language_model(2, placement, d_model=2, d_ff=3, n_heads=1)
    parameters = [list(block.parameters()) for block in model.blocks]
    dense = {"hessian": [gradient_twice(loss_of(model), own) for own in parameters]}
    dense["ggn"] = [dense_ggn(model, own) for own in parameters]
    for method in ("exact", "autograd"):
        report = depth_diagnostics(model, IDS, LABELS, what=("hessian", "ggn"), curvature=method, **SHARP)
        for what, matrices in dense.items():
            found = getattr(report, what)
            assert (found.method, found.draws) == (method, None)
            for k, matrix in enumerate(matrices):
                assert found.sizes[k] == len(matrix)
                top = float(torch.linalg.eigvalsh(matrix)[-1])
                assert found.top[k].value == pytest.approx(top, rel=1e-10)
                assert found.top[k].converged
                assert abs(found.top[k].value - top) <= found.top[k].residual + 1e-13
                assert abs(found.trace[k].value - float(matrix.trace())) <= 1e-10 * float(matrix.abs().max())
                assert found.trace[k].standard_error == 0


def test_probes_of_the_trace_have_the_errors_that_they_say():
    """Normalised errors of 300 estimates of a matrix's trace: mean about 0, spread about 1 (Student with 15 degrees: 1.07)."""
    A = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = A + A.T
    found = [trace_of(A.matmul, A[0], 16, seed) for seed in range(300)]
    e = torch.tensor([(one.value - float(A.trace())) / one.standard_error for one in found])
    assert abs(float(e.mean())) < 0.25
    assert 0.9 < float(e.std()) < 1.3


def test_probes_of_the_trace():
    model = language_model(2, d_model=2, d_ff=3, n_heads=1)
    options = {"what": "hessian", "curvature": "autograd", "products": 2}
    exact = depth_diagnostics(model, IDS, LABELS, exact_below=10_000, **options).hessian
    found = depth_diagnostics(model, IDS, LABELS, exact_below=0, draws=32, **options).hessian
    assert found.draws == 32
    for a, b in zip(found.trace, exact.trace, strict=True):
        assert 0 < abs(a.value - b.value) < 3.5 * a.standard_error


def test_auto_takes_the_closed_forms_for_small_models_and_says_so(monkeypatch):
    model = language_model(1)
    report = depth_diagnostics(model, IDS, LABELS, what="ggn", products=2)
    assert report.ggn.method == "exact"
    assert "closed forms, exact traces" in str(report)
    monkeypatch.setattr("hessiankit.diagnostics.depth.curvature.SMALL", 10)
    report = depth_diagnostics(model, IDS, LABELS, what="ggn", products=2, exact_below=0)
    assert report.ggn.method == "autograd"
    assert "8 random probes" in str(report)


def test_auto_falls_back_where_a_model_cannot_be_traced(monkeypatch):
    def refuse(*args, **kwargs):
        raise TraceError("trace: the forward of Model branches on a value")

    monkeypatch.setattr("hessiankit.diagnostics.depth.curvature.hessian_operator", refuse)
    report = depth_diagnostics(language_model(1), IDS, LABELS, what="ggn", products=2)
    assert report.ggn.method == "autograd"
    assert "branches on a value" in report.ggn.reason
    assert "branches on a value" in str(report)
    with pytest.raises(TraceError, match="branches on a value"):
        depth_diagnostics(language_model(1), IDS, LABELS, what="ggn", curvature="exact", products=2)


def test_shared_blocks_are_each_given_the_shared_parameters():
    block = hk.TransformerBlock(4, 5, placement="pre").double()
    twin = hk.TransformerBlock(4, 5, placement="pre").double()
    twin.attention.W_Q = block.attention.W_Q
    model = nn.Sequential(block, twin)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    report = depth_diagnostics(model, x, tokens(2, 3, vocabulary=4), what=("gradient", "hessian"), products=2)
    assert report.hessian.sizes[0] == report.hessian.sizes[1]
    assert min(report.gradient) > 0


def test_a_block_without_parameters():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    arguments = Model(), torch.randn(2, 3, 4), tokens(2, 3, vocabulary=4)
    with pytest.raises(InputError, match="block 2 has no parameters"):
        depth_diagnostics(*arguments, blocks="blocks", what="hessian")
    assert depth_diagnostics(*arguments, blocks="blocks", what="gradient").gradient[1] == 0.0


TO_ROUNDING = {"what": "jacobian", "tol": 1e-11, "products": 400}


@pytest.mark.parametrize("placement", ["pre", "post", "lns", "hybridnorm"])
def test_norms_against_dense_jacobians(placement):
    model = language_model(3, placement)
    found = depth_diagnostics(model, IDS, **TO_ROUNDING).jacobians
    xs = stream_of(model, IDS)
    dense = [dense_jacobian(block, x) for block, x in zip(model.blocks, xs, strict=False)]
    n = len(dense[0])
    assert (found.size, found.draws) == (n, None)
    for k, J in enumerate(dense):
        A = J - torch.eye(n, dtype=torch.float64)
        assert found.spectral[k].value == pytest.approx(float(torch.linalg.matrix_norm(A, 2)), rel=1e-10)
        assert found.spectral[k].relative < 1e-10
        assert found.spectral[k].converged
        assert found.rms[k].value == pytest.approx(float(A.norm()) / math.sqrt(n), rel=1e-12)
    whole = dense[2] @ dense[1] @ dense[0]
    assert found.whole_spectral.value == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-10)
    assert found.gain.value == pytest.approx(float(whole.norm()) / math.sqrt(n), rel=1e-10)
    assert found.product_error < 1e-12


def test_the_product_check_sees_a_path_around_the_blocks():
    """A model that gives x_1 to its last block a second time: the product of the blocks is not the whole."""

    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([_Linear(1), _Linear(2)])

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            for block in self.blocks:
                x = block(x, kept)
            return x

    found = depth_diagnostics(Side(), torch.randn(1, 2, 3, dtype=torch.float64), what="jacobian").jacobians
    assert found.product_error > 1e-2


def test_branches_of_zeros_have_norm_zero_without_error():
    model = language_model(2, "pre")
    with torch.no_grad():
        for block in model.blocks:
            for p in (block.attention.W_V, block.feedforward.W_2):
                p.zero_()
    found = depth_diagnostics(model, IDS, what="jacobian").jacobians
    assert [(one.value, one.residual, one.relative) for one in found.spectral] == [(0.0, 0.0, 0.0)] * 2
    assert found.whole_spectral.value == pytest.approx(1.0, rel=1e-12)


class _Linear(nn.Module):
    """A matrix, and 0.5 times what the list holds; puts its input there."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        y = x @ self.W + 0.5 * sum(kept, start=torch.zeros_like(x))
        kept.append(x)
        return y


def test_a_loose_tolerance_gives_a_lower_bound_and_says_so():
    model = language_model(2, seed=1)
    exact = depth_diagnostics(model, IDS, **TO_ROUNDING).jacobians
    report = depth_diagnostics(model, IDS, what="jacobian", products=2)
    for loose, sharp in zip(report.jacobians.spectral, exact.spectral, strict=True):
        assert loose.value < sharp.value
        assert not loose.converged
        assert loose.residual > 1e-3
    assert "ran out of products" in str(report)


def test_probes_agree_with_the_exact_norms_within_their_standard_errors():
    model = language_model(3, d_model=2, d_ff=3, n_heads=1)
    exact = depth_diagnostics(model, IDS, what="jacobian", products=2).jacobians
    found = depth_diagnostics(model, IDS, what="jacobian", products=2, exact_below=0, draws=32).jacobians
    assert found.draws == 32
    for a, b in zip((*found.rms, found.gain), (*exact.rms, exact.gain), strict=True):
        assert 0 < abs(a.value - b.value) < 3.5 * a.standard_error < b.value
