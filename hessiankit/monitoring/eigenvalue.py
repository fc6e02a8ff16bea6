"""The top eigenvalue of the training loss's Hessian: closed forms where they are quick, two backward passes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.errors import HessiankitError, InputError
from hessiankit.lanczos import TopEigenvalue, lanczos
from hessiankit.monitoring.objective import Batch, batch_loss, count
from hessiankit.operator import hessian_operator

ROUTES = ("auto", "closed form", "autograd")
CLOSED_FORM_ENTRIES = 200_000
"""Parameters up to which "auto" tries closed forms, whose work space holds every value of the network at once."""


def top_eigenvalue(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    route: str = "auto",
    tol: float = 1e-3,
    products: int = 60,
    seed: int = 0,
) -> tuple[TopEigenvalue, str, str]:
    """Return the largest eigenvalue of the Hessian of the mean cross entropy over all labels that count.

    Args:
        model: The model, in evaluation mode.
        batches: Pairs (inputs, labels) on the model's device.
        route: ``"closed form"``: products by :func:`hessiankit.hessian_operator`. ``"autograd"``: the gradient of
            <gradient, v>, with torch's unfused attention, for the fused one has no second derivative. ``"auto"``: closed forms
            for up to 200,000 parameters of a model that can be traced, autograd for others.
        tol: Of the residual, relative to the eigenvalue.
        products: Products with the Hessian at most.
        seed: Draws the start vector, on the CPU, so that it is the same on every device.

    Raises:
        InputError: No parameter is trainable, a product is not finite, or the route that was asked for is closed.

    Returns:
        The eigenvalue, the route taken, and why ("" if it was asked for).
    """
    if route not in ROUTES:
        raise InputError(f"top_eigenvalue: route={route!r} is not known; pass one of {', '.join(map(repr, ROUTES))}")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("top_eigenvalue: no parameter requires a gradient; there is no Hessian")
    product, taken, why = _products(model, batches, parameters, route)
    first = next(iter(parameters.values()))
    size = sum(p.numel() for p in parameters.values())
    start = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(first.device, first.dtype)
    return lanczos(product, start, tol=tol, most=products), taken, why


Product = Callable[[Tensor], Tensor]


def _products(
    model: nn.Module, batches: Sequence[Batch], parameters: dict[str, nn.Parameter], route: str
) -> tuple[Product, str, str]:
    size = sum(p.numel() for p in parameters.values())
    if route == "autograd":
        return _two_backwards(model, batches, list(parameters.values())), "autograd", ""
    if route == "auto" and size > CLOSED_FORM_ENTRIES:
        why = f"{size:,} parameters, more than {CLOSED_FORM_ENTRIES:,}"
        return _two_backwards(model, batches, list(parameters.values())), "autograd", why
    try:
        counts = [float(count(target)) for _, target in batches]
        options: dict[str, Any] = {"loss": "cross_entropy", "params": list(parameters), "weights": counts}
        operator = hessian_operator(model, list(batches), **options)
    except HessiankitError as error:
        if route == "closed form":
            raise
        return _two_backwards(model, batches, list(parameters.values())), "autograd", f"{type(error).__name__}: {error}"
    return operator.__matmul__, "closed form", ""


def _two_backwards(model: nn.Module, batches: Sequence[Batch], parameters: Sequence[nn.Parameter]) -> Product:
    """Return v -> H v by differentiating <gradient, v>; the forward pass is run again for each product and batch.

    Memory is that of one batch's graph, not of all of them at once.
    """
    total = sum(count(target) for _, target in batches)

    def product(v: Tensor) -> Tensor:
        pieces = [piece.view_as(p) for piece, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True)]
        out = torch.zeros_like(v)
        for batch in batches:
            if not (n := count(batch[1])):
                continue
            with sdpa_kernel(SDPBackend.MATH):
                loss = batch_loss(model, batch)
                gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                slope = sum((g * piece).sum() for g, piece in zip(gradients, pieces, strict=True))
                rows = torch.autograd.grad(slope, parameters, materialize_grads=True)
            out += torch.cat([row.reshape(-1) for row in rows]) * (n / total)
        return out

    return product
