"""Functions with a backward of their own, as kernels outside torch have them: right once, and not always twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Cubed(torch.autograd.Function):
    """The cube of every entry, with a backward in operations of torch, which can be differentiated again.

    >>> z = torch.tensor(2.0, requires_grad=True)
    >>> (first,) = torch.autograd.grad(Cubed.apply(z), z, create_graph=True)
    >>> first.item(), torch.autograd.grad(first, z)[0].item()
    (12.0, 12.0)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Return z^3."""
        return z**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep z."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Tensor:
        """Return 3 z^2 times the adjoint."""
        (z,) = ctx.saved_tensors
        return 3 * z.square() * adjoint


class CubedOnce(Cubed):
    """The same, its backward marked ``once_differentiable``: to a second derivative it is a constant, and torch does not say so.

    >>> z = torch.tensor(2.0, requires_grad=True)
    >>> (first,) = torch.autograd.grad(CubedOnce.apply(z) + z**2, z, create_graph=True)
    >>> first.item(), torch.autograd.grad(first, z)[0].item()  # 16, and 12 + 2
    (16.0, 2.0)
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, adjoint: Tensor) -> Tensor:
        """Return 3 z^2 times the adjoint."""
        return Cubed.backward(ctx, adjoint)
