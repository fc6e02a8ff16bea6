"""Softmax and its logarithm as primitives, and the covariance of a row of weights, from which both derivatives are built.

With A = softmax(T), the Jacobian is the covariance C_A t = A o (t - A.t); formulas in vec_r are in ``derivations.softmax``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hessiankit.primitives.directions import stacks
from hessiankit.primitives.primitive import ByLinearising, Covectors, Inputs, Linearised, Primitive, Tangents, hollow, total


@dataclass(frozen=True)
class _AlongAxis(Primitive):
    """Base class of Softmax and LogSoftmax: rows along one axis."""

    dim: int = -1
    regular = (0.0,)

    def singular(self, inputs: Inputs, output: Tensor) -> Tensor | None:
        """Return the rows with all entries minus infinity, for which torch returns NaN."""
        return output.isnan()

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim + self._axis(inputs[0])

    def _axis(self, T: Tensor) -> int:
        """The axis counted from the end, which is the same for T and for a stack of tangents."""
        return self.dim if self.dim < 0 else self.dim - T.ndim


@dataclass(frozen=True)
class Softmax(_AlongAxis, ByLinearising):
    """Softmax along one axis as a primitive; inputs (T,).

    With q = A o (w - A.w) for an adjoint w, the contracted second derivative is q o t - q (A.t) - A (q.t): diagonal plus
    rank two. Masks are additions to T before it.

    >>> Softmax(-1).jvp((torch.zeros(2),), (torch.tensor([[1.0, 0.0]]),)).tolist()
    [[0.25, -0.25]]
    """

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.softmax(inputs[0], self.dim)

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedSoftmax(self, inputs, adjoint, self._axis(inputs[0]))


class LinearisedSoftmax(Linearised):
    """A = softmax(T) along ``axis``, counted from the end, with q = A o (w - A.w)."""

    def __init__(self, primitive: Softmax, inputs: Inputs, adjoint: Tensor | None, axis: int) -> None:
        super().__init__(primitive, inputs, adjoint)
        self.a, self.axis = primitive.value(*inputs), axis
        self.covariance = Covariance(self.a, axis)

    def forget(self) -> None:
        """Keep the weights alone."""
        self.inputs = (hollow(self.inputs[0]),)

    @cached_property
    def q(self) -> Tensor:
        """The adjoint pulled back."""
        return self.covariance(self.adjoint.unsqueeze(0))[0]

    def push(self, tangents: Tangents) -> Tensor:
        """Return A o (t - A.t)."""
        return self.covariance(total(self.primitive, tangents[0]))

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return A o (bar - A.bar) + q o t - q (A.t) - A (q.t) = z - A (1.z) - q (A.t), with z = A o bar + q o t."""
        t = None if tangents is None else tangents[0]
        if t is None:
            return (None if bar is None else self.covariance(bar),)
        covariance = self.covariance
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        for part, into, u in stacks(t, out, bar):
            differences = covariance.differences(part)
            projection = torch.mul(differences, self.a, out=into).sum(self.axis, keepdim=True)
            if u is None:
                torch.mul(differences, self.q, out=into)
            else:
                covariance.differences(u, out=into).mul_(self.a).addcmul_(differences, self.q)
            covariance.centre(into).addcmul_(self.q, projection, value=-1)
        return (out,)


