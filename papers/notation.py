"""The papers' letters as tensors, so that a printed formula can be written down as it stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from derivations.matrix import Commutation, DiagonalLift


def eye(n: int) -> Tensor:
    """Return I_n."""
    return torch.eye(n, dtype=torch.float64)


def ones(m: int, n: int = 1) -> Tensor:
    """Return the m x n matrix of ones."""
    return torch.ones(m, n, dtype=torch.float64)


def kron(*factors: Tensor) -> Tensor:
    """Return A (x) B (x) ..."""
    return reduce(torch.kron, [factor.contiguous() for factor in factors])


def turn(m: int, n: int) -> Tensor:
    """Return K_{m,n} of Definition 3, K_{m,n} vec(A) = vec(A^T) for A of shape m x n."""
    return dense(Commutation(m, n))


def basis_pairs(n: int) -> Tensor:
    """Return E_n = (e_1 (x) e_1, ..., e_n (x) e_n), n^2 x n."""
    return dense(DiagonalLift(n))


def vec_eye(n: int) -> Tensor:
    """Return vec_r(I_n) as a column."""
    return eye(n).reshape(-1, 1)


def dense(matrix: Any) -> Tensor:
    """Return the matrix of an expression as a tensor."""
    return torch.as_tensor(matrix.dense(), dtype=torch.float64)


def spectral(A: Tensor) -> float:
    """Return the largest singular value."""
    return float(torch.linalg.matrix_norm(A, 2))


def norm(A: Tensor) -> float:
    """Return the Frobenius norm."""
    return float(A.norm())


def layer_norm(X: Tensor) -> Tensor:
    """Return the rows of X, centred and divided by their standard deviation."""
    centred = X - X.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt()


def rms_norm(X: Tensor, eps: float = 0.0) -> Tensor:
    """Return X with every row divided by its root mean square."""
    return X / (X.square().mean(-1, keepdim=True) + eps).sqrt()


def if_it_conforms(build: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return the product, or a tensor without entries if its sizes do not conform: that is an infinite error."""
    try:
        return build(*arguments)
    except RuntimeError as reason:
        if "size" not in str(reason) and "shape" not in str(reason):
            raise
        return torch.empty(0, dtype=torch.float64)
