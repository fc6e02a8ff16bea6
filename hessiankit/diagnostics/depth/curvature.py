"""Largest eigenvalue and trace of the loss's Hessian and Gauss-Newton part in the parameters of each block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.curvature.operator import hessian_operator
from hessiankit.diagnostics.depth.autograd_products import HessianProducts, by_route
from hessiankit.diagnostics.depth.blocks import WHO
from hessiankit.diagnostics.depth.estimates import Estimator, Measured, trace_of
from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.lanczos import RitzValue

KINDS = ("hessian", "ggn")
METHODS = ("auto", "exact", "autograd")
SMALL = 2**15
"""Parameters of all blocks up to which the closed forms are tried first."""
Numbers: TypeAlias = "tuple[RitzValue, Measured]"


@dataclass(frozen=True)
class LayerCurvature(WithDict):
    """The diagonal blocks H_ll of the Hessian of the mean loss over all data, l a layer; or those of its Gauss-Newton part.

    H_ll is the curvature in the parameters of block l alone, without the coupling of layers: lambda_max of the whole Hessian is
    at least the largest of these. It is no invariant: with LayerNorm Scaling written as a gain gamma / sqrt(l), the same function
    has another block in gamma.

    Attributes:
        kind: ``"hessian"`` or ``"ggn"`` (J^T L'' J, without the model's own curvature).
        top: lambda_max by layer.
        trace: Trace by layer.
        method: ``"exact"``: closed forms, the traces exact; ``"autograd"``: two reverse passes a product, the traces exact or
            from random probes.
        draws: Probes of the traces; None where these are exact.
        sizes: Parameters by layer.
        reason: Why ``"auto"`` did not take the closed forms; empty otherwise.
    """

    kind: str
    top: tuple[RitzValue, ...]
    trace: tuple[Measured, ...]
    method: str
    draws: int | None
    sizes: tuple[int, ...]
    reason: str = ""

    def __str__(self) -> str:
        name = "Hessian" if self.kind == "hessian" else "Gauss-Newton"
        how = "closed forms" if self.method == "exact" else "two reverse passes of autograd"
        traces = "exact traces" if self.draws is None else f"traces from {self.draws} random probes"
        worst = max(t.relative for t in self.top)
        why = f" ({self.reason})" if self.reason else ""
        return f"{name} by layer: products by {how}{why}, {traces}; largest residual of lambda_max: {worst:.1e} of it"


def layer_curvature(
    data: BatchedLoss,
    blocks: list[dict[str, nn.Parameter]],
    kind: str,
    *,
    method: str,
    estimator: Estimator,
    tell: Callable[[int, int], None],
) -> LayerCurvature:
    """Return lambda_max and trace of each block's matrix.

    ``"exact"`` takes :func:`hessiankit.hessian_operator` and :func:`hessiankit.hessian_diagonal`, for models small enough to
    be traced; ``"autograd"`` double backward, for any size; ``"auto"`` is exact where the blocks have at most 32768
    parameters in all and a trace succeeds.
    """
    empty = next((k for k, block in enumerate(blocks) if not block), None)
    if empty is not None:
        raise InputError(f"{WHO}: block {empty + 1} has no parameters, so that there is no curvature in them; leave it out")
    sizes = tuple(sum(p.numel() for p in block.values()) for block in blocks)

    def exact() -> tuple[list[Numbers], int | None]:
        pairs, names = data.pairs(), list(dict.fromkeys(name for block in blocks for name in block))
        traces = hessian_diagonal(data.model, pairs, loss=data.loss, params=names, kind=kind, max_products=None).traces

        def of(k: int) -> Numbers:
            operator = hessian_operator(data.model, pairs, loss=data.loss, params=list(blocks[k]), kind=kind)
            top = estimator.largest_eigenvalue(operator.__matmul__, operator.gradient)
            return top, Measured(sum(traces[name] for name in blocks[k]))

        return each(of), None

    def autograd() -> tuple[list[Numbers], int | None]:
        draws = estimator.draws_for(max(sizes))
        products = HessianProducts(data, [list(block.values()) for block in blocks], kind)

        def of(k: int) -> Numbers:
            like = next(iter(blocks[k].values())).new_zeros(sizes[k])
            top = estimator.largest_eigenvalue(products.of(k), like)
            return top, trace_of(products.of(k), like, draws, estimator.seed + k)

        return each(of), draws

    def each(of: Callable[[int], Numbers]) -> list[Numbers]:
        numbers = []
        for k in range(len(blocks)):
            tell(k, len(blocks))
            numbers.append(of(k))
        return numbers

    (numbers, draws), taken, reason = by_route(method, sum(sizes), SMALL, ("exact", exact), autograd)
    top, trace = zip(*numbers, strict=True)
    return LayerCurvature(kind, top, trace, taken, draws, sizes, reason)
