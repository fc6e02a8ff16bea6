r"""Entrywise activations in vec_r.

For an entrywise sigma, d sigma(X)/dX = diag(vec_r sigma'(X)) and d2 sigma(X)/dX2 = E_n diag(vec_r sigma''(X)), with
E_n = (e_1 (x) e_1, ..., e_n (x) e_n). For ReLU the second vanishes off the kinks: Lemma 1 (and 3) of "Closing the
Curvature Gap". The smooth ones are ours; the paper has ReLU only. sigma, sigma' and sigma'' are those of
``derivations.activation_functions``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from derivations.activation_functions import Derivatives, Kind, derivatives
from derivations.arrays import Array, Scalar
from derivations.matrix import Diagonal, DiagonalLift, Matrix
from derivations.operation import OperationAt, shape_of, size


@dataclass(frozen=True, eq=False)
class ActivationAt(OperationAt):
    r"""N = sigma(X), entry by entry, at a point.

    Args:
        kind: "relu", "leaky_relu", "gelu" (with the error function), "gelu_tanh", "silu", "tanh" or "identity", or a function of
            X and the slope that returns sigma(X), sigma'(X) and sigma''(X).
        X: m x n.
        negative_slope: the slope of leaky_relu left of 0.

    Raises:
        ValueError: if there is no such kind.

    >>> import torch
    >>> point = ActivationAt("relu", torch.tensor([[-1.0, 2.0]]))
    >>> point.jacobian("X").dense().tolist(), point.hessian("X", "X").latex()
    ([[0.0, 0.0], [0.0, 1.0]], '0_{4\\times 2}')
    """

    argument_names = ("X",)
    kind: Kind
    X: Array
    negative_slope: Scalar = Fraction(1, 100)

    def __post_init__(self) -> None:
        _ = self._derivatives

    @cached_property
    def _derivatives(self) -> Derivatives:
        return derivatives(self.kind, self.X, self.negative_slope)

    @property
    def value(self) -> Array:
        """sigma(X), of shape (m, n)."""
        return self._derivatives[0]

    @property
    def first(self) -> Array:
        """sigma'(X), of shape (m, n)."""
        return self._derivatives[1]

    @property
    def second(self) -> Array | None:
        """sigma''(X), of shape (m, n); None where it vanishes identically."""
        return self._derivatives[2]

    def _jacobian(self, name: str) -> Matrix:
        """Return diag(vec_r sigma'(X)), mn x mn."""
        return Diagonal(self.first, r"\operatorname{vec}_r\,\sigma'(X)")

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return E_{mn} diag(vec_r sigma''(X)), (mn)^2 x mn."""
        n = size(shape_of(self.X))
        if self.second is None:
            return None
        return DiagonalLift(n) @ Diagonal(self.second, r"\operatorname{vec}_r\,\sigma''(X)")
