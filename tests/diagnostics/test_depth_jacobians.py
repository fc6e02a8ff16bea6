"""Jacobians of blocks and of the stack against dense ones, one row of autograd each."""

from __future__ import annotations

import math

import pytest
import torch
from depth_reference import dense_jacobian, language_model, stream_of, tokens
from torch import Tensor, nn

from hessiankit.diagnostics.depth import depth_diagnostics

IDS = tokens(2, 3)
SHARP = {"what": "jacobian", "tol": 1e-11, "products": 400}


@pytest.mark.parametrize("placement", ["pre", "post", "lns", "hybridnorm"])
def test_norms_against_dense_jacobians(placement):
    model = language_model(3, placement)
    found = depth_diagnostics(model, IDS, **SHARP).jacobians
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
    exact = depth_diagnostics(model, IDS, **SHARP).jacobians
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
