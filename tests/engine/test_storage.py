"""The matrix that blocks are added to: its lower half is filled from the upper one, and what is not finite shows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hessiankit.engine.storage import SymmetricStorage


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bounds", [[0, 1], [0, 7, 7, 30], [0, 300, 301, 571], [0, 1100, 1200]])
def test_mirror(bounds: list[int], dtype: torch.dtype) -> None:
    n = bounds[-1]
    H = torch.randn(n, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    expected, apart = H.double().numpy().copy(), 0.0
    for first, last in itertools.pairwise(bounds):
        own = expected[first:last, first:last]
        apart = max(apart, np.abs(own - own.T).max(initial=0.0))
        own[:] = (own + own.T) / 2
        expected[last:, first:last] = expected[first:last, last:].T
    slices = {str(k): slice(first, last) for k, (first, last) in enumerate(itertools.pairwise(bounds))}
    matrix = SymmetricStorage(slices, dtype, torch.device("cpu"), data=H)
    asymmetry = matrix.mirror()
    assert matrix.is_finite
    assert asymmetry == pytest.approx(apart / np.abs(np.diagonal(expected)).max(), rel=1e-6)
    np.testing.assert_allclose(H.double().numpy(), expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 3e-7)
    assert torch.equal(H, H.T)
    for at in ((0, 0), (0, n - 1), (n // 2, n - 1), (n // 2, n // 2)):
        broken = H.clone()
        broken[at] = float("nan")
        matrix = SymmetricStorage(slices, dtype, torch.device("cpu"), data=broken)
        matrix.mirror()
        assert not matrix.is_finite
