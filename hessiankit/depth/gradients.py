"""The norm of the loss's gradient in each block's parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hessiankit.depth.data import Data


def gradient_norms(data: Data, blocks: list[dict[str, nn.Parameter]]) -> tuple[float, ...]:
    """Return ||dL/dtheta_l||_2 for the parameters theta_l of each block, L the mean loss over all data.

    The paper's Theorem 4.3 speaks of dy_L/dW_1, a Jacobian; its bound does not hold as printed. This is what an optimiser sees.

    Args:
        data: The data.
        blocks: The parameters of each block, which require gradients.
    """
    parameters = list({id(p): p for block in blocks for p in block.values()}.values())
    if not parameters:
        return (0.0,) * len(blocks)
    sums: dict[int, Tensor] = {}
    terms = 0.0
    for batch in data.batches:
        out = data.output(batch)
        target = data.target(batch, out)
        terms += data.count(target)
        found = torch.autograd.grad(data.summed_loss(out, target), parameters, allow_unused=True)
        for p, g in zip(parameters, found, strict=True):
            if g is not None:
                sums[id(p)] = sums[id(p)] + g if id(p) in sums else g
    squares = {key: float(g.double().square().sum()) for key, g in sums.items()}
    return tuple(math.sqrt(math.fsum(squares.get(id(p), 0.0) for p in block.values())) / terms for block in blocks)
