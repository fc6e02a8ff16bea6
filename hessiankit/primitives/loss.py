"""Squared error and cross entropy as primitives: value, gradient and second derivative along directions.

Formulas in vec_r are in ``derivations.loss``. A sampled loss has a Fisher matrix for a second derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.primitive import ByLinearising, Covectors, Inputs, Linearised, Primitive, Tangents, hollow, plus, total
from hessiankit.primitives.softmax import Covariance, covariance, peaks


@dataclass(frozen=True)
class MeanSquaredError(Primitive):
    """||Z - target||^2 / normalizer as a 0-dimensional tensor; inputs (Z, target) of one shape.

    The loss is differentiated in both inputs, since a target may move too (one network taught by another).

    Args:
        normalizer: the number of entries, for the mean.
        constant_target: True promises that the target never moves: its covectors are then None.

    >>> Z, target = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    >>> MeanSquaredError(2.0).value(Z, target).item(), MeanSquaredError(2.0).vjp((Z, target), torch.ones(1))[0].tolist()
    (2.0, [[2.0, 0.0]])
    """

    normalizer: float
    constant_target: bool = False

    def value(self, *inputs: Tensor) -> Tensor:
        return self._residual(inputs).square().sum() / self.normalizer

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        slope = (2 / self.normalizer) * self._residual(inputs).reshape(-1)
        difference = total(self, self._difference(tangents))
        return difference.reshape(difference.shape[0], -1) @ slope

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        residual = self._residual(inputs)
        return self._both((2 / self.normalizer) * adjoint.reshape(-1, *(1,) * residual.ndim) * residual)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        difference = self._difference(tangents)
        return (None, None) if difference is None else self._both(difference * (adjoint * (2 / self.normalizer)))

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        is_fixed = needs is not None and not needs[1]
        return Linearised(replace(self, constant_target=True) if is_fixed else self, inputs, adjoint, needs)

    def separable(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim

    def _both(self, to_Z: Tensor) -> Covectors:
        return to_Z, None if self.constant_target else -to_Z

    def _difference(self, tangents: Tangents) -> Tensor | None:
        t, t_target = tangents
        if t_target is None:
            return t
        if self.constant_target:
            raise ValueError("MeanSquaredError: the target moves although constant_target=True; leave the option out")
        return -t_target if t is None else t - t_target

    @staticmethod
    def _residual(inputs: Sequence[Tensor]) -> Tensor:
        Z, target = inputs
        if Z.shape != target.shape:
            raise ValueError(f"MeanSquaredError: the output has shape {tuple(Z.shape)} and the target {tuple(target.shape)}")
        return Z - target


@dataclass(frozen=True)
class CrossEntropy(ByLinearising):
    """Cross entropy of logits (..., C) with integer labels (...), over the last axis, as a 0-dimensional tensor.

    The sum over the rows whose label is not ``ignore_index``, divided by ``normalizer``: by the number of those rows where
    it is None, as in torch. A part of a batch needs the whole batch's number, or the parts do not add up.

    Args:
        ignore_index: the label of rows that do not count.
        label_smoothing: the share of the target distribution that is spread evenly over all classes.
        normalizer: Divisor of the sum, or None.

    >>> logits, labels = torch.zeros(2, 2), torch.tensor([0, -100])
    >>> CrossEntropy().vjp((logits, labels), torch.ones(1))[0].tolist()
    [[[-0.5, 0.5], [0.0, 0.0]]]
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    normalizer: float | None = None

    def value(self, *inputs: Tensor) -> Tensor:
        logits, labels, mask, normalizer = self._rows(inputs)
        log_p = torch.log_softmax(logits, -1)
        loss = -(1 - self.label_smoothing) * log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
        if self.label_smoothing:
            loss = loss - self.label_smoothing * log_p.mean(-1)
        return loss.where(mask, 0).sum() / normalizer

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedCrossEntropy(self, inputs, adjoint, needs)

    def separable(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes < inputs[0].ndim

    def _rows(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return logits (rows, C), labels and their mask of kept rows (rows,), and the number to divide by."""
        logits, labels = inputs
        if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"CrossEntropy: logits of shape {tuple(logits.shape)} need integer labels of shape {tuple(logits.shape[:-1])}, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}. The classes are the last axis."
            )
        labels = labels.reshape(-1).long()
        mask = labels != self.ignore_index
        count = int(mask.sum()) if self.normalizer is None else self.normalizer
        if count == 0:
            raise ValueError(f"CrossEntropy: all {labels.numel()} labels are {self.ignore_index}, so there is nothing to average")
        return logits.reshape(-1, logits.shape[-1]), labels.masked_fill(~mask, 0), mask, count

    @staticmethod
    def _tangent(tangents: Tangents) -> Tensor:
        if tangents[0] is None or any(t is not None for t in tangents[1:]):
            raise ValueError("CrossEntropy: the logits, and only they, must move; labels have no tangent")
        return tangents[0]


class LinearisedCrossEntropy(Linearised):
    """The probabilities p, (rows, C), and their covariance."""

    primitive: CrossEntropy

    def __init__(self, primitive: CrossEntropy, inputs: Inputs, adjoint: Tensor | None, needs: Sequence[bool] | None) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        logits, self.labels, self.kept, self.normalizer = primitive._rows(inputs)
        self.p = torch.softmax(logits, -1).masked_fill_(~self.kept.unsqueeze(1), 0)

    @cached_property
    def covariance(self) -> Covariance:
        """diag(p) - p p^T, row by row."""
        return Covariance(self.p, -1)

    def forget(self) -> None:
        """Keep the probabilities in place of the logits."""
        self.inputs = (hollow(self.inputs[0]), self.inputs[1])

    @property
    def slope(self) -> Tensor:
        """(P - Y) / normalizer in the kept rows, in the shape of the logits.

        At the label it is minus the sum of the other p: p - 1 would lose the digits of a confident row.
        """
        at, smoothing = self.labels.unsqueeze(1), self.primitive.label_smoothing
        even, slope = smoothing / self.p.shape[-1], self.p.scatter(1, at, 0)
        hit = smoothing - even - slope.sum(1, keepdim=True)
        slope = (slope.sub_(even) if even else slope).scatter_(1, at, hit).mul_(self._share)
        return slope.reshape(self.inputs[0].shape)

    def push(self, tangents: Tangents) -> Tensor:
        """Return t times the gradient."""
        t = self.primitive._tangent(tangents)
        return t.reshape(t.shape[0], -1) @ self.slope.reshape(-1)

    @torch.no_grad()
    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return bar times the gradient, plus adjoint p o (t - p.t) / normalizer."""
        first = None if bar is None else bar.reshape(-1, *(1,) * self.inputs[0].ndim) * self.slope
        if tangents is None:
            return first, None
        t = self.primitive._tangent(tangents).reshape(-1, *self.p.shape)
        second = self.covariance(t, self.adjoint * self._share)
        return plus(first, second.reshape(-1, *self.inputs[0].shape)), None

    def bent(self, t: Tensor, weight: Tensor) -> Tensor:
        """Return the second derivative along tangents (S, rows, C) of logits (rows, C), times a weight."""
        return covariance(self.p, t, peaks(self.p, -1)).mul_(weight)

    @cached_property
    def _share(self) -> Tensor:
        """The weight of each row: 1 / normalizer, or 0 where it is ignored, (rows, 1)."""
        return self.kept.unsqueeze(1).to(self.p.dtype) / self.normalizer


@dataclass(frozen=True)
class SampledLoss(ByLinearising):
    """A loss with outer products of gradients in place of its second derivative: sum_mr g_mr g_mr^T over targets m and rows r.

    g_mr is the gradient of the term of row r of Z for the target m, over the root of the numbers of terms and targets. The
    Gauss-Newton matrix is then the empirical Fisher for the data's targets, and the Monte-Carlo Fisher for drawn ones (Kunstner,
    Balles and Hennig, Limitations of the Empirical Fisher Approximation, 2019, Eqs. 2 and 3). Value and gradient are the loss's.

    Inputs (Z, T): Z of B ... C entries, and T (B, 1 + M, ...) whose second axis holds the loss's own target and M others. A
    part of the samples thus has the same rows of T.

    Args:
        loss: The loss, which has a normalizer.

    >>> sampled = SampledLoss(CrossEntropy(normalizer=1.0))
    >>> Z, T, t = torch.zeros(1, 2), torch.tensor([[0, 1]]), torch.tensor([[[1.0, 0.0]]])
    >>> sampled.curvature((Z, T), torch.ones(()), (t, None))[0].tolist()  # g = (1/2, -1/2)
    [[[0.25, -0.25]]]
    """

    loss: MeanSquaredError | CrossEntropy

    def value(self, *inputs: Tensor) -> Tensor:
        Z, T = inputs
        return self.loss.value(self.rows(Z.unsqueeze(0), T)[0], T[:, 0])

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedSampledLoss(self, inputs, adjoint, needs)

    def separable(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes < inputs[0].ndim

    def rows(self, Z: Tensor, T: Tensor) -> Tensor:
        """Return S times Z's entries in the shape (S, B, ..., C)."""
        classes = Z.shape[-1:] if isinstance(self.loss, CrossEntropy) else ()
        return Z.reshape(len(Z), len(T), *T.shape[2:], *classes)

    def terms(self, Z: Tensor, T: Tensor) -> Iterator[Tensor]:
        """Yield the vectors g of each target, (B, ..., C)."""
        rows, count = self.rows(Z.unsqueeze(0), T)[0], T.shape[1] - 1
        assert self.loss.normalizer is not None
        share = Z.new_full((1,), math.sqrt(self.loss.normalizer / count))
        for m in range(count):
            slope = self.loss.vjp((rows, T[:, 1 + m]), share)[0]
            assert slope is not None
            yield slope[0]


class LinearisedSampledLoss(Linearised):
    """The loss at one point; each product computes the gradients again, for one target after the other."""

    primitive: SampledLoss

    def __init__(self, primitive: SampledLoss, inputs: Inputs, adjoint: Tensor | None, needs: Sequence[bool] | None) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.Z, self.T = inputs
        rows = primitive.rows(self.Z.unsqueeze(0), self.T)[0]
        self.own = primitive.loss.linearise((rows, self.T[:, 0]), None, (True, False))

    @property
    def slope(self) -> Tensor:
        """The gradient of the loss itself, in the shape of Z."""
        return self.own.pull(self.Z.new_ones(1))[0].reshape(self.Z.shape)  # type: ignore[union-attr]

    def push(self, tangents: Tangents) -> Tensor:
        return self._tangent(tangents).flatten(1) @ self.slope.reshape(-1)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        first = None if bar is None else bar.reshape(-1, *(1,) * self.Z.ndim) * self.slope
        second = None if tangents is None else self.bent(self._tangent(tangents), self.adjoint)
        return plus(first, second), None

    def bent(self, t: Tensor, weight: Tensor) -> Tensor:
        """Return the second derivative along tangents (S, *Z.shape), times a weight."""
        rows = self.primitive.rows(t, self.T)
        out = torch.zeros_like(rows)
        for g in self.primitive.terms(self.Z, self.T):
            out.addcmul_((rows * g).sum(-1, keepdim=True), g)
        return out.reshape(t.shape).mul_(weight)

    @staticmethod
    def _tangent(tangents: Tangents) -> Tensor:
        if tangents[0] is None or tangents[1] is not None:
            raise ValueError("SampledLoss: Z, and only Z, must move; T has no tangent")
        return tangents[0]
