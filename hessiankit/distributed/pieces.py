"""Where a rank's piece of a sharded parameter lies in the whole, and which entries of it belong to a part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hessiankit.errors import InputError
from hessiankit.parts import Part


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a parameter.

    Attributes:
        shape: Of the piece.
        offset: The piece's first entry in the whole parameter, along each axis.
        copies: How many ranks hold the same piece.
        first: Whether this rank is the one among them that counts entries.
        sharded: Whether it is a piece, and not the whole parameter, on every rank by itself.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: int = 1
    first: bool = True
    sharded: bool = True

    def of(self, part: Part, local: Tensor) -> tuple[Tensor, ...]:
        """Return the views of a piece that belong to a part.

        Args:
            part: The part.
            local: A tensor of the piece's shape.

        Rows 2 to 4 of a parameter lie here, the part consists of its rows 1 to 2 and 4 to 7:

        >>> part = Part("w", "QK", "query", 0, "an example", 12, 0, ((1, 3), (4, 8)))
        >>> [view.tolist() for view in Piece((3, 1), (2, 0)).of(part, torch.tensor([[2], [3], [4]]))]
        [[[2]], [[4]]]
        """
        if part.axis is None:
            return (local,)
        start, length = self.offset[part.axis], self.shape[part.axis]
        cut = ((max(first - start, 0), min(after - start, length)) for first, after in part.segments)
        return tuple(local.narrow(part.axis, first, after - first) for first, after in cut if first < after)

    def squared_norm(self, part: Part, local: Tensor) -> Tensor:
        """Return this rank's share of the sum of the part's squared entries, in double precision; the ranks' shares add up."""
        squares = [view.double().square().sum() for view in self.of(part, local)]
        return (
            torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=local.device)
        ) / self.copies


def piece(who: str, name: str, parameter: Tensor, size: int, rank: int) -> Piece:
    """Return where this rank's piece of a parameter lies.

    Args:
        who: What an error message starts with.
        name: The parameter's name.
        parameter: A DTensor, or a tensor that every rank holds whole.
        size: Number of ranks.
        rank: This rank.

    Raises:
        InputError: If it is laid out in another way than FSDP2 does on all ranks, alone or with replicas.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Piece(shape, (0,) * len(shape), size, rank == 0, sharded=False)
    mesh, placements = parameter.device_mesh, parameter.placements
    known = all(type(p) in (Shard, Replicate) for p in placements) and sum(type(p) is Shard for p in placements) == 1
    if not known or mesh.size() != size:
        raise InputError(
            f"{who}: {name!r} is laid out as {placements} over {mesh.size()} of {size} ranks; expected fully_shard over all "
            "ranks of the group, with or without replicas; tensor, pipeline and expert parallelism are not supported"
        )
    local, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    replicas = [k for k, p in enumerate(placements) if type(p) is Replicate]
    coordinate = mesh.get_coordinate()
    first = coordinate is not None and all(coordinate[k] == 0 for k in replicas)
    return Piece(tuple(local), tuple(offset), math.prod(mesh.size(k) for k in replicas), first)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
