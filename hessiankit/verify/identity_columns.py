"""Columns made by parameters, followed through a trace until an operation reads or mixes them.

A *space* is a set of columns, the last axis of a value that parameters make column by column. A *channel* says of a later
value which column each of its entries still belongs to, and which operations were passed. An operation that reads a channel and
does not pass it on is a *use*; the uses of a column decide which symmetries it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.cast import Cast
from derivations.elementwise import Divide, Elementwise
from derivations.embedding import Embedding
from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Concatenate
from derivations.linear import Add, Linear, MaskedFill, MatMul, Multiple, Multiply, Reshape, Shift
from derivations.loss import CrossEntropy
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Mean, SumOver
from derivations.primitive import Primitive
from derivations.softmax import LogSoftmax, Softmax
from hessiankit.engine.jacobians import selections
from hessiankit.tracing.trace import Application, Trace
from hessiankit.verify.identity_generators import Leg

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
class Use:
    """An operation that reads columns of a channel and does not pass them on."""

    channel: Channel
    columns: Tensor

    @property
    def reads(self) -> tuple[tuple[Channel, Tensor], ...]:
        """The channels and the columns of each."""
        return ((self.channel, self.columns),)


@dataclass(frozen=True, eq=False)
class LinearUse(Use):
    """A weight multiplies the last axis: entry n meets the entries at[:, n] of the parameter."""

    weight: Leg


@dataclass(frozen=True, eq=False)
class PairUse(Use):
    """Two channels are multiplied and summed: (m, k) columns on either side, paired entry by entry.

    ``softmax`` holds whether a softmax over the second side's rows follows.
    """

    right: Channel
    right_columns: Tensor
    softmax: list[bool]

    @property
    def reads(self) -> tuple[tuple[Channel, Tensor], ...]:
        return ((self.channel, self.columns), (self.right, self.right_columns))


@dataclass(frozen=True, eq=False)
class RowUse(Use):
    """A norm or a softmax reads rows (m, k) of columns: ``centred`` loses their mean, ``eps`` 0 their length (None: never).

    ``passed`` holds where the channel goes on behind it.
    """

    centred: bool
    eps: float | None
    passed: bool = False


def homogeneous(primitive: Primitive) -> bool:
    """Tell whether phi(c x) = c phi(x) for every entry and c > 0.

    >>> homogeneous(Activation("relu")), homogeneous(Activation("gelu"))
    (True, False)
    """
    if isinstance(primitive, Activation):
        return primitive.kind in ("identity", "relu", "leaky_relu")
    if isinstance(primitive, Elementwise):
        return primitive.kind == "abs" or (primitive.kind == "clamp" and tuple(primitive.constants) == (0.0, math.inf))
    return False


class Following:
    """The spaces of a trace, and the uses of their columns.

    Args:
        trace: A trace that ends in the loss.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.spaces: list[Space] = []
        self.uses: list[Use] = []
        self._next = 0
        self._chosen = selections(trace)
        self._channels: dict[int, list[Channel]] = {}
        self._logits: dict[int, PairUse] = {}
        for a in trace.applications:
            self._channels[a.output] = self._step(a)
        self._read(self._channels.get(trace.output, []))

    # The columns of a value ------------------------------------------------------------------------------------------

    def _of(self, a: Application, position: int) -> list[Channel]:
        at = a.inputs[position] if position < len(a.inputs) else None
        return [] if at is None else self._channels.get(at, [])

    def _leg(self, a: Application, position: int, *, turned: bool = False) -> Leg | None:
        """The parameter at an input, its positions as rows; None where it is not entries of one parameter."""
        at = a.inputs[position] if position < len(a.inputs) else None
        chosen = None if at is None else self._chosen.get(at)
        if at is None or chosen is None:
            return None
        value = self.trace.values[at]
        every = torch.arange(value.numel(), device=value.device).reshape(value.shape)
        positions = every if chosen.at is None else chosen.at
        rows = positions.reshape(-1, positions.shape[-1]) if positions.ndim else positions.reshape(1, 1)
        return Leg(chosen.parameter, rows.T if turned else rows)

    def _space(self, a: Application, *legs: tuple[Leg | None, Role]) -> Channel:
        found = [(leg, role) for leg, role in legs if leg is not None]
        out = self.trace.values[a.output]
        size = out.shape[-1]
        space = Space(self._next, size, found)
        self._next += size
        self.spaces.append(space)
        numbers = torch.arange(space.first, self._next, device=out.device)
        return Channel(space, numbers.expand(out.shape), torch.zeros(size, dtype=torch.long, device=out.device))

    def _read(self, channels: list[Channel]) -> list[Channel]:
        self.uses += [Use(c, c.columns) for c in channels]
        return []

    # The effect of an operation -----------------------------------------------------------------------------------------

    def _step(self, a: Application) -> list[Channel]:
        p = a.primitive
        if isinstance(p, CrossEntropy):
            return self._softmax(a)
        if self.trace.values[a.output].ndim == 0:
            return self._read([c for position in range(len(a.inputs)) for c in self._of(a, position)])
        if a.inputs and a.inputs[0] in self._logits and isinstance(p, (Multiple, Add, MaskedFill, Reshape, Cast, Softmax)):
            return self._on_logits(a)
        if isinstance(p, Embedding) and (table := self._chosen.get(a.output)) is not None and p.frozen is None:
            leg = self._leg(a, 0)
            return [self._space(a, (leg, "table"))] if leg is not None and table.at is not None else []
        if p.selects or isinstance(p, Embedding):
            return [c.at(p.value(c.columns)) for c in self._of(a, 0)]
        if isinstance(p, (Multiple, Cast)) or (isinstance(p, Concatenate) and len(a.inputs) == 1):  # with an empty cache
            return list(self._of(a, 0))
        if isinstance(p, (MatMul, Linear)):
            return self._product(a)
        if isinstance(p, ScaledDotProductAttention):
            return self._attention(a, p)
        if isinstance(p, (Add, Shift)):
            return self._sum(a)
        if isinstance(p, (Multiply, Divide)):
            return self._multiplied(a)
        if isinstance(p, (LayerNorm, RMSNorm)):
            return self._norm(a, p)
        if homogeneous(p):
            return self._passed(self._of(a, 0))
        if isinstance(p, (Mean, SumOver)):
            return self._pooled(a, p)
        if isinstance(p, (Softmax, LogSoftmax)) and p.dim in (-1, self.trace.values[a.output].ndim - 1):
            return self._softmax(a)
        return self._read([c for position in range(len(a.inputs)) for c in self._of(a, position)])

    def _passed(self, channels: list[Channel]) -> list[Channel]:
        """Entry by entry: sums stop here."""
        self._read([c for c in channels if c.summed])
        return [c.entrywise() for c in channels if not c.summed]

    def _softmax(self, a: Application) -> list[Channel]:
        self.uses += [RowUse(c, unique_rows(c.columns), True, None) for c in self._of(a, 0)]
        return []

    def _product(self, a: Application) -> list[Channel]:
        weight = self._leg(a, 1, turned=isinstance(a.primitive, Linear))
        value = self.trace.values[a.inputs[1]]  # type: ignore[index]
        left, right = self._of(a, 0), self._of(a, 1)
        if weight is not None and value.ndim == 2:
            for c in left:
                vector = None if c.summed else c.vector()
                read = Use(c, c.columns) if vector is None else LinearUse(c, vector, Leg(weight.parameter, weight.at.T))
                self.uses.append(read)
            bias = self._leg(a, 2)
            fixed = bias is None and len(a.inputs) > 2 and a.inputs[2] is not None  # added, and does not follow the weight
            return [replace(self._space(a, (weight, "weight"), (bias, "bias")), summed=fixed)]
        if isinstance(a.primitive, Linear):  # by a weight that is computed, which enters with its rows and columns exchanged
            return self._read([c for position in range(len(a.inputs)) for c in self._of(a, position)])
        pair = self._pair(left, [c for c in right if constant_along(c.columns, -1) is not None], turned=False)
        if pair is not None:
            self._logits[a.output] = pair
            return self._read([c for c in (*left, *right) if c not in (pair.channel, pair.right)])
        return self._read(left) + self._weighted(right, self.trace.values[a.output].shape)

    def _weighted(self, values: list[Channel], shape: torch.Size) -> list[Channel]:
        """Rows of a value are averaged with weights that differ from matrix to matrix: P V."""
        passed = []
        for c in values:
            rows = constant_along(c.columns, -2)
            if rows is None:
                self._read([c])
            else:
                passed.append((c if c.summed else c.by_rows()).at(rows.expand(shape)))
        return passed

    def _pair(self, left: list[Channel], right: list[Channel], *, turned: bool) -> PairUse | None:
        """Note Q K^T; the right side comes with its rows last, or ``turned`` with its columns last."""
        plain = [[c for c in side if not c.summed] for side in (left, right)]
        if len(plain[0]) != 1 or len(plain[1]) != 1:
            return None
        (q,), (k,) = plain
        a = constant_along(q.columns, -2)
        b = constant_along(k.columns, -2 if turned else -1)
        if a is None or b is None:
            return None
        a, b = torch.broadcast_tensors(a[..., 0, :], b[..., 0, :] if turned else b[..., 0])
        width = a.shape[-1]
        both = torch.unique(torch.cat([a, b], -1).reshape(-1, 2 * width), dim=0)
        pair = PairUse(q, both[:, :width], k, both[:, width:], [turned])
        self.uses.append(pair)
        return pair

    def _on_logits(self, a: Application) -> list[Channel]:
        pair = self._logits[a.inputs[0]]  # type: ignore[index]
        before, after = self.trace.values[a.inputs[0]], self.trace.values[a.output]  # type: ignore[index]
        if isinstance(a.primitive, Softmax):
            pair.softmax[0] = a.primitive.dim in (-1, after.ndim - 1)
        elif before.shape[-1] == after.shape[-1]:
            self._logits[a.output] = pair
        return self._read(self._of(a, 1))

    def _attention(self, a: Application, p: ScaledDotProductAttention) -> list[Channel]:
        heads = self.trace.values[a.inputs[0]].shape[-3] if p.enable_gqa else 0  # type: ignore[index]

        def shared(c: Channel) -> Channel:
            return c.at(c.columns.repeat_interleave(heads // c.columns.shape[-3], -3)) if heads else c

        q, k, v = self._of(a, 0), [shared(c) for c in self._of(a, 1)], [shared(c) for c in self._of(a, 2)]
        pair = self._pair(q, k, turned=True)
        self._read([c for c in (*q, *k) if pair is None or c not in (pair.channel, pair.right)] + self._of(a, 3))
        return self._weighted(v, self.trace.values[a.output].shape)

    def _sum(self, a: Application) -> list[Channel]:
        out = self.trace.values[a.output]
        places = range(len(a.inputs))
        found = [c.at(c.columns.expand(out.shape)) for i in places for c in self._of(a, i) if self._spans(c, out)]
        legs = [self._leg(a, i) for i in places if self._last(a, i) == out.shape[-1] and not self._of(a, i)]
        added = [leg for leg in legs if leg is not None]
        plain = [c for c in found if not c.summed]
        if len(added) == 1 and len(added[0].at) == 1 and len(plain) == 1 and self._joined(plain[0], added[0]):
            return found
        tables = [self._space(a, (leg, "bias" if len(leg.at) == 1 else "table")) for leg in added]
        return [replace(c, summed=True) for c in (*found, *tables)]

    def _joined(self, c: Channel, bias: Leg) -> bool:
        """Let a bias be one of the parameters that make a channel's columns, if it has an entry for each of them."""
        vector = c.vector()
        if vector is None or len(torch.unique(vector)) != c.space.size:
            return False
        at = torch.empty_like(bias.at)
        at[:, vector - c.space.first] = bias.at
        c.space.legs.append((Leg(bias.parameter, at), "bias"))
        return True

    def _last(self, a: Application, position: int) -> int:
        value = self.trace.values[a.inputs[position]]  # type: ignore[index]
        return value.shape[-1] if value.ndim else 1

    def _spans(self, c: Channel, out: Tensor) -> bool:
        """Whether a channel has the last axis of a result; one that is repeated along it is read here for good."""
        if c.columns.ndim and c.columns.shape[-1] == out.shape[-1]:
            return True
        self._read([c])
        return False

    def _multiplied(self, a: Application) -> list[Channel]:
        out = self.trace.values[a.output]
        passed: list[Channel] = []
        for i in (0, 1):
            found, leg = self._of(a, i), self._leg(a, i)
            if isinstance(a.primitive, Divide) and i == 1:
                self._read(found)
                continue
            passed += [c.at(c.columns.expand(out.shape)) for c in self._passed(found) if self._spans(c, out)]
            if leg is not None and not found and len(leg.at) == 1 and self._last(a, i) == out.shape[-1]:
                passed.append(self._space(a, (leg, "gain")).entrywise())
        return passed

    def _norm(self, a: Application, p: LayerNorm | RMSNorm) -> list[Channel]:
        centred, moving = isinstance(p, LayerNorm), self._of(a, 0)
        if p.dims != 1:
            return self._read(moving)
        gain, bias = self._leg(a, 1), self._leg(a, 2)
        absent = [len(a.inputs) <= i or a.inputs[i] is None for i in (1, 2)]
        rotated = [(c, None if centred or not all(absent) else c.rotated()) for c in moving]
        eps = torch.finfo(self.trace.values[a.output].dtype).eps if p.eps is None else p.eps
        signs = self.trace.values[a.output].shape[-1] <= 1 + centred  # all that is left of so short a row
        for c, r in rotated:
            self.uses.append(Use(c, c.columns) if signs else RowUse(c, unique_rows(c.columns), centred, eps, r is not None))
        if all(absent):
            return [r for _, r in rotated if r is not None]
        if gain is None or (bias is None and not absent[1]):
            return []
        return [self._space(a, (gain, "gain"), (bias, "bias")).entrywise()]

    def _pooled(self, a: Application, p: Mean | SumOver) -> list[Channel]:
        before = self.trace.values[a.inputs[0]]  # type: ignore[index]
        axes = {axis % before.ndim for axis in p.dims}
        passed = []
        for c in self._of(a, 0):
            columns: Tensor | None = c.columns
            for axis in axes:
                columns = None if columns is None else constant_along(columns, axis)
            if columns is None or before.ndim - 1 in axes:
                self._read([c])
            else:
                passed.append(c.at(columns.expand(before.shape).amax(tuple(axes), keepdim=p.keepdim)))
        return passed
