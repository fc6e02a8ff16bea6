"""One measurement, section by section: (model, batches, step, options) -> plain values for a line of the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hessiankit.curvature.operator import hessian_operator
from hessiankit.diagnostics.depth import depth_diagnostics
from hessiankit.diagnostics.depth.products import HessianProducts, by_route, double_backward
from hessiankit.diagnostics.sharpness import SharpnessEstimate
from hessiankit.diagnostics.sharpness import sharpness as estimated
from hessiankit.diagnostics.sharpness.batches import BatchedLoss, micro_batches
from hessiankit.engine.problem.batches import on_device_of
from hessiankit.engine.problem.calling import IGNORE_INDEX, named_tensors
from hessiankit.landscape.critical import along_step
from hessiankit.landscape.optimizer_states import waits
from hessiankit.landscape.preconditioner import optimizer_preconditioner
from hessiankit.partition.part import Part
from hessiankit.support.containers import check_dense
from hessiankit.support.errors import InputError
from hessiankit.support.lanczos import Product, lanczos
from hessiankit.support.torch_state import full_precision

WHO = "monitor"
Batch: TypeAlias = "tuple[Any, Tensor]"
"""Arguments of the model, and a label for each row of its logits (-100: does not count)."""


def batches_of(model: nn.Module, data: Any, target: Tensor | None = None) -> list[Batch]:
    """Return batches, in the forms of :func:`hessiankit.sharpness`, as a list of pairs (inputs, labels)."""
    read = micro_batches(WHO, model, data, target)
    for batch in read:
        for name, x in (*named_tensors(batch.inputs), ("target", batch.target)):
            check_dense(WHO, name, x)
            if x.is_meta:
                raise InputError(f"{WHO}: {name} is on the meta device, which holds no values; load the data first")
    if all(bool((batch.target == IGNORE_INDEX).all()) for batch in read):
        raise InputError(f"{WHO}: the data hold no label that counts; pass labels other than {IGNORE_INDEX}")
    return [(batch.inputs, batch.target) for batch in read]


def loss_of(model: nn.Module, batches: Iterable[Batch]) -> BatchedLoss:
    """Return the mean cross entropy, in nats, over all labels that count, however they are cut into batches."""
    return BatchedLoss(WHO, model, tuple(micro_batches(WHO, model, [on_device_of(model, batch) for batch in batches])))


def loss(model: nn.Module, batches: Sequence[Batch], step: int) -> float:
    """Return the mean cross entropy."""
    return loss_of(model, batches).evaluate()[0]


ROUTES = ("auto", "closed form", "autograd")
CLOSED_FORM_ENTRIES = 200_000
"""Parameters up to which "auto" tries closed forms, whose work space holds every value of the network at once."""


START = 0.1
"""Length of the random vector that is added to the last eigenvector, so that a search that starts there sees another one rise."""


@full_precision()
def eigenvalue(
    model: nn.Module,
    batches: Sequence[Batch],
    step: int,
    *,
    route: str,
    tol: float,
    products: int,
    seed: int,
    optimizers: Sequence[Optimizer] = (),
    last: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Return the largest eigenvalue of the Hessian of the mean cross entropy over all labels that count, its residual, and by
    which route it was computed and why; with optimizers in their metric, beside its threshold.

    The ``route`` ``"closed form"`` takes products by :func:`hessiankit.hessian_operator`, ``"autograd"`` by two reverse passes,
    with attention that has a second derivative, and ``"auto"`` closed forms for up to 200,000 parameters of a model that can be
    traced, autograd for others. The search starts from a vector drawn by ``seed``, the same on every device, or
    from the eigenvector that ``last`` holds, and leaves its own there.
    """
    parameters = trainable(model)
    if optimizers and (why := waits(optimizers)):
        return {"waiting": why}
    size, first = sum(p.numel() for p in parameters.values()), next(iter(parameters.values()))
    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), device="cpu").to(first.device, first.dtype)
    before = None if last is None else last.get("vector")
    if before is not None and (before.shape, before.dtype, before.device) == (start.shape, start.dtype, start.device):
        start = before + START * start / start.norm()
    P = None
    if optimizers:
        P = optimizer_preconditioner(WHO, optimizers, parameters, dtype=first.dtype, device=first.device)

    def exact() -> Product:
        return hessian_operator(model, list(batches), loss="cross_entropy", params=list(parameters)).__matmul__

    def autograd() -> Product:
        return HessianProducts(loss_of(model, batches), [list(parameters.values())], "hessian").of(0)

    with double_backward():
        product, taken, why = by_route(route, size, CLOSED_FORM_ENTRIES, ("closed form", exact), autograd)
        of = product if P is None else (lambda v: P.root @ product(P.root @ v))
        top = lanczos(of, start, tol=tol, most=products)
    if last is not None and top.vector is not None:
        last["vector"] = top.vector
    metric = {} if P is None else {"lr": P.lr, "threshold": P.threshold, "ratio": P.ratio(top.value)}
    return {**top.to_dict(), **metric, "route": taken, **({"why": why} if why else {})}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, one at least."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(f"{WHO}: no parameter requires a gradient; there is no Hessian")
    return parameters


