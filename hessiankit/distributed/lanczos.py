"""The largest eigenvalues of an operator that lives on several ranks, by Lanczos: rank 0 decides, the others multiply.

Were every rank to run the iteration by itself, ranks on different processors could round differently, stop after different
numbers of products, and wait for each other forever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from hessiankit.distributed.operator import DistributedOperator
from hessiankit.distributed.ranks import Ranks
from hessiankit.errors import InputError
from hessiankit.operator import HessianOperator

WHO = "top_eigenvalues"
_ENDS = ("LA", "SA", "LM")


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues with what they can be off by: a symmetric matrix has an eigenvalue within ``residuals[i]`` of ``values[i]``.

    Attributes:
        values: From the largest down (``which="SA"``: from the smallest up; ``"LM"``: by size), (k,).
        residuals: ``|H v - value v|`` of the unit vectors v, (k,).
        vectors: The unit vectors, (P, k).
        products: How many products with the operator it took.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    products: int

    def __str__(self) -> str:
        rows = [f"{value:.6g} +- {off:.1e}" for value, off in zip(self.values.tolist(), self.residuals.tolist(), strict=True)]
        return f"{', '.join(rows)} ({self.products} products)"


def top_eigenvalues(
    operator: HessianOperator, k: int = 1, *, which: str = "LA", tol: float = 0.0, max_restarts: int | None = None, seed: int = 0
) -> Eigenvalues:
    """Return the ``k`` largest eigenvalues of an operator by ARPACK's Lanczos iteration, to every rank the same bits.

    The iteration is in double precision, whatever the operator's dtype. Memory on rank 0: about 2 k + 20 vectors.

    Args:
        operator: Of :func:`hessiankit.distributed.hessian_operator`, on every rank of it; or of
            :func:`hessiankit.hessian_operator`.
        k: How many; fewer than there are parameters.
        which: ``"LA"``, the largest; ``"SA"``, the smallest; ``"LM"``, the largest in absolute value.
        tol: Relative accuracy; 0 is that of double precision.
        max_restarts: Restarts of the iteration; by default 10 P.
        seed: Of the first vector.

    Raises:
        InputError: If an argument cannot be used, or the iteration does not converge.
        RankError: If another rank stopped, or did not answer before the process group's time-out.

    The Hessian of mean((x w)^2) over the rows x = (1, 0), (0, 2) is diag(1, 4):

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> round(float(top_eigenvalues(hk.hessian_operator(layer, x, torch.zeros_like(x[:, :1]))).values), 9)
    4.0
    """
    ranks = Ranks(WHO, operator.ranks.group) if isinstance(operator, DistributedOperator) else Ranks.alone(WHO)
    ranks.together(lambda: _check(operator, k, which))
    ranks.agree(k=k, which=which, tol=tol, max_restarts=max_restarts, seed=seed)
    if ranks.rank == 0:
        return _lead(ranks, operator, k, which, tol, max_restarts, seed)
    return _follow(ranks, operator)


def _check(operator: HessianOperator, k: int, which: str) -> None:
    size = operator.shape[0]
    if which not in _ENDS:
        raise InputError(f"{WHO}: which={which!r} is not known; pass one of {', '.join(map(repr, _ENDS))}")
    if not 1 <= k < size:
        raise InputError(f"{WHO}: k={k}, and the operator is {size} x {size}; expected 1 to {size - 1}")


def _lead(
    ranks: Ranks, operator: HessianOperator, k: int, which: str, tol: float, max_restarts: int | None, seed: int
) -> Eigenvalues:
    products = 0

    def multiply(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal products
        given = torch.from_numpy(np.ascontiguousarray(vectors)).to(operator.device, operator.torch_dtype)
        products += 1 if given.ndim == 1 else given.shape[1]
        ranks.broadcast(given.cpu())
        return (operator @ given).to("cpu", torch.float64).numpy()

    start = np.random.default_rng(seed).standard_normal(operator.shape[0])
    double = LinearOperator(operator.shape, matvec=lambda v: multiply(v.reshape(-1)), dtype=np.dtype(np.float64))
    try:
        values, vectors = eigsh(double, k=k, which=which, tol=tol, v0=start, maxiter=max_restarts)
        off = np.linalg.norm(multiply(vectors) - vectors * values, axis=0)
    except ArpackError as error:
        line = f"ARPACK stopped after {products} products: {error}"
        if isinstance(error, ArpackNoConvergence):
            line = f"{len(error.eigenvalues)} of {k} eigenvalues converged in {products} products; raise max_restarts or tol"
        ranks.broadcast(line)
        raise InputError(f"{WHO}: {line}") from error
    by_size = {"LA": -values, "SA": values, "LM": -np.abs(values)}[which]
    order = np.argsort(by_size, kind="stable")
    found, residuals, basis = (torch.from_numpy(x) for x in (values[order], off[order], vectors[:, order].copy()))
    result: Eigenvalues = ranks.broadcast(Eigenvalues(found, residuals, basis, products))
    return result


def _follow(ranks: Ranks, operator: HessianOperator) -> Eigenvalues:
    while True:
        told = ranks.broadcast(None)
        if isinstance(told, Eigenvalues):
            return told
        if isinstance(told, str):
            raise InputError(f"{WHO}: {told}")
        operator @ told.to(operator.device)
