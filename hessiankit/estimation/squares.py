"""Sums of squares in double precision, without a copy of the whole tensor in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hessiankit.errors import InputError
from hessiankit.estimation.labels import wide
from hessiankit.parts import Part

CHUNK = 2**18


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor's entries, as a tensor ().

    >>> sum_of_squares(torch.tensor([3.0, 4.0])).item()
    25.0
    """
    total = torch.zeros((), dtype=wide(x.device), device=x.device)
    for chunk in x.reshape(-1).split(CHUNK if x.device.type == "cpu" else 64 * CHUNK):
        double = chunk.to(total.dtype)
        total += torch.dot(double, double)
    return total


def row_sums(x: Tensor) -> Tensor:
    """Return the sums of squares along each row of a matrix, float64 (rows,) on the CPU.

    >>> row_sums(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [25.0, 1.0]
    """
    flat = x.flatten(1)
    found = [part.to(wide(x.device)).square().sum(1).cpu() for part in flat.split(max(1, CHUNK // flat.shape[1]))]
    return torch.cat(found).double()


def part_squares(who: str, parts: Sequence[Part], gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squares of each part's gradient, 0 where there is none: float64 (parts,) on the CPU.

    Raises:
        InputError: If one is not finite.
    """
    zero = torch.zeros(())
    squares = [
        torch.stack([sum_of_squares(view) for view in part.of(gradients[part.parameter])]).sum()
        if part.parameter in gradients
        else zero
        for part in parts
    ]
    if len({x.device for x in squares}) > 1:
        squares = [x.cpu() for x in squares]
    found = torch.stack([x.to(wide(x.device)) for x in squares]).cpu().double()
    bad = ~torch.isfinite(found)
    if bool(bad.any()):
        part = parts[int(bad.nonzero()[0])]
        raise InputError(
            f"{who}: the gradient of {part.name!r} is NaN or infinite, though the output is finite; a derivative overflows there"
            " (a norm of a constant row, a square root at 0): use a wider dtype or an eps > 0"
        )
    return found
