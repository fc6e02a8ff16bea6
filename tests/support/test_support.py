"""Lanczos with restarts against dense eigenvalues, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import hessiankit as hk
from hessiankit.support.lanczos import lanczos


def symmetric(size: int, seed: int = 0) -> torch.Tensor:
    A = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.T


def start(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize(("size", "basis"), [(1, 20), (2, 3), (7, 3), (60, 5), (60, 20), (300, 12)])
def test_the_largest_eigenvalue_is_found_with_few_vectors(size, basis):
    A = symmetric(size)
    found = lanczos(A.matmul, start(size), tol=1e-10, most=5000, basis=basis)
    values, vectors = torch.linalg.eigh(A)
    assert found.converged
    assert abs(found.value - float(values[-1])) <= 1e-10 * float(values.abs().max())
    assert abs(float(found.vector @ vectors[:, -1])) > 1 - 1e-10
    assert found.residual == pytest.approx(float((A @ found.vector - found.value * found.vector).norm()), rel=1e-6)


def test_a_negative_matrix_has_its_largest_eigenvalue_too():
    A = -symmetric(30) @ symmetric(30)
    found = lanczos(A.matmul, start(30), tol=1e-9, most=500)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]), abs=1e-7 * float(A.norm()))


def test_when_products_run_out_the_residual_says_so():
    A = symmetric(300)
    counted = []
    found = lanczos(lambda v: counted.append(1) or A @ v, start(300), tol=1e-12, most=10)
    assert found.products == len(counted) == 10
    assert not found.converged
    assert "not converged" in repr(found)
    values = torch.linalg.eigvalsh(A)
    assert found.value < float(values[-1])
    assert (values - found.value).abs().min() <= found.residual


@pytest.mark.parametrize("basis", [4, 20])
def test_a_matrix_that_is_not_symmetric_is_refused(basis):
    A = symmetric(40)
    A[3, 5] += 0.01
    with pytest.raises(hk.InputError, match=r"differ by .* of \|Hv\|, more than rounding"):
        lanczos(A.matmul, start(40), tol=1e-14, most=400, basis=basis)


def test_products_that_are_not_finite_are_refused():
    with pytest.raises(hk.InputError, match="product 1 with the matrix is NaN or infinite"):
        lanczos(lambda v: v / 0 - v / 0, start(5))
