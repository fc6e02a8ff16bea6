"""Products by torch's double backward inside the context, for the tests of programs and of models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from curvature_reference import draw
from operator_cases import error
from torch import Tensor, nn

import hessiankit as hk


def product(loss: Callable[[], Tensor], parameters: list[Tensor]) -> Tensor:
    """H v by torch's double backward, v generic."""
    v = [draw(*p.shape, seed=7 + k).to(p.dtype) for k, p in enumerate(parameters)]
    slopes = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)
    along = sum((g * u).sum() for g, u in zip(slopes, v, strict=True))
    rows = torch.autograd.grad(along, parameters, materialize_grads=True)  # type: ignore[arg-type]
    return torch.cat([x.flatten() for x in rows]).detach()


def agree(found: Tensor, right: Tensor) -> None:
    assert error(found.detach(), right.detach()) <= 1e-10


def within(loss: Callable[[], Tensor], model: nn.Module) -> Tensor:
    with hk.twice_differentiable():
        return product(loss, list(model.parameters()))
