"""Hessians by central differences of the user's own module: its gradient by torch, its parameters moved in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""Of g(x + k h) - g(x - k h), k = 1 ... 4: the first derivative to order eight."""


def gradient(module: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    """The gradient of a loss of no arguments in all parameters of a module, end to end."""
    parameters = list(module.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = loss()
    slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([slope.detach().reshape(-1) for slope in slopes])


def by_differences(module: nn.Module, loss: Callable[[], Tensor], step: float = 5e-3) -> Tensor:
    """The Hessian, row by row: for every entry of every parameter eight gradients."""
    rows = []
    for parameter in module.parameters():
        entries = parameter.data.view(-1)
        for i, at in enumerate(entries.tolist()):
            row = torch.zeros(())
            for k, weight in enumerate(WEIGHTS, 1):
                for sign in (1, -1):
                    entries[i] = at + sign * k * step
                    row = row + sign * weight / step * gradient(module, loss)
            entries[i] = at
            rows.append(row)
    return torch.stack(rows)
