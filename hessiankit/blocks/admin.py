"""Admin's profiling pass: the residual weights omega from the variances of the branches (Liu et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks.block import TransformerBlock
from hessiankit.errors import InputError


def profile_admin(model: nn.Module, inputs: Any) -> list[float]:
    """Set omega_1 and omega_2 of every ``admin`` block from one forward pass, and return them in the order of the sub-layers.

    The i-th sub-layer x -> N(omega_i x + f_i(x)), attention and network counted alike, gets

        omega_i = sqrt(1 + sum_{j<i} Var f_j) ,

    the 1 being the variance of a normalised embedding, and Var f_j the variance of all entries of what branch j returns in a
    pass with every omega at 1. omega is a vector with equal entries then, and each entry is learnable.

    Args:
        model: A model or a block with ``placement="admin"``.
        inputs: A representative batch: what the model takes, a tuple of it, or a dict of keywords.

    Raises:
        InputError: If the model has no such block.

    >>> block = TransformerBlock(d_model=4, d_ff=8, placement="admin")
    >>> first, second = profile_admin(block, torch.randn(2, 3, 4))
    >>> first, bool(second > 1)
    (1.0, True)
    """
    blocks = [m for m in model.modules() if isinstance(m, TransformerBlock) and hasattr(m, "omega_1")]
    if not blocks:
        raise InputError(
            f"profile_admin: the {type(model).__name__} has no block with placement='admin'; build it with that placement"
        )
    variances: list[float] = []

    def record(_module: nn.Module, _args: Any, out: Tensor) -> None:
        variances.append(float(out.var(correction=0)))

    branches = [branch for block in blocks for branch in (block.attention, block.feedforward)]
    omegas = [getattr(block, f"omega_{k}") for block in blocks for k in (1, 2)]
    hooks = [branch.register_forward_hook(record) for branch in branches]
    try:
        with torch.no_grad():
            for omega in omegas:
                omega.fill_(1.0)
            if isinstance(inputs, dict):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
            total, values = 1.0, []
            for omega, variance in zip(omegas, variances, strict=True):
                values.append(total**0.5)
                omega.fill_(values[-1])
                total += variance
    finally:
        for hook in hooks:
            hook.remove()
    return values
