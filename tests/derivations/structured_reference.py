"""What every structured block must satisfy beside its numbers: transposes, actions and norm bounds agree with its dense form."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from derivations.arrays import Array, as_array, to_float
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


def integers(seed: int, *shape: int) -> Array:
    """An object array of small Fractions."""
    drawn = np.random.default_rng(seed).integers(1, 7, shape)
    return np.frompyfunc(lambda n: Fraction(int(n), 2), 1, 1)(drawn)


def check_exact_equals_floats(exact: Any, floating: Any) -> None:
    """Compare the blocks of one operation at Fractions and at the tensors of the same numbers: no rounding may show."""
    like = as_array([Fraction(1)])
    assert torch.equal(to_float(exact.value), floating.value)
    for i in exact.arguments:
        assert torch.equal(to_float(exact.jacobian(i).dense(like)), floating.jacobian(i).dense())
        for j in exact.arguments:
            assert torch.equal(to_float(exact.hessian(i, j).dense(like)), floating.hessian(i, j).dense())