class Covariance:
    """C_a t = a o (t - a.t) for weights a with rows along an axis, and many tangents t at once.

    t is measured from the peak of its row (:func:`peaks`).

    Args:
        a: The weights.
        axis: The rows' axis, counted from the end.

    >>> Covariance(torch.tensor([0.5, 0.5]), -1)(torch.tensor([[1.0, 0.0]])).tolist()
    [[0.25, -0.25]]
    """

    def __init__(self, a: Tensor, axis: int) -> None:
        self.a, self.axis = a, axis
        peak = peaks(a, axis)
        self.shape = peak.shape
        positions = torch.arange(a.numel(), device=a.device).reshape(a.shape)
        self.positions = torch.take_along_dim(positions, peak, axis).reshape(-1)

    def __call__(self, t: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return C_a t for tangents (S, *shape of the weights), multiplied by a weight for each row if there is one."""
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        for part, into in stacks(t, out):
            self.centre(self.differences(part, out=into).mul_(self.a))
            if weight is not None:
                into.mul_(weight)
        return out

    def differences(self, t: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return tangents, (S, *shape of the weights), less their value at the peak of their row."""
        top = t.reshape(t.shape[0], -1).index_select(1, self.positions).reshape(-1, *self.shape)
        return torch.sub(t, top, out=out)

    def centre(self, z: Tensor) -> Tensor:
        """Return z - a (1.z), in place."""
        return z.addcmul_(self.a, z.sum(self.axis, keepdim=True), value=-1)


def covariance(a: Tensor, t: Tensor, peak: Tensor, axis: int = -1) -> Tensor:
    """Return C_a t = a o (t - a.t) where weights and tangents broadcast; ``peak`` is :func:`peaks` of the weights."""
    z = a * from_peak(t, peak, axis)
    return z.addcmul_(a, z.sum(axis, keepdim=True), value=-1)


SATURATED = 0.9999
"""A weight beyond which 1 - a is computed as the sum of the other weights."""


def peaks(a: Tensor, axis: int) -> Tensor:
    """Return where each row of weights has its largest, with the axis kept.

    t - A.t is a small difference of large numbers at a weight of almost 1, and wherever t is nearly constant along its row. A
    covariance does not change when a constant is taken from t; with the constant that t has at the peak, which floats subtract
    without an error where it matters, every entry keeps its digits.
    """
    size = a.shape[axis]
    if size == 0:
        return a.new_zeros(a.shape, dtype=torch.long)
    width = math.isqrt(size)
    if a.device.type != "cpu" or width < 8:
        return a.argmax(axis, keepdim=True)
    # On a processor amax is twenty times as fast as argmax: the peak is that of the part with the largest entry.
    rows = a.movedim(axis, -1)
    parts = rows[..., : size // width * width].unflatten(-1, (-1, width)).amax(-1)
    parts = torch.cat((parts, rows[..., -width:].amax(-1, keepdim=True)), -1)
    start = (parts.argmax(-1, keepdim=True) * width).clamp_(max=size - width)
    offset = rows.gather(-1, start + torch.arange(width, device=a.device)).argmax(-1, keepdim=True)
    return (start + offset).movedim(-1, axis)


def nearly_one_hot(a: Tensor, axis: int) -> bool:
    """Tell whether a row of weights is close to one-hot and not one-hot, as masks make it."""
    if a.is_meta or not a.numel():
        return False
    return bool(((a.amax(axis) > SATURATED) & ((a != 0).sum(axis) > 1)).any())


def from_peak(t: Tensor, peak: Tensor, axis: int) -> Tensor:
    """Return tangents less their value at the peak of their row."""
    return t - torch.take_along_dim(t, peak.reshape((1,) * (t.ndim - peak.ndim) + peak.shape), axis)


@dataclass(frozen=True)
class LogSoftmax(_AlongAxis):
    """N = T - log sum exp T along one axis as a primitive; inputs (T,).

    With A = softmax(T): D N [t] = t - A.t, its transpose is w - A (1.w), and the contracted second derivative is
    -(1.w) A o (t - A.t), for an adjoint w. t is measured from the peak p of its row (:func:`peaks`); where a row is saturated,
    the transpose is written w_p (1 - A_p) - A_p (1.w - w_p) at p, with 1 - A_p as the sum of the other weights.

    >>> LogSoftmax(-1).jvp((torch.zeros(2),), (torch.tensor([[1.0, 0.0]]),)).tolist()
    [[0.5, -0.5]]
    """

    def value(self, *inputs: Tensor) -> Tensor:
        return torch.log_softmax(inputs[0], self.dim)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        a, axis = torch.softmax(inputs[0], self.dim), self._axis(inputs[0])
        t = from_peak(total(self, tangents[0]), peaks(a, axis), axis)
        return t - (a * t).sum(axis, keepdim=True)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        a, axis = torch.softmax(inputs[0], self.dim), self._axis(inputs[0])
        out = adjoint - a * adjoint.sum(axis, keepdim=True)
        if not nearly_one_hot(a, axis):
            return (out,)
        top = torch.zeros_like(a, dtype=torch.bool).scatter(axis, peaks(a, axis), True)
        adjoint_sum, rest = adjoint.masked_fill(top, 0).sum(axis, keepdim=True), a.masked_fill(top, 0).sum(axis, keepdim=True)
        return (torch.where(top, adjoint * rest - a * adjoint_sum, out),)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        if tangents[0] is None:
            return (None,)
        a, axis = torch.softmax(inputs[0], self.dim), self._axis(inputs[0])
        return (-adjoint.sum(axis, keepdim=True) * covariance(a, tangents[0], peaks(a, axis), axis),)
