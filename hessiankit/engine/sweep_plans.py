"""Directions that are swept together, and the sections of a trace: steps between two values, and the places among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import IdentityJacobian, ParameterJacobian
from hessiankit.engine.paths import Place
from hessiankit.engine.sweep import UnitColumns


@dataclass(frozen=True)
class Directions:
    """Unit directions of one place: of one row in every group at once, or of the place's own parameter entries.

    Attributes:
        place: Place at which they begin.
        level: Number of axes that index the groups.
        outputs: Columns of the place, or entries of its parameters.
        jacobians: Jacobians that pull curvature along these directions back to the parameters.
        by_entry: Whether they are the directions of parameter entries.
    """

    place: Place
    level: int
    outputs: int
    jacobians: list[ParameterJacobian]
    by_entry: bool

    @property
    def groups(self) -> int:
        """Number of groups of rows that move at once."""
        return self.place.shape[: self.level].numel()

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return 1 if self.by_entry else self.place.rows // self.groups

    def columns(self, start: int, stop: int, like: Tensor) -> UnitColumns:
        """Return :meth:`tangents` where all rows stay apart, as columns."""
        return UnitColumns(like.new_ones(()).expand(like.shape), start, stop)

    def tangents(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return directions of outputs ``start`` to ``stop``: ((stop - start) rows, *shape of the place), rows first."""
        place, m, count = self.place, self.rows, stop - start
        if place.is_whole:
            return IdentityJacobian("", None, 0, like.numel()).columns(start, stop, like)
        if not self.by_entry:
            units = like.new_zeros(m, count, m, place.width)
            k = torch.arange(count, device=like.device)
            units[:, k, :, start + k] = torch.eye(m, dtype=like.dtype, device=like.device)
            one_group = units.reshape(m * count, *(1,) * self.level, *like.shape[self.level :])
            return one_group.expand(-1, *like.shape)
        parts = []
        for entries, u in zip(self.jacobians, place.jacobians, strict=True):
            assert isinstance(entries, IdentityJacobian)
            first, last = max(start, entries.start), min(stop, entries.start + entries.count)
            if first < last:
                parts.append(u.columns(first - entries.start, last - entries.start, like))
        return torch.cat(parts)


@dataclass(frozen=True)
class SweepPlan:
    """Directions that are swept together.

    Attributes:
        path: Steps that the directions move.
        directions: Directions of each place, from the first to the last.
        numbers: Numbers that one direction takes on the path.
        by_pairs: Whether H is a sum over rows for each pair of parameters: all rows stay apart, and one moves in each direction.
        is_rowwise: Whether all rows stay apart.
    """

    path: list[Step]
    directions: list[Directions]
    numbers: int
    by_pairs: bool
    is_rowwise: bool = False

    @property
    def level(self) -> int:
        """Level of the directions."""
        return self.directions[0].level

    @property
    def count(self) -> int:
        """Number of directions."""
        return sum(d.outputs * d.rows for d in self.directions)

    def chunk_count(self, numbers: int, space: int) -> int:
        """Return the number of :meth:`chunks`."""
        d = self.directions[0]
        return 1 if len(self.directions) > 1 else -(-d.outputs // max(1, space // max(1, numbers * d.rows)))

    def chunks(self, numbers: int, space: int) -> Iterator[list[tuple[Directions, int, int]]]:
        """Yield (directions, first output, last output) in chunks that fit the work space; a direction takes so many numbers."""
        if len(self.directions) > 1:
            yield [(d, 0, d.outputs) for d in self.directions]
            return
        (d,) = self.directions
        step = -(-d.outputs // self.chunk_count(numbers, space))  # chunks of one size
        for start in range(0, d.outputs, step):
            yield [(d, start, min(d.outputs, start + step))]


@dataclass(frozen=True)
class Section:
    """Steps between two cuts, the places among them, and their sweeps.

    Attributes:
        steps: Steps in order.
        places: Places in order.
        entry: The value at which the section begins, as a place without parameters; None for the first.
        end: Id of the value at which it ends.
        columns: Number of entries of the parameters that enter in it or after it.
        path: Steps from its entry and its places to its end; for curvature of places with themselves, from its entry only.
        level: Number of leading axes, of the values at both ends, that index rows which stay apart from its entry to the loss.
        tail_numbers: Numbers kept of the steps after its end, 0 if there are none.
        plans: Sweeps of its places, those of the last first.
    """

    steps: list[Step]
    places: list[Place]
    entry: Place | None
    end: int
    columns: int
    path: list[Step]
    level: int
    tail_numbers: int
    plans: list[SweepPlan] = field(default_factory=list)
