"""Largest eigenvalue and trace of the loss's Hessian and Gauss-Newton part in the parameters of each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.diagnostics.depth.blocks import WHO
from hessiankit.diagnostics.depth.estimates import Measured, Ritz, first_vector, trace_of
from hessiankit.diagnostics.depth.recording import Data
from hessiankit.diagnostics.sharpness.batches import MicroBatch
from hessiankit.support.errors import InputError, OutOfMemoryError, TraceError
from hessiankit.support.lanczos import lanczos

Pieces = tuple[Tensor, ...]


class BlockProducts:
    """Products with H_ll for every layer l, of the mean loss over all data.

    The Hessian's are reverse over reverse, H v = d/dtheta <g, v>. The Gauss-Newton part's are J^T (L'' (J v)), with J v as the
    derivative of J^T u in u. The graph of one micro-batch is kept; with several, each product makes all of them anew.

    Args:
        data: The data.
        blocks: The parameters of each block, which require gradients.
        kind: ``"hessian"`` or ``"ggn"``.
    """

    def __init__(self, data: Data, blocks: Sequence[dict[str, nn.Parameter]], kind: str) -> None:
        self.data, self.kind = data, kind
        self.blocks = [list(block.values()) for block in blocks]
        self.everything = list({id(p): p for block in self.blocks for p in block}.values())
        self.terms = sum(data.counts())
        self.kept = self._graph(data.batches[0]) if len(data.batches) == 1 else None

    def of(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return the function v (P_l,) -> H_ll v, l from 0."""
        parameters = self.blocks[k]

        def product(v: Tensor) -> Tensor:
            pieces = tuple(part.view_as(p) for part, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True))
            total = torch.zeros_like(v)
            for batch in self.data.batches:
                graph = self.kept if self.kept is not None else self._graph(batch)
                found = graph.product(parameters, pieces)
                total += torch.cat([x.reshape(-1) for x in found]).detach()
            return total / self.terms

        return product

    def _graph(self, batch: MicroBatch) -> _Hessian | _GaussNewton:
        out = self.data.output(batch)
        target = self.data.target(batch, out)
        if self.kind == "hessian":
            return _Hessian(self.data.summed_loss(out, target), self.everything)
        return _GaussNewton(out, lambda z: self.data.summed_loss(z, target))


class _Hessian:
    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        self.gradients = {id(p): g for p, g in zip(parameters, gradients, strict=True)}

    def product(self, parameters: list[nn.Parameter], v: Pieces) -> Pieces:
        slopes = [
            (g, x) for p, x in zip(parameters, v, strict=True) if (g := self.gradients[id(p)]) is not None and g.requires_grad
        ]
        if not slopes:
            return tuple(map(torch.zeros_like, v))
        outputs, directions = zip(*slopes, strict=True)
        return _grad(outputs, parameters, directions)


class _GaussNewton:
    def __init__(self, out: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        self.out = out
        self.z = out.detach().requires_grad_()
        (self.slope,) = torch.autograd.grad(loss(self.z), self.z, create_graph=True)

    def product(self, parameters: list[nn.Parameter], v: Pieces) -> Pieces:
        u = torch.zeros_like(self.out, requires_grad=True)
        back = torch.autograd.grad(self.out, parameters, u, create_graph=True, retain_graph=True, allow_unused=True)
        pairs = [(b, x) for b, x in zip(back, v, strict=True) if b is not None]
        if not pairs:
            return tuple(map(torch.zeros_like, v))
        outputs, directions = zip(*pairs, strict=True)
        (Jv,) = torch.autograd.grad(outputs, u, directions)
        (curved,) = torch.autograd.grad(self.slope, self.z, Jv, retain_graph=True)
        return _grad((self.out,), parameters, (curved,))


def _grad(outputs: Sequence[Tensor], parameters: list[nn.Parameter], directions: Sequence[Tensor]) -> Pieces:
    found = torch.autograd.grad(outputs, parameters, directions, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True))


KINDS = ("hessian", "ggn")
METHODS = ("auto", "exact", "autograd")
SMALL = 2**15
"""Parameters of all blocks up to which the closed forms are tried first."""


