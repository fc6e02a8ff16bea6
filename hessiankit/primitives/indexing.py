"""Slices, concatenations and gathers: operations that move entries without changing them.

All are linear, N = P vec_r(X) with a matrix P of zeros and ones that is never formed: the pull is P^T, which puts every
entry back where it came from, and adds where one was taken several times.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.directions import add_at, align, joint_shape, same_rows, unbroadcast
from hessiankit.primitives.primitive import Covectors, Inputs, Linearised, PartOfCovectors, Primitive, Sums, Tangents, total


class EntryView(Primitive):
    """Some entries of one input, as a view of it."""

    is_linear = True
    selects = True

    @abstractmethod
    def view(self, X: Tensor, leading: int = 0) -> Tensor:
        """Return the entries of tensors shaped like the input behind some leading axes."""

    def value(self, *inputs: Tensor) -> Tensor:
        return self.view(inputs[0])

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return self.view(total(self, tangents[0]), 1)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return (PartOfCovectors(self.of_directions, inputs[0].shape, adjoint).dense(),)

    def of_directions(self, X: Tensor) -> Tensor:
        """Return the entries of a stack of directions."""
        return self.view(X, 1)

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedView(self, inputs, adjoint, needs)


class LinearisedView(Linearised):
    """A part of its input, whose covectors are zero elsewhere."""

    primitive: EntryView

    def pull_parts(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Sequence[Tensor | PartOfCovectors | None]:
        """Return the covectors of the part alone, unless they have a sum."""
        if bar is None or sums[0] is not None:
            return self.pull_into(bar, tangents, sums)
        return (PartOfCovectors(self.primitive.of_directions, self.inputs[0].shape, bar),)


@dataclass(frozen=True)
class Select(EntryView):
    """N = X[..., i, ...], one position of one axis, which disappears; inputs (X,).

    >>> Select(-1, 0).vjp((torch.ones(2),), torch.tensor([3.0]))[0].tolist()
    [[3.0, 0.0]]
    """

    dim: int
    index: int

    def view(self, X: Tensor, leading: int = 0) -> Tensor:
        return X.select(self.dim if self.dim < 0 else self.dim + leading, self.index)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= _axis(inputs[0], self.dim)


@dataclass(frozen=True)
class Slice(EntryView):
    """N = X[..., start:stop:step, ...] along one axis, with Python's meaning of negative and of too large ends; inputs (X,).

    >>> Slice(0, 1, None, 2).vjp((torch.ones(4),), torch.tensor([[5.0, 6.0]]))[0].tolist()
    [[0.0, 5.0, 0.0, 6.0]]
    """

    dim: int
    start: int | None = None
    stop: int | None = None
    step: int = 1

    def view(self, X: Tensor, leading: int = 0) -> Tensor:
        return X[(slice(None),) * (self.dim % X.ndim if self.dim < 0 else self.dim + leading) + (self._range,)]

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        axis = _axis(inputs[0], self.dim)
        n = inputs[0].shape[axis]
        return axes <= axis or (axes <= inputs[0].ndim and range(n)[self._range] == range(n))

    @property
    def _range(self) -> slice:
        return slice(self.start, self.stop, self.step)


@dataclass(frozen=True)
class Concatenate(Primitive):
    """N = [X_1, ..., X_m] along an axis; inputs (X_1, ..., X_m), with equal numbers of axes.

    >>> Concatenate(0).jvp((torch.ones(1), torch.ones(2)), (torch.tensor([[3.0]]), None)).tolist()
    [[3.0, 0.0, 0.0]]
    """

    dim: int
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.cat(tuple(inputs), self.dim)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return torch.cat(_complete(inputs, tangents), _axis(inputs[0], self.dim) + 1)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        axis = _axis(inputs[0], self.dim)
        return tuple(adjoint.split([x.shape[axis] for x in inputs], axis + 1))

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= _axis(inputs[0], self.dim)


@dataclass(frozen=True)
class Stack(Primitive):
    """N = [X_1, ..., X_m] along a new axis; inputs (X_1, ..., X_m), all of one shape.

    >>> Stack(-1).value(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """

    dim: int
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.stack(tuple(inputs), self.dim)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return torch.stack(_complete(inputs, tangents), self._new_axis(inputs) + 1)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        return adjoint.unbind(self._new_axis(inputs) + 1)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= self._new_axis(inputs)

    def _new_axis(self, inputs: Inputs) -> int:
        return self.dim % (inputs[0].ndim + 1)


@dataclass(frozen=True, eq=False)
class Take(Primitive):
    """N = vec_r(X)[at]: any choice of entries, repeated or not, in any shape; inputs (X,).

    Args:
        at: positions in vec_r(X), integers of the output's shape. An operation that moves entries gives them when applied to
            the positions themselves: ``at = operation(torch.arange(X.numel()).reshape(X.shape))``.
        chosen: axes of X along which the values choose the entry, as in a maximum.

    >>> flip = Take(torch.tensor([1, 0]))
    >>> flip.jvp((torch.ones(2),), (torch.tensor([[3.0, 4.0]]),)).tolist()
    [[4.0, 3.0]]
    """

    at: Tensor
    chosen: tuple[int, ...] = ()
    is_linear = True
    selects = True

    def choice_axes(self, inputs: Inputs) -> tuple[int, ...]:
        return self.chosen

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0].reshape(-1)[self.at]

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        t = total(self, tangents[0])
        return t.reshape(t.shape[0], -1)[:, self.at]

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        out = adjoint.new_zeros(adjoint.shape[0], inputs[0].numel())
        add_at(out, 1, self.at.reshape(-1), adjoint.reshape(adjoint.shape[0], -1))
        return (out.reshape(-1, *inputs[0].shape),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        rows = inputs[0].shape[:axes]
        if axes > inputs[0].ndim or self.at.shape[:axes] != rows or not self.at.numel():
            return False
        row_of = self.at.reshape(rows.numel(), -1) // inputs[0].shape[axes:].numel()
        return bool((row_of == torch.arange(rows.numel(), device=row_of.device).unsqueeze(1)).all())


@dataclass(frozen=True, eq=False)
class Where(Primitive):
    """N = X where the condition holds and Y elsewhere, with broadcasting; inputs (X, Y).

    The condition is constant: where it depends on X, as in X > 0, its own derivative vanishes off the boundary.

    >>> pick = Where(torch.tensor([True, False]))
    >>> [c.tolist() for c in pick.vjp((torch.zeros(2), torch.zeros(1)), torch.tensor([[3.0, 4.0]]))]
    [[[3.0, 0.0]], [[4.0]]]
    """

    condition: Tensor
    is_linear = True

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.where(self.condition, inputs[0], inputs[1])

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        shape = self._shape(inputs)
        x, y = (align(t, x.shape, len(shape)) for x, t in zip(inputs, _complete(inputs, tangents), strict=True))
        return torch.where(self.condition, x, y).expand(-1, *shape)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        X, Y = inputs
        to_X, to_Y = adjoint.masked_fill(~self.condition, 0), adjoint.masked_fill(self.condition, 0)
        return unbroadcast(to_X, X.shape), unbroadcast(to_Y, Y.shape)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return same_rows(inputs, axes, motion, self._shape(inputs))

    def _shape(self, inputs: Inputs) -> torch.Size:
        return joint_shape(self.condition.shape, *(x.shape for x in inputs))


def _axis(X: Tensor, dim: int) -> int:
    return dim % X.ndim


def _complete(inputs: Inputs, tangents: Tangents) -> list[Tensor]:
    """Return the tangents with zeros for those that are None."""
    example = next((t for t in tangents if t is not None), None)
    if example is None:
        raise ValueError("jvp: every tangent is None; at least one input must move")
    zero = example.new_zeros(())
    return [zero.expand(example.shape[0], *x.shape) if t is None else t for x, t in zip(inputs, tangents, strict=True)]