@full_precision()
def critical(
    model: nn.Module, batches: Sequence[Batch], step: int, *, optimizers: Sequence[Optimizer], passes: int
) -> dict[str, Any]:
    """Return the curvature along the optimizers' next step and the multiple of it that does not raise the mean cross entropy,
    as :func:`hessiankit.critical_sharpness` does, by automatic differentiation: a gradient, a product and the forward passes.
    """
    if why := waits(optimizers, for_state=False):
        return {"waiting": why}
    parameters, loss = trainable(model), loss_of(model, batches)
    own = list(parameters.values())
    sizes, values = [p.numel() for p in own], [p.data for p in own]

    def loss_at(moved: Tensor) -> float:
        try:
            for p, value, step in zip(own, values, moved.split(sizes), strict=True):
                p.data = (value + step.view_as(value)).to(value.dtype)
            return loss.evaluate()[0]
        finally:
            for p, value in zip(own, values, strict=True):
                p.data = value

    with double_backward():
        product = HessianProducts(loss, [own], "hessian").of(0)
        gradient = torch.cat([slope.reshape(-1) for slope in loss.gradient(own)])
        search = along_step(WHO, optimizers, parameters, gradient, product, loss_at, {}, passes)
    return {name: value for name, value in search.to_dict().items() if name not in ("groups", "seconds", "optimizer")}


@torch.no_grad()
def norms(model: nn.Module, batches: Sequence[Batch], step: int, *, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the Euclidean norm of every part, of every block type and of all (The Sharpness Disparity Principle, Figure 8).

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(layer.weight, 3.0)
    >>> norms(layer, [], 0, parts=[Part("weight", "FFN", "up", 0, "", 2)])["types"]
    {'FFN': 4.242640687119285}
    """
    values = dict(model.named_parameters())
    squares = {part: part.squared_norm(values[part.parameter]) for part in parts}
    types: dict[str, Tensor] = {}
    for part, square in squares.items():
        types[part.type] = types.get(part.type, torch.zeros_like(square)) + square
    return {
        "total": math.sqrt(sum(float(x) for x in types.values())),
        "types": {name: math.sqrt(float(x)) for name, x in types.items()},
        "tensors": {part.name: math.sqrt(float(x)) for part, x in squares.items()},
    }


SEED_STRIDE = 1_000_003
"""Between the seeds of two steps, so that the errors of two measurements are independent, as their intervals say of each."""


def sharpness(model: nn.Module, batches: Sequence[Batch], step: int, *, seed: int, **options: Any) -> dict[str, Any]:
    """Return the average sharpness with its intervals by type, layer, both and tensor; of labels, which count is read."""
    report = estimated(model, list(batches), seed=seed + SEED_STRIDE * step, **options)
    by_type_and_layer: dict[str, dict[str, Any]] = {}
    for (name, layer), one in report.type_layers.items():
        by_type_and_layer.setdefault(name, {})[_layer(layer)] = _short(one)
    return {
        "types": {name: _whole(one) for name, one in report.types.items()},
        "layers": {_layer(layer): _whole(one) for layer, one in report.layers.items()},
        "type_layers": by_type_and_layer,
        "tensors": {name: _short(one) for name, one in report.tensors.items()},
        "scale_free": {name: _whole(one) for name, one in report.scale_free.items()},
        **({"seen_rows": _whole(report.seen_rows)} if report.seen_rows is not None else {}),
        "ordering": report.ordering,
        "terms": report.terms,
    }


def depth(model: nn.Module, batches: Sequence[Batch], step: int, **options: Any) -> dict[str, Any]:
    """Return some depth diagnostics, as :class:`hessiankit.diagnostics.depth.DepthReport` writes them."""
    report = depth_diagnostics(model, list(batches), **options).to_dict()
    return {name: part for name, part in report.items() if part is not None and name not in ("model", "memory", "seconds")}


def _layer(layer: int | None) -> str:
    return "outside" if layer is None else str(layer)


def _whole(one: SharpnessEstimate) -> dict[str, float]:
    return {key: getattr(one, key) for key in ("value", "standard_error", "low", "high")}


def _short(one: SharpnessEstimate) -> list[float]:
    return [one.value, one.standard_error]
