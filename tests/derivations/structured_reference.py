"""What every structured block must satisfy beside its numbers: transposes, actions and norm bounds agree with its dense form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from derivations.matrix import Matrix


def check_structure(matrix: Matrix, like: Tensor, *, sharp: bool = False) -> None:
    """Compare action, transpose and norm bound with the dense matrix; ``sharp`` asks for the norm itself."""
    dense = matrix.dense(like)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(0)
    y, z = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (columns, rows))
    largest = float(dense.abs().max()) or 1.0
    assert tuple(dense.shape) == matrix.shape
    assert float((matrix @ y - dense @ y).abs().max()) <= 1e-12 * largest
    assert float((matrix.T @ z - dense.T @ z).abs().max()) <= 1e-12 * largest
    assert torch.equal(matrix.T.T.dense(like), dense)
    norm, bound = float(torch.linalg.matrix_norm(dense, 2)), matrix.norm_bound()
    assert bound >= norm * (1 - 1e-12)
    if sharp:
        assert abs(bound - norm) <= 1e-12 * norm, (bound, norm)


def check_structure_of_all_blocks(operation: Any, like: Tensor, *, sharp: tuple[str, ...] = ()) -> None:
    """Check every Jacobian and every second derivative; ``sharp`` names the Jacobians whose norm bound is the norm."""
    for i in operation.arguments:
        check_structure(operation.jacobian(i), like, sharp=i in sharp)
        for j in operation.arguments:
            check_structure(operation.hessian(i, j), like)
