"""A parameter, or the slice of a fused one, that has one block type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = ("Emb", "QK", "VO", "FFN", "Norm", "Head", "Other")
"""The block types of The Sharpness Disparity Principle (Sec. 3.2), and what it leaves out: Head and Other."""


@dataclass(frozen=True)
class Part:
    """A parameter, or the part of a fused one, that has one block type.

    Attributes:
        parameter: Its name in ``model.named_parameters()``.
        type: One of :data:`TYPES`.
        role: What it does there: ``"query"``, ``"gate"``, ``"gain"``, ``"token embedding"``, ...
        layer: Index of the block, from 0; None outside the blocks.
        reason: How this was found.
        size: Number of entries.
        axis: Axis of the parameter that ``segments`` cut; None for the whole parameter.
        segments: (first, after last) along that axis.

    >>> part = Part("c_attn.weight", "QK", "query", 0, "GPT-2's fused weight", 8, 1, ((0, 2), (4, 6)))
    >>> part.name
    'c_attn.weight[:, 0:2; :, 4:6]'
    >>> [view.shape for view in part.of(torch.zeros(2, 9))]
    [torch.Size([2, 2]), torch.Size([2, 2])]
    """

    parameter: str
    type: str
    role: str
    layer: int | None
    reason: str
    size: int
    axis: int | None = None
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """The parameter's name with the index that selects the part, as ``params=`` takes it."""
        if self.axis is None:
            return self.parameter
        before = ":, " * self.axis
        return f"{self.parameter}[{'; '.join(f'{before}{first}:{after}' for first, after in self.segments)}]"

    def of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the views of a tensor of the parameter's shape that make up this part.

        Args:
            tensor: The parameter, its gradient, or anything of that shape.
        """
        if self.axis is None:
            return (tensor,)
        return tuple(tensor.narrow(self.axis, first, after - first) for first, after in self.segments)

    def squared_norm(self, tensor: Tensor) -> Tensor:
        """Return the sum of the squared entries of this part of a tensor, in double precision, as a tensor ()."""
        return torch.stack([view.double().square().sum() for view in self.of(tensor)]).sum()
