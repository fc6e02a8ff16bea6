r"""Derivatives of LayerNorm and RMSNorm row by row (a second copy: ``derivations.normalization`` has them for all rows at once),
and the exact row Hessian of a mean-squared error after a norm.

With xhat = C x / s, s^2 = ||C x||^2 / d + eps and v = gamma o r, J and K(r) = D^2<r, norm(x)> are

    J    = P diag(gamma) / s,                                        P = C - xhat xhat^T / d
    K(r) = -nu (C - 3 xhat xhat^T / d) / s^2 + e xhat^T + xhat e^T,  nu = xhat.v / d,   e = -C v / (d s^2)

A row of two entries of LayerNorm, or of one of RMSNorm, moves along xhat alone: there P = eps C / s^2, of which the difference
loses all digits where eps is small beside the variance, and K(r) = -3 nu P / s^2.

For gamma = 1 the sum

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

    @cached_property
    def normalised(self) -> Tensor:
        """Rows xhat, L x d."""
        return self.centred / self._scales[1]

    @property
    def value(self) -> Tensor:
        """gamma * xhat + beta, L x d."""
        scaled = self.normalised if self.gamma is None else self.normalised * self.gamma
        return scaled if self.beta is None else scaled + self.beta

    @property
    def jacobian(self) -> Tensor:
        """L x d x d, with row vectors in mind: dx_i times it is dy_i."""
        slope = self._slope if self.gamma is None else self._slope * self.gamma
        return (self._centring - self._projected.unsqueeze(2) * self._projected.unsqueeze(1) / self._d) * slope.unsqueeze(1)

    def pull(self, r: Tensor) -> Tensor:
        """Return the gradient with respect to X of <r, norm(X)>, L x d."""
        return torch.einsum("ide,ie->id", self.jacobian, r)

    def curvature(self, r: Tensor) -> Tensor:
        """Return the second derivative of <r_i, norm(x_i)> in every row, L x d x d."""
        v, x, s, d = r if self.gamma is None else r * self.gamma, self._projected, self._scales[1], self._d
        v = v * self._slope
        nu = (self.normalised * v).mean(1, keepdim=True) / s * (3 if self._is_collinear else 1)
        e = (v @ self._centring) / (-d * s)
        half = (e + (1.5 / d) * nu * x).unsqueeze(2) * x.unsqueeze(1)
        return half + half.mT - nu.unsqueeze(2) * self._centring

    def squared_error(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient (L x d) and Hessian (L x d x d) of sum_i ||norm(x_i) - target_i||^2 / 2 in every row."""
        gains = torch.ones_like(self.X[0]) if self.gamma is None else self.gamma
        shift = -target if self.beta is None else self.beta - target
        if not bool((gains == gains[0]).all()):
            J, residual = self.jacobian, self.value - target
            return self.pull(residual), J @ J.mT + self.curvature(residual)
        x, d, g, lack = self.normalised, self._d, gains[0], (self.eps / self.s**2).unsqueeze(1)  # exactly zero with eps
        own = (lack / self.s.unsqueeze(1) ** 2).unsqueeze(2) * (self._centring - (4 / d) * x.unsqueeze(2) * x.unsqueeze(1))
        slope = lack / self.s.unsqueeze(1) * x
        return g**2 * slope + self.pull(shift), g**2 * own + self.curvature(shift)

    @property
    def _d(self) -> int:
        return self.X.shape[1]

    @cached_property
    def _centring(self) -> Tensor:
        """C, d x d."""
        mean = 1 / self._d if self.norm == "layernorm" else 0.0
        return torch.eye(self._d, dtype=self.X.dtype, device=self.X.device) - mean

    @property
    def _is_collinear(self) -> bool:
        """Whether a row moves along xhat alone."""
        return self._d == (2 if self.norm == "layernorm" else 1)

    @property
    def _projected(self) -> Tensor:
        """The xhat of P, or 0 where P is a multiple of C."""
        return torch.zeros_like(self.normalised) if self._is_collinear else self.normalised

    @property
    def _slope(self) -> Tensor:
        """1 / s, with the multiple of C that P is where rows are collinear, L x 1."""
        s = self._scales[1]
        return self.eps / s**3 if self._is_collinear else 1 / s
