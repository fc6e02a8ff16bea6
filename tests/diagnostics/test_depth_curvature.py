"""lambda_max and trace by layer, by both routes, against dense matrices of autograd."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import gradient_twice
from depth_reference import gradient_of, language_model, tokens
from torch import nn

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
