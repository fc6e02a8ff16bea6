"""The largest eigenvalues of an operator over ranks, by Lanczos.

Of whole models rank 0 runs the iteration and broadcasts every vector: ranks that iterate by themselves could round differently on
different processors, stop after different numbers of products, and deadlock. Of sharded models no rank has a whole vector, so all
ranks iterate, with the same inner products.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.curvature.operator import HessianOperator
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.lanczos import RitzPairs, extreme_eigenpairs
from hessiankit.training.distributed.operator import ShardedOperator
from hessiankit.training.distributed.ranks import Ranks

LANCZOS = "top_eigenvalues"
ENDS = ("LA", "SA", "LM")
EXACT, ROUGH = 1e-12, 1e-4
"""Relative residuals that are asked for by default, in float64 and in other types."""


def top_eigenvalues(
    operator: HessianOperator, k: int = 1, *, which: str = "LA", tol: float | None = None, max_products: int = 1000, seed: int = 0
) -> RitzPairs:
    """Return the ``k`` largest eigenvalues of an operator with their vectors, to every rank the same bits.

    By the Lanczos iteration of :func:`hessiankit.spectrum`, on rank 0. Memory there: about 2 k + 20 vectors.

    Args:
        operator: Operator of :func:`hessiankit.training.distributed.hessian_operator`, on every rank of it; or of
            :func:`hessiankit.hessian_operator`.
        k: Number of eigenvalues; fewer than there are parameters.
        which: ``"LA"``, the largest, in descending order; ``"SA"``, the smallest, in ascending order; ``"LM"``, those of largest
            absolute value, by that.
        tol: Bound of the residuals, relative to the largest absolute value; by default 1e-12 in float64, 1e-4 in other types.
        max_products: Products with the operator at most.
        seed: Seed of the first vector.

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
    group = getattr(operator, "ranks", None)
    ranks = Ranks(LANCZOS, is_single=True) if group is None else Ranks(LANCZOS, group.group)
    size, dtype = getattr(operator, "size", operator.shape[0]), operator.torch_dtype

    def check() -> None:
        check_name(LANCZOS, "which", which, ENDS)
        if not 1 <= k < size:
            raise InputError(f"{LANCZOS}: k={k}, and the operator is {size} x {size}; expected 1 to {size - 1}")

    ranks.together(check)
    ranks.agree(k=k, which=which, tol=tol, max_products=max_products, seed=seed)
    is_split = isinstance(operator, ShardedOperator)
    if ranks.rank and not is_split:
        return _follow(ranks, operator)

    def multiply(vectors: Tensor) -> Tensor:
        if not is_split:
            ranks.broadcast(vectors.cpu())
        return operator @ vectors

    number = operator._model.position if isinstance(operator, ShardedOperator) else 0  # each piece is drawn by its ranks
    generator = torch.Generator().manual_seed(seed + number)
    start = torch.randn(operator.shape[0], generator=generator, device="cpu").to(operator.device, dtype)
    bottom = 0 if which == "LA" else k
    top = 0 if which == "SA" else min(k, size - bottom)
    tol = tol or (EXACT if dtype == torch.float64 else ROUGH)
    try:
        with operator.whole_vectors() if isinstance(operator, ShardedOperator) else nullcontext():
            pairs = extreme_eigenpairs(
                multiply, start, top=top, bottom=bottom, tol=tol, most=max_products, basis=2 * (top + bottom) + 20
            )
        if not pairs.converged:
            worst = f"{float(pairs.residuals.max()):.1e} after {pairs.products} products"
            raise InputError(f"{LANCZOS}: a residual is {worst}; raise max_products or tol")
    except InputError as error:
        if not is_split:
            ranks.broadcast(str(error))
        raise
    keys = {"LA": -pairs.values, "SA": pairs.values, "LM": -pairs.values.abs()}
    order = keys[which].argsort(stable=True)[:k]
    vectors = pairs.vectors if is_split else pairs.vectors.cpu()
    largest = replace(pairs, values=pairs.values[order], vectors=vectors[order], residuals=pairs.residuals[order])
    return largest if is_split else ranks.broadcast(largest)  # type: ignore[no-any-return]


def _follow(ranks: Ranks, operator: HessianOperator) -> RitzPairs:
    """Multiply by what rank 0 sends, until it sends the result or an error."""
    while isinstance(message := ranks.broadcast(None), Tensor):
        operator @ message.to(operator.device)
    if isinstance(message, str):
        raise InputError(message)
    result: RitzPairs = message
    return result
