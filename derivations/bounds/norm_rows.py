r"""Derivatives of LayerNorm and RMSNorm row by row, and the exact row Hessian of a mean-squared error after a norm.

J and K(r) = D^2<r, norm(x)> are the first and second derivatives of the norm chapter (``derivations.linearised_norms``). With
xhat = C x / s and s^2 = ||C x||^2 / d + eps,

    J J + K(xhat) = (eps / s^4) (C - 4 xhat xhat^T / d)

is half of D^2 ||xhat||^2: zero for eps = 0, where all rows have the same norm. Then the Hessian of ||xhat - t||^2 is that of
-2 <xhat, t>, without a Gauss-Newton term (here for any eps). Sums of J J and K(xhat) as they stand
would lose digits to that cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from derivations.bounds.constants import row_scales
from derivations.linearised_norms import LinearisedNorm
from derivations.normalization import LayerNorm, RMSNorm


@dataclass(frozen=True, eq=False)
class NormRows:
    """A normalization at L rows of width d, with an optional gain and shift.

    Args:
        X: L x d.
        gamma: d gains, or None for ones.
        beta: d shifts, or None for zeros.
        eps: added to the variance or mean square.
        norm: ``"layernorm"`` or ``"rmsnorm"``.

    Raises:
        ValueError: if the norm is unknown or a row has s = 0.

    >>> NormRows(torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)).s  # the variance is 2/3
    tensor([0.8165], dtype=torch.float64)
    """

    X: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    eps: float = 0.0
    norm: str = "layernorm"

    def __post_init__(self) -> None:
        _ = self._scales

    @property
    def centred(self) -> Tensor:
        """C x of every row, L x d."""
        return self._scales[0]

    @property
    def s(self) -> Tensor:
        """The divisors, L."""
        return self._scales[1].squeeze(1)

    @cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        return row_scales("NormRows", self.X, self.eps, self.norm)

    @property
    def value(self) -> Tensor:
        """gamma * xhat + beta, L x d."""
        scaled = self._at.x if self.gamma is None else self._at.x * self.gamma
        return scaled if self.beta is None else scaled + self.beta

    @property
    def jacobian(self) -> Tensor:
        """L x d x d, with row vectors in mind: dx_i times it is dy_i."""
        return self._at.jacobian_rows()

    def pull(self, r: Tensor) -> Tensor:
        """Return the gradient with respect to X of <r, norm(X)>, L x d."""
        return torch.einsum("ide,ie->id", self.jacobian, r)

    def curvature(self, r: Tensor) -> Tensor:
        """Return the second derivative of <r_i, norm(x_i)> in every row, L x d x d."""
        return self._linearised(r).curvature_rows()

    def squared_error(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient (L x d) and Hessian (L x d x d) of sum_i ||norm(x_i) - target_i||^2 / 2 in every row."""
        gains = torch.ones_like(self.X[0]) if self.gamma is None else self.gamma
        shift = -target if self.beta is None else self.beta - target
        if not bool((gains == gains[0]).all()):
            J, residual = self.jacobian, self.value - target
            return self.pull(residual), J @ J.mT + self.curvature(residual)
        x, d, g, lack = self._at.x, self.X.shape[1], gains[0], (self.eps / self.s**2).unsqueeze(1)  # exactly zero with eps
        centring = torch.eye(d, dtype=x.dtype, device=x.device) - (1 / d if self.norm == "layernorm" else 0.0)
        own = (lack / self.s.unsqueeze(1) ** 2).unsqueeze(2) * (centring - (4 / d) * x.unsqueeze(2) * x.unsqueeze(1))
        slope = lack / self.s.unsqueeze(1) * x
        return g**2 * slope + self.pull(shift), g**2 * own + self.curvature(shift)

    @cached_property
    def _at(self) -> LinearisedNorm:
        return self._linearised(None)

    def _linearised(self, adjoint: Tensor | None) -> LinearisedNorm:
        primitive = LayerNorm(1, self.eps) if self.norm == "layernorm" else RMSNorm(1, self.eps)
        at = primitive.linearise((self.X,) if self.gamma is None else (self.X, self.gamma), adjoint)
        assert isinstance(at, LinearisedNorm)
        return at
