"""A change of floating-point type: the identity but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.primitive import AffineByEntry, Covectors, Inputs, Tangents, total


@dataclass(frozen=True)
class Cast(AffineByEntry):
    """N = x in another floating-point type, or on another device; inputs (X,).

    Tangents and covectors are cast on their way through, so a type with fewer digits rounds them too.

    >>> single = Cast(torch.float32)
    >>> single.vjp((torch.ones(1, dtype=torch.float64),), torch.ones(1, 1))[0].dtype
    torch.float64
    """

    dtype: torch.dtype
    device: torch.device | None = None

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].to(self.device or inputs[0].device, self.dtype)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return self.value(total(self, tangents[0]))

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (adjoint.to(inputs[0].device, inputs[0].dtype),)


def wide(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Return tensors of 16 bits in single precision, and others as they are.

    >>> [x.dtype for x in wide([torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64)])]
    [torch.float32, torch.float64]
    """
    return [x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x for x in inputs]  # type: ignore[misc]
