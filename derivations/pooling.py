r"""Means and sums over axes, and the mean-pool head o = (1/L) 1^T Z W_c + b_c of the paper's vision transformer.

The head is linear in each argument, so its only second derivative is the mixed one (the paper trains with
this head and has no formula for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch import Tensor

from derivations.arrays import Array, scale
from derivations.matrix import Commutation, Dense, Identity, Matrix, Ones, kron
from derivations.operation import OperationAt, shape_of
from derivations.primitive import Covectors, Inputs, Primitive, Tangents, total
from derivations.vecr import kron_derivative_left, kron_derivative_right


@dataclass(frozen=True, eq=False)
class MeanPoolHeadAt(OperationAt):
    """o = (1/L) 1_L^T Z W_c + b_c, at a point.

    Args:
        Z: L x d, one sequence.
        W_c: d x C.
        b_c: (C,), or None for none, which is then no argument.

    Raises:
        ValueError: if the shapes do not fit.

    >>> import torch
    >>> point = MeanPoolHeadAt(torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]]))
    >>> point.value.tolist(), point.jacobian("Z").dense().tolist(), point.hessian("W_c", "Z").dense().tolist()
    ([[10.0]], [[2.5, 2.5]], [[0.5, 0.5]])
    """

    argument_names = ("Z", "W_c", "b_c")
    Z: Array
    W_c: Array
    b_c: Array | None = None

    def __post_init__(self) -> None:
        shapes = self.arguments
        fits = len(shapes["Z"]) == len(shapes["W_c"]) == 2 and shapes["Z"][1] == shapes["W_c"][0]
        if not fits or shapes.get("b_c", shapes["W_c"][1:]) != shapes["W_c"][1:]:
            raise ValueError(f"MeanPoolHeadAt: expected Z (L, d), W_c (d, C) and b_c (C,), got {shapes}")

    @cached_property
    def pooled(self) -> Array:
        """(1/L) 1_L^T Z, of shape (1, d)."""
        return scale(Fraction(1, int(self.Z.shape[0])), self.Z.sum(0).reshape(1, -1))

    @cached_property
    def value(self) -> Array:
        """o, of shape (1, C)."""
        out = self.pooled @ self.W_c
        return out if self.b_c is None else out + self.b_c.reshape(1, -1)

    def _jacobian(self, name: str) -> Matrix:
        """Return do/dZ = (1/L) 1_L^T (x) W_c^T, do/dW_c = (1/L) 1_L^T Z (x) I_C or do/db_c = I_C."""
        rows, classes = int(self.Z.shape[0]), int(self.W_c.shape[1])
        if name == "Z":
            return Fraction(1, rows) * kron(Ones(1, rows), Dense(self.W_c, "W_c").T)
        if name == "W_c":
            return kron(Dense(self.pooled, r"\tfrac1L\mathbf{1}^\top Z"), Identity(classes))
        return Identity(classes)

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the derivative of do/d(name_i) with respect to name_j.

            d2o/dW_c dZ = (K_{C,d} (x) I_C) (I_d (x) vec_r I_C) ((1/L) 1_L^T (x) I_d)      (C dC) x Ld
            d2o/dZ dW_c = (1/L) (K_{C,L} (x) I_d) (1_L (x) I_{Cd}) K_{C,d}                 (C Ld) x dC

        All other blocks are zero.
        """
        (rows, d), classes = shape_of(self.Z), int(self.W_c.shape[1])
        mean = Fraction(1, rows)
        if (name_i, name_j) == ("W_c", "Z"):
            return mean * (kron_derivative_left((1, d), Identity(classes)) @ kron(Ones(1, rows), Identity(d)))
        if (name_i, name_j) == ("Z", "W_c"):
            return mean * (kron_derivative_right(Ones(1, rows), (classes, d)) @ Commutation(classes, d))
        return None


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
        kept = [1 if i in axes else n for i, n in enumerate(X.shape)]
        spread = (adjoint * self._factor(X)).reshape(-1, *kept)
        return (spread.expand(-1, *X.shape),)

    def rowwise(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim and all(axis >= axes for axis in self._axes(inputs[0]))

    def _axes(self, X: Tensor) -> tuple[int, ...]:
        return tuple(axis % X.ndim for axis in self.dims) or tuple(range(X.ndim))

    def _reduce(self, X: Tensor, t: Tensor, leading: int) -> Tensor:
        axes = tuple(axis + leading for axis in self._axes(X))
        summed = t.sum(axes, keepdim=self.keepdim) if axes else t
        return summed if self._factor(X) == 1 else summed * self._factor(X)


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
        kept = self._kept(inputs[0])
        return kept if self.keepdim else kept.squeeze(self._axes(inputs[0]))

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
