r"""Squared error and cross entropy: value, gradient row and Hessian in vec_r.

Squared error is the mean over all entries, l = ||Z - target||_F^2 / (L d_V), with second derivative
2/(L d_V) I. Cross entropy, which the paper does not have, is the mean over the tokens, with

```math
\ell' = \tfrac1L\mathrm{vec}_r(P - Y)^\top,\qquad \ell'' = \tfrac1L\mathrm{blockdiag}(\mathrm{diag}(p_i) - p_ip_i^\top)
```

where P is the softmax of the logits and Y one-hot.

Corrected (curvature-gap/eq7-l): below its Eq. 7 "Closing the Curvature Gap" prints the loss without 1/(L d_V) and its second
derivative with it; the two belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from derivations.arrays import Array, is_exact, scale, symbolic
from derivations.matrix import Dense, Identity, Matrix
from derivations.operation import OperationAt, shape_of, size
from derivations.row_blocks import RowCovariance
from derivations.softmax import softmax


@dataclass(frozen=True, eq=False)
class MeanSquaredErrorAt(OperationAt):
    """l = ||Z - target||_F^2 / (L d), at a point.

    Args:
        Z: L x d.
        target: L x d, a constant.

    Raises:
        ValueError: if the shapes differ.

    >>> point = MeanSquaredErrorAt(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    >>> point.value.tolist(), point.jacobian("Z").dense().tolist(), point.hessian("Z", "Z")
    ([[2.0]], [[2.0, 0.0]], Identity(2x2: I_{2}))
    """

    argument_names = ("Z",)
    Z: Array
    target: Array

    def __post_init__(self) -> None:
        if shape_of(self.Z) != shape_of(self.target):
            raise ValueError(f"MeanSquaredErrorAt: Z has shape {shape_of(self.Z)}, the target {shape_of(self.target)}")

    @property
    def _residual(self) -> Array:
        return self.Z - self.target

    @cached_property
    def value(self) -> Array:
        """l, of shape (1, 1)."""
        residual = self._residual.reshape(1, -1)
        return scale(Fraction(1, size(shape_of(self.Z))), (residual * residual).sum(1).reshape(1, 1))

    def _jacobian(self, name: str) -> Matrix:
        """Return 2 vec_r(Z - target)^T / (L d), 1 x Ld."""
        row = Dense(self._residual.reshape(1, -1), r"\operatorname{vec}_r(Z-\text{Target})^\top")
        return Fraction(2, size(shape_of(self.Z))) * row

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return 2/(L d) I, Ld x Ld."""
        n = size(shape_of(self.Z))
        return Fraction(2, n) * Identity(n)


@dataclass(frozen=True, eq=False)
class CrossEntropyAt(OperationAt):
    """The mean over the rows of -log softmax(logits)[label], at a point.

    Args:
        logits: L x C.
        labels: L integers from 0 to C - 1.
        weights: L x C with rows that sum to one, taken for P in place of softmax(logits): rational ones give exact
            derivatives.

    Raises:
        ValueError: if the shapes do not fit, or a label is out of range.

    >>> point = CrossEntropyAt(torch.zeros(1, 2), [0])
    >>> point.jacobian("logits").dense().tolist(), point.hessian("logits", "logits").dense().tolist()
    ([[-0.5, 0.5]], [[0.25, -0.25], [-0.25, 0.25]])
    """

    argument_names = ("logits",)
    logits: Array
    labels: Sequence[int] | Tensor
    weights: Array | None = None

    def __post_init__(self) -> None:
        shape, labels = shape_of(self.logits), self._labels
        if len(shape) != 2 or len(labels) != shape[0] or not all(0 <= label < shape[1] for label in labels):
            raise ValueError(f"CrossEntropyAt: logits of shape (L, C) need L labels below C; got shape {shape}, labels {labels}")
        if self.weights is not None and shape_of(self.weights) != shape:
            raise ValueError(f"CrossEntropyAt: weights have shape {shape_of(self.weights)}, the logits {shape}")

    @property
    def _labels(self) -> list[int]:
        return [int(label) for label in self.labels]

    @cached_property
    def P(self) -> Array:
        """The probabilities softmax(logits), L x C."""
        return softmax(self.logits) if self.weights is None else self.weights

    @cached_property
    def value(self) -> Array:
        """The loss, of shape (1, 1)."""
        rows = len(self._labels)
        chosen = [self.P[i, label] for i, label in enumerate(self._labels)]
        if is_exact(self.logits):
            return np.array([[-sum(symbolic("log", np.array(chosen, dtype=object))) / rows]], dtype=object)
        if self.weights is not None:
            return -torch.stack(chosen).log().mean().reshape(1, 1)
        labels = torch.as_tensor(self._labels, device=self.logits.device)
        return torch.nn.functional.cross_entropy(self.logits, labels).reshape(1, 1)

    def _jacobian(self, name: str) -> Matrix:
        """Return vec_r(P - Y)^T / L, 1 x LC."""
        rows, classes = shape_of(self.logits)
        one_hot = np.array([[int(label == c) for c in range(classes)] for label in self._labels], dtype=object)
        if is_exact(self.P):
            slope = self.P - one_hot
        else:  # p - 1 is minus the sum of the other p, which keeps its digits where p is almost 1
            Y = torch.tensor(one_hot.tolist(), dtype=self.P.dtype, device=self.P.device)
            others = self.P * (1 - Y)
            slope = others - Y * others.sum(1, keepdim=True)
        return Fraction(1, rows) * Dense(slope.reshape(1, -1), r"\operatorname{vec}_r(P-Y)^\top")

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return blockdiag(diag(p_i) - p_i p_i^T) / L, LC x LC."""
        return Fraction(1, len(self._labels)) * RowCovariance(self.P, "p_i")
