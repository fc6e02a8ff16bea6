"""Iterates of the Krylov methods, step by step, against SciPy's, and when they stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import linalg as scipy
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from hessiankit.curvature import krylov


def problem(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a symmetric matrix with some eigenvalues, and a right-hand side."""
    generator = torch.Generator().manual_seed(0)
    size = len(values)
    Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return (Q * values) @ Q.T, torch.randn(size, generator=generator, dtype=torch.float64)


POSITIVE = torch.linspace(0.5, 3.0, 12, dtype=torch.float64)
INDEFINITE = POSITIVE * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6)
SINGULAR = torch.where(torch.arange(12) < 4, 0.0, INDEFINITE)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_iterates_are_scipys(steps: int, preconditioned: bool) -> None:
    A, b = problem(POSITIVE)
    B, c = problem(INDEFINITE)
    M = 1 / A.diagonal()
    inverse = LinearOperator(A.shape, matvec=lambda v: M.numpy() * v.reshape(-1), dtype=np.float64) if preconditioned else None
    precondition = (lambda v: M * v) if preconditioned else None
    pairs = [
        (
            krylov.conjugate_gradients(A.mv, b, precondition=precondition, tol=0.0, most=steps),
            scipy.cg(A.numpy(), b.numpy(), rtol=0.0, maxiter=steps, M=inverse)[0],
        ),
        (
            krylov.minres(B.mv, c, precondition=precondition, tol=0.0, most=steps),
            scipy.minres(B.numpy(), c.numpy(), rtol=0.0, maxiter=steps, M=inverse)[0],
        ),
    ]
    if not preconditioned:
        expected = scipy.lsmr(B.numpy(), c.numpy(), atol=0.0, btol=0.0, conlim=0.0, maxiter=steps)[0]
        pairs.append((krylov.lsmr(B.mv, c, tol=0.0, most=2 * steps + 1), expected))
    for x, y in pairs:
        assert np.abs(x.numpy() - y).max() <= 1e-9 * np.abs(y).max()


@pytest.mark.parametrize("tol", [0.5, 0.4, 0.3, 0.2, 0.1, 1e-3])
def test_lsmr_stops_where_its_own_measure_of_the_residual_says(tol: float) -> None:
    """On a system with a solution |r| falls below tol |b| at the step at which it stops, and not at the one before."""
    A, b = problem(torch.logspace(0, -2, 60, dtype=torch.float64) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(30))
    count = 0

    def product(v: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return A @ v

    x = krylov.lsmr(product, b, tol=tol, most=1000)
    before = krylov.lsmr(A.mv, b, tol=0.0, most=count - 2)
    assert float((b - A @ x).norm()) <= tol * float(b.norm()) < float((b - A @ before).norm())


@pytest.mark.parametrize("method", ["minres", "lsmr"])
def test_a_system_without_a_solution_ends_in_least_squares(method: str) -> None:
    A, b = problem(SINGULAR)
    if method == "lsmr":
        x = krylov.lsmr(A.mv, b, tol=1e-9, most=1000)
    else:
        x = krylov.minres(A.mv, b, precondition=None, tol=1e-9, most=1000)
    least = torch.linalg.lstsq(A, b, rcond=1e-10, driver="gelsd").solution
    assert float((A @ (x - least)).norm()) <= 1e-7 * float(b.norm())
    if method == "lsmr":  # which returns the shortest
        assert float((x - least).norm()) <= 1e-7 * float(least.norm())
