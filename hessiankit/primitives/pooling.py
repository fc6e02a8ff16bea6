"""Means, sums and extremes over axes as primitives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents, total


class _Reduction(Primitive):
    """Base class of Mean, SumOver and Extreme: a sum over axes, times a constant."""

    is_linear = True
    dims: tuple[int, ...]
    keepdim: bool

    def _factor(self, X: Tensor) -> float:
        """The constant that the sum is multiplied with."""
        return 1.0

    def value(self, *inputs: Tensor) -> Tensor:
        return self._reduce(inputs[0], inputs[0], 0)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return self._reduce(inputs[0], total(self, tangents[0]), 1)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        X, axes = inputs[0], self._axes(inputs[0])
        shape = [1 if i in axes else n for i, n in enumerate(X.shape)]
        return ((adjoint * self._factor(X)).reshape(-1, *shape).expand(-1, *X.shape),)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim and all(axis >= axes for axis in self._axes(inputs[0]))

    def _axes(self, X: Tensor) -> tuple[int, ...]:
        return tuple(axis % X.ndim for axis in self.dims) or tuple(range(X.ndim))

    def _reduce(self, X: Tensor, t: Tensor, leading: int) -> Tensor:
        axes = tuple(axis + leading for axis in self._axes(X))
        total = t.sum(axes, keepdim=self.keepdim) if axes else t
        return total if self._factor(X) == 1 else total * self._factor(X)


@dataclass(frozen=True)
class SumOver(_Reduction):
    """The sum over some axes; inputs (X,).

    Args:
        dims: the axes, all of them if empty (as in torch).
        keepdim: keep each as an axis of length one.

    >>> import torch
    >>> SumOver((0,)).value(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [4.0, 6.0]
    """

    dims: tuple[int, ...]
    keepdim: bool = False


@dataclass(frozen=True)
class Mean(_Reduction):
    """The mean over some axes; inputs (X,).

    Args:
        dims: the axes, all of them if empty (as in torch).
        keepdim: keep each as an axis of length one.

    >>> import torch
    >>> Mean((-1,), keepdim=True).vjp((torch.ones(1, 2),), torch.ones(1, 1, 1))[0].tolist()
    [[[0.5, 0.5]]]
    """

    dims: tuple[int, ...]
    keepdim: bool = False

    def _factor(self, X: Tensor) -> float:
        count = 1
        for axis in self._axes(X):
            count *= X.shape[axis]
        return 1 / count


@dataclass(frozen=True)
class Extreme(_Reduction):
    """The largest, smallest or middle entry over some axes; inputs (X,).

    Off ties it is one of the entries, with that entry's derivatives and no curvature; among equal entries the derivative
    is shared evenly, as in torch.

    Args:
        kind: "amax", "amin" or "median" (the lower one of two).
        dims: the axes, all of them if empty.
        keepdim: keep each as an axis of length one.

    Raises:
        ValueError: if there is no such kind.

    >>> import torch
    >>> Extreme("amax", (0,)).vjp((torch.tensor([1.0, 3.0, 3.0]),), torch.ones(1))[0].tolist()
    [[0.0, 0.5, 0.5]]
    """

    kind: str
    dims: tuple[int, ...] = ()
    keepdim: bool = False
    reads_values = True  # they tell which entry is the extreme one

    def __post_init__(self) -> None:
        if self.kind not in ("amax", "amin", "median"):
            raise ValueError(f"Extreme: there is no kind {self.kind!r}; the kinds are amax, amin, median")

    def value(self, *inputs: Tensor) -> Tensor:
        extremes = self._kept(inputs[0])
        return extremes if self.keepdim else extremes.squeeze(self._axes(inputs[0]))

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return self._reduce(inputs[0], total(self, tangents[0]) * self._share(inputs[0]), 1)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        (spread,) = super().vjp(inputs, adjoint)
        return (spread * self._share(inputs[0]),)  # type: ignore[operator]

    def choice_axes(self, inputs: Inputs) -> tuple[int, ...]:
        return self._axes(inputs[0])

    def _kept(self, X: Tensor) -> Tensor:
        axes = self._axes(X)
        if self.kind != "median":
            return getattr(X, self.kind)(axes, keepdim=True)
        rest = [i for i in range(X.ndim) if i not in axes]
        middle = X.permute([*rest, *axes]).flatten(len(rest)).median(-1).values
        return middle.reshape([1 if i in axes else n for i, n in enumerate(X.shape)])

    def _share(self, X: Tensor) -> Tensor:
        hit = self._kept(X) == X
        return hit.to(X.dtype) / hit.sum(self._axes(X) or None, keepdim=True)