@dataclass(frozen=True)
class LayerCurvature:
    """The diagonal blocks H_ll of the Hessian of the mean loss over all data, l a layer; or those of its Gauss-Newton part.

    H_ll says how sharp the loss is in the parameters of block l alone; what couples layers is not in it, and lambda_max of
    the whole Hessian is at least the largest of these. It is no invariant: with LayerNorm Scaling written as a gain
    gamma / sqrt(l), the same function has another block in gamma.

    Attributes:
        kind: ``"hessian"`` or ``"ggn"`` (J^T L'' J, which drops the model's own curvature).
        top: lambda_max by layer.
        trace: Trace by layer.
        method: ``"exact"``: closed forms, the traces exact; ``"autograd"``: two reverse passes a product, the traces exact or
            from random probes.
        draws: Probes of the traces; None where these are exact.
        sizes: Parameters by layer.
        reason: Why ``"auto"`` left the closed forms aside; empty otherwise.
    """

    kind: str
    top: tuple[Ritz, ...]
    trace: tuple[Measured, ...]
    method: str
    draws: int | None
    sizes: tuple[int, ...]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        return {
            "kind": self.kind,
            "top": [vars(t) for t in self.top],
            "trace": [vars(t) for t in self.trace],
            "method": self.method,
            "draws": self.draws,
            "sizes": list(self.sizes),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        name = "Hessian" if self.kind == "hessian" else "Gauss-Newton"
        how = "closed forms" if self.method == "exact" else "two reverse passes of autograd"
        traces = "exact traces" if self.draws is None else f"traces from {self.draws} random probes"
        worst = max(t.relative for t in self.top)
        why = f" ({self.reason})" if self.reason else ""
        return f"{name} by layer: products by {how}{why}, {traces}; largest residual of lambda_max: {worst:.1e} of it"


def layer_curvature(
    data: Data,
    blocks: list[dict[str, nn.Parameter]],
    kind: str,
    *,
    method: str,
    draws: int,
    exact_below: int,
    tol: float,
    products: int,
    seed: int,
    tell: Callable[[int, int], None],
) -> LayerCurvature:
    """Return lambda_max and trace of each block's matrix.

    Args:
        data: The data.
        blocks: The parameters of each block, by name.
        kind: ``"hessian"`` or ``"ggn"``.
        method: ``"exact"``: :func:`hessiankit.hessian_operator` and :func:`hessiankit.hessian_diagonal`, for models small
            enough to be traced; ``"autograd"``: double backward, for any size; ``"auto"``: exact where the blocks have at most
            32768 parameters in all and a trace succeeds.
        draws: Random probes of the traces, where they are not exact.
        exact_below: Where a block has at most this many parameters, autograd takes all unit vectors.
        tol: Of Lanczos's residual, relative to the eigenvalue of largest magnitude.
        products: Products a layer at most.
        seed: Of probes and first vectors.
        tell: Called with (layers done, in all).

    Raises:
        InputError: If a block has no parameters.
    """
    empty = next((k for k, block in enumerate(blocks) if not block), None)
    if empty is not None:
        raise InputError(f"{WHO}: block {empty + 1} has no parameters, so that there is no curvature in them; leave it out")
    options = {"draws": draws, "exact_below": exact_below, "tol": tol, "products": products, "seed": seed, "tell": tell}
    total = sum(p.numel() for block in blocks for p in block.values())
    reason = f"{total:,} parameters in the blocks" if method == "auto" else ""
    if method == "exact" or (method == "auto" and total <= SMALL):
        try:
            return _exact(data, blocks, kind, tol, products, seed, tell)
        except (TraceError, InputError, OutOfMemoryError) as error:
            if method == "exact":
                raise
            reason = str(error)
    return replace(_autograd(data, blocks, kind, **options), reason=reason)  # type: ignore[arg-type]


def _exact(
    data: Data,
    blocks: list[dict[str, nn.Parameter]],
    kind: str,
    tol: float,
    products: int,
    seed: int,
    tell: Callable[[int, int], None],
) -> LayerCurvature:
    from hessiankit.curvature.diagonal import hessian_diagonal
    from hessiankit.curvature.operator import hessian_operator

    pairs = []
    for batch in data.batches:
        with torch.no_grad():
            target = data.target(batch, data.output(batch))
        pairs.append((batch.inputs, target))
    everything = list(dict.fromkeys(name for block in blocks for name in block))
    traces = hessian_diagonal(data.model, pairs, loss=data.loss, params=everything, kind=kind, max_products=None).traces
    top = []
    for k, block in enumerate(blocks):
        tell(k, len(blocks))
        operator = hessian_operator(data.model, pairs, loss=data.loss, params=list(block), kind=kind)
        top.append(_top(lambda v, A=operator: A @ v, operator.gradient, tol, products, seed))  # type: ignore[misc]
    trace = tuple(Measured(sum(traces[name] for name in block)) for block in blocks)
    return LayerCurvature(kind, tuple(top), trace, "exact", None, _sizes(blocks))


def _autograd(
    data: Data,
    blocks: list[dict[str, nn.Parameter]],
    kind: str,
    *,
    draws: int,
    exact_below: int,
    tol: float,
    products: int,
    seed: int,
    tell: Callable[[int, int], None],
) -> LayerCurvature:
    sizes = _sizes(blocks)
    exact = max(sizes) <= exact_below
    made = BlockProducts(data, blocks, kind)
    top, trace = [], []
    for k, size in enumerate(sizes):
        tell(k, len(blocks))
        p = next(iter(blocks[k].values()))
        like = torch.zeros(size, dtype=p.dtype, device=p.device)
        product = made.of(k)
        top.append(_top(product, like, tol, products, seed))
        trace.append(trace_of(product, like, None if exact else draws, seed + k))
    return LayerCurvature(kind, tuple(top), tuple(trace), "autograd", None if exact else draws, sizes)


def _top(product: Callable[[Tensor], Tensor], like: Tensor, tol: float, products: int, seed: int) -> Ritz:
    found = lanczos(product, first_vector(like, seed), tol=tol, most=products)
    return Ritz(found.value, found.residual, found.products, found.converged)


def _sizes(blocks: list[dict[str, nn.Parameter]]) -> tuple[int, ...]:
    return tuple(sum(p.numel() for p in block.values()) for block in blocks)
