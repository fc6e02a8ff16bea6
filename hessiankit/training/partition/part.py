"""A parameter, or the slice of a fused one, that has one block type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.support.tables import Piece, Printed, table
from hessiankit.support.torch_state import wide

CHUNK = 2**18  # entries that are taken to double precision at once
TYPES = ("Emb", "QK", "VO", "FFN", "Norm", "Head", "Other")
"""The block types of The Sharpness Disparity Principle (Sec. 3.2), and what it leaves out: Head and Other."""


@dataclass(frozen=True)
class Part:
    """A parameter, or the part of a fused one, that has one block type.

    Attributes:
        parameter: Name in ``model.named_parameters()``.
        type: One of :data:`TYPES`.
        role: Function of the part: ``"query"``, ``"gate"``, ``"gain"``, ``"token embedding"``, ...
        layer: Index of the block, from 0; None outside the blocks.
        reason: Evidence for the type.
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
        return self.parameter if self.axis is None else indexed(self.parameter, self.axis, self.segments)

    def of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the views of a tensor of the parameter's shape that make up this part."""
        if self.axis is None:
            return (tensor,)
        return tuple(tensor.narrow(self.axis, first, stop - first) for first, stop in self.segments)

    def squared_norm(self, tensor: Tensor) -> Tensor:
        """Return the sum of the squared entries of this part of a tensor, in double precision, as a tensor ()."""
        total = torch.zeros((), dtype=wide(tensor.device), device=tensor.device)
        for view in self.of(tensor):
            for chunk in view.reshape(-1).split(CHUNK if tensor.device.type == "cpu" else 64 * CHUNK):
                double = chunk.to(total.dtype)
                total += torch.dot(double, double)
        return total


def indexed(parameter: str, axis: int, segments: Iterable[tuple[int, int]]) -> str:
    """Return a parameter's name with the index of some segments along an axis, as ``params=`` takes it."""
    return f"{parameter}[{'; '.join(':, ' * axis + f'{first}:{stop}' for first, stop in segments)}]"


class BlockTypes(Printed, dict[str, str]):
    """The block type of every part of a model, by ``Part.name``, in the order of ``named_parameters()``.

    A plain dict (``json.dumps`` and ``==`` work) with the parts as an attribute.

    Attributes:
        parts: The result of :func:`hessiankit.training.partition.model_parts`.

    >>> types = BlockTypes([Part("w", "FFN", "up", 0, "Linear of a block", 6), Part("g", "Norm", "gain", 0, "LayerNorm", 3)])
    >>> types, types.entries
    ({'w': 'FFN', 'g': 'Norm'}, {'FFN': 6, 'Norm': 3})
    """

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = tuple(parts)
        super().__init__({part.name: part.type for part in self.parts})

    @property
    def entries(self) -> dict[str, int]:
        """Number of entries by type, for the types that occur."""
        sizes = {kind: sum(part.size for part in self.parts if part.type == kind) for kind in TYPES}
        return {kind: size for kind, size in sizes.items() if size}

    def of_type(self, block_type: str) -> tuple[Part, ...]:
        """Return the parts of one type."""
        return tuple(part for part in self.parts if part.type == block_type)

    __repr__ = dict.__repr__

    def _headline(self) -> str:
        return f"{len(self)} parts of {len(self.entries)} block types"

    def _parts(self) -> Iterator[Piece]:
        headers = ("part", "type", "role", "found by", "layer", "entries")
        rows = [(p.name, p.type, p.role, p.reason, "" if p.layer is None else str(p.layer), f"{p.size:,}") for p in self.parts]
        yield table(headers, rows, left=4, names=list(self), prose=("found by",), drop=("found by", "role"))
        sizes = self.entries
        shares = [(t, str(len(self.of_type(t))), f"{n:,}", f"{100 * n / sum(sizes.values()):.1f} %") for t, n in sizes.items()]
        yield table(("type", "parts", "entries", "share"), shares)
