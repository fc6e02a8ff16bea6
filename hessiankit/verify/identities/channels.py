"""Where the columns that parameters make go: each column of a linear map, a table, a bias or a gain, until it is read.

A *space* is a set of columns, the last axis of a value that parameters make column by column. A *channel* says of a later
value which column each of its entries still belongs to, and what has happened on the way. Whatever reads a channel and does
not pass it on is a *use*; the uses of a column decide by which symmetries it may be moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from hessiankit.verify.identities.symmetry import Leg

Freedom = Literal["linear", "rotation", "diagonal"]
Role = Literal["weight", "bias", "gain", "table"]


@dataclass(frozen=True, eq=False)
class Space:
    """Columns and the parameters that make them.

    Attributes:
        first: Number of the first column; columns are numbered through all spaces.
        size: How many columns.
        legs: The parameters, each with positions (rows, size) and its role. A weight meets an input in each row; a table's
            rows are read one at a time.
    """

    first: int
    size: int
    legs: list[tuple[Leg, Role]] = field(default_factory=list)

    def restricted(self, columns: Tensor, *roles: Role) -> list[Leg]:
        """Return the legs, of some roles if given, with these columns only."""
        local = columns - self.first
        return [Leg(leg.parameter, leg.at[:, local]) for leg, role in self.legs if not roles or role in roles]


@dataclass(frozen=True, eq=False)
class Channel:
    """A value's entries as entries of a space's columns.

    Attributes:
        space: The space.
        columns: The column's number, for each entry of the value.
        labels: (size,) Columns of one label may be mixed by one matrix; -1: not at all.
        freedom: What of a matrix the operations on the way commute with.
        uniform: A shift of all columns alike still arrives as such a shift.
        summed: Something else has been added: only shifts pass.
        normed: A norm has been passed: what comes after does not see the length of its rows.
    """

    space: Space
    columns: Tensor
    labels: Tensor
    freedom: Freedom = "linear"
    uniform: bool = True
    summed: bool = False
    normed: bool = False

    def at(self, columns: Tensor) -> Channel:
        """Return the same channel of a value whose entries are other ones."""
        return replace(self, columns=columns)

    def entrywise(self) -> Channel:
        """Return what remains when every column is treated by itself: matrices that are diagonal."""
        apart = torch.arange(self.space.size, device=self.labels.device)
        labels = torch.where(self.labels >= 0, apart, -1)
        freedom: Freedom = "diagonal"
        if self.freedom == "rotation":  # the only rotation that is diagonal is the identity
            labels = torch.full_like(labels, -1)
        return replace(self, labels=labels, freedom=freedom, uniform=False)

    def by_rows(self) -> Channel:
        """Return what remains when every row along the last axis is treated in its own way: no matrix joins two of them."""
        rows = unique_rows(self.columns)
        labels = torch.full_like(self.labels, -1)
        for n, row in enumerate(rows):
            local = row - self.space.first
            if bool((labels[local] >= 0).any()) or len(torch.unique(local)) < len(local):
                return replace(self, labels=torch.full_like(labels, -1))
            labels[local] = n
        both = torch.stack([self.labels, labels], 1)
        joint = torch.unique(both, dim=0, return_inverse=True)[1]
        return replace(self, labels=torch.where((both >= 0).all(1), joint, -1))

    def rotated(self) -> Channel | None:
        """Return what remains behind an RMS norm of each row: rotations of it; None where not even they do."""
        if self.summed or self.freedom == "diagonal":
            return None
        return replace(self.by_rows(), freedom="rotation", uniform=False, normed=True)

    def vector(self) -> Tensor | None:
        """Return the columns along the last axis, if they are the same in every row; else None."""
        rows = unique_rows(self.columns)
        return rows[0] if len(rows) == 1 else None


def unique_rows(columns: Tensor) -> Tensor:
    """Return the different rows along the last axis."""
    if columns.ndim == 0:
        return columns.reshape(1, 1)
    while columns.ndim > 1 and (columns.shape[0] == 1 or columns.stride(0) == 0):
        columns = columns[0]  # most are expanded from one row
    return torch.unique(columns.reshape(-1, columns.shape[-1]), dim=0)


def constant_along(columns: Tensor, axis: int) -> Tensor | None:
    """Return the columns with an axis of equal entries reduced to length one, else None."""
    first = columns.narrow(axis, 0, 1)
    return first if bool((columns == first).all()) else None


@dataclass(frozen=True, eq=False)
class LinearUse:
    """A weight multiplies the last axis: entry n meets the entries at[:, n] of the parameter."""

    channel: Channel
    columns: Tensor
    weight: Leg


@dataclass(frozen=True, eq=False)
class PairUse:
    """Two channels are multiplied and summed: (m, k) columns on either side, paired entry by entry.

    ``softmax`` holds whether a softmax over the second side's rows follows.
    """

    left: Channel
    right: Channel
    left_columns: Tensor
    right_columns: Tensor
    softmax: list[bool]


@dataclass(frozen=True, eq=False)
class RowUse:
    """A norm or a softmax reads rows (m, k) of columns: ``centred`` loses their mean, ``eps`` 0 their length (None: never).

    ``passed`` holds where the channel goes on behind it.
    """

    channel: Channel
    rows: Tensor
    centred: bool
    eps: float | None
    passed: bool = False


@dataclass(frozen=True, eq=False)
class OtherUse:
    """Anything else."""

    channel: Channel


Use = LinearUse | PairUse | RowUse | OtherUse


def channels_of(use: Use) -> tuple[Channel, ...]:
    """Return the channels that a use reads."""
    return (use.left, use.right) if isinstance(use, PairUse) else (use.channel,)


def read_columns(use: Use) -> tuple[Tensor, ...]:
    """Return the columns that a use reads."""
    if isinstance(use, PairUse):
        return use.left_columns, use.right_columns
    if isinstance(use, LinearUse):
        return (use.columns,)
    return (use.rows,) if isinstance(use, RowUse) else (use.channel.columns,)
