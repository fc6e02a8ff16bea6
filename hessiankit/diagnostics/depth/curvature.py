"""Largest eigenvalue and trace of the loss's Hessian and Gauss-Newton part in the parameters of each block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.curvature.operator import hessian_operator
from hessiankit.diagnostics.depth.autograd_products import HessianProducts
from hessiankit.diagnostics.depth.blocks import WHO
from hessiankit.diagnostics.depth.estimates import Estimator, Measured, trace_of
from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.errors import InputError, OutOfMemoryError, TraceError
from hessiankit.support.files import WithDict
from hessiankit.support.lanczos import RitzValue

KINDS = ("hessian", "ggn")
METHODS = ("auto", "exact", "autograd")
SMALL = 2**15
"""Parameters of all blocks up to which the closed forms are tried first."""


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
    total = sum(p.numel() for block in blocks for p in block.values())
    reason = f"{total:,} parameters in the blocks" if method == "auto" else ""
    if method == "exact" or (method == "auto" and total <= SMALL):
        try:
            return _exact(data, blocks, kind, estimator, tell)
        except (TraceError, InputError, OutOfMemoryError) as error:
            if method == "exact":
                raise
            reason = str(error)
    return replace(_autograd(data, blocks, kind, estimator, tell), reason=reason)


def _exact(
    data: BatchedLoss, blocks: list[dict[str, nn.Parameter]], kind: str, estimator: Estimator, tell: Callable[[int, int], None]
) -> LayerCurvature:
    pairs, everything = data.pairs(), list(dict.fromkeys(name for block in blocks for name in block))
    traces = hessian_diagonal(data.model, pairs, loss=data.loss, params=everything, kind=kind, max_products=None).traces
    top = []
    for k, block in enumerate(blocks):
        tell(k, len(blocks))
        operator = hessian_operator(data.model, pairs, loss=data.loss, params=list(block), kind=kind)
        top.append(estimator.largest_eigenvalue(operator.__matmul__, operator.gradient))
    trace = tuple(Measured(sum(traces[name] for name in block)) for block in blocks)
    return LayerCurvature(kind, tuple(top), trace, "exact", None, _sizes(blocks))


def _autograd(
    data: BatchedLoss, blocks: list[dict[str, nn.Parameter]], kind: str, estimator: Estimator, tell: Callable[[int, int], None]
) -> LayerCurvature:
    sizes = _sizes(blocks)
    draws = estimator.draws_for(max(sizes))
    products = HessianProducts(data, [list(block.values()) for block in blocks], kind)
    top, trace = [], []
    for k, size in enumerate(sizes):
        tell(k, len(blocks))
        p = next(iter(blocks[k].values()))
        like = torch.zeros(size, dtype=p.dtype, device=p.device)
        top.append(estimator.largest_eigenvalue(products.of(k), like))
        trace.append(trace_of(products.of(k), like, draws, estimator.seed + k))
    return LayerCurvature(kind, tuple(top), tuple(trace), "autograd", draws, sizes)


def _sizes(blocks: list[dict[str, nn.Parameter]]) -> tuple[int, ...]:
    return tuple(sum(p.numel() for p in block.values()) for block in blocks)
