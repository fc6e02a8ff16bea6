r"""Derivatives of LayerNorm and RMSNorm row by row, and the exact row Hessian of a mean-squared error after a norm.

With xhat = C x / s, s^2 = ||C x||^2 / d + eps, rho^2 = 1 - eps / s^2 and u = xhat / ||xhat|| (``derivations.bounds.constants``):

    J            = (1/s) (C - rho^2 u u^T)
    K(r)         = D^2<r, xhat> = -(rho / (sqrt(d) s^2)) [(C r) u^T + u (C r)^T + (u.r) C - 3 rho^2 (u.r) u u^T]
    J J + K(xhat) = ((1 - rho^2) / s^2) (C - 4 rho^2 u u^T)

The last line is half of D^2 ||xhat||^2: zero for eps = 0, where all rows have the same norm. Then the Hessian of
||xhat - t||^2 is that of -2 <xhat, t>, without a Gauss-Newton term (bounds review, section 3.4, here for any eps). Sums of
J J and K(xhat) as they stand would lose digits to that cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        if self.norm not in ("layernorm", "rmsnorm"):
            raise ValueError(f"NormRows: unknown norm {self.norm!r}, expected 'layernorm' or 'rmsnorm'")
        if not bool((self.s > 0).all()):
            row = int((~(self.s > 0)).nonzero()[0])
            raise ValueError(
                f"NormRows: {self.norm} of row {row} divides by zero, as eps = {self.eps}. Pass eps > 0 or other rows."
            )

    @property
    def centring(self) -> Tensor:
        """C, d x d."""
        d = self.X.shape[1]
        identity = torch.eye(d, dtype=self.X.dtype)
        return identity - 1 / d if self.norm == "layernorm" else identity

    @property
    def centred(self) -> Tensor:
        """C x of every row, L x d."""
        return self.X - self.X.mean(1, keepdim=True) if self.norm == "layernorm" else self.X

    @property
    def s(self) -> Tensor:
        """The divisors, L."""
        return (self.centred.square().mean(1) + self.eps).sqrt()

    @property
    def rho_squared(self) -> Tensor:
        """rho^2 of every row, L."""
        return self.centred.square().mean(1) / self.s**2

    @property
    def u(self) -> Tensor:
        """The unit rows, L x d; zero where a row is constant, for there rho = 0 multiplies them."""
        norm = self.centred.norm(dim=1, keepdim=True)
        return self.centred / torch.where(norm > 0, norm, torch.ones_like(norm))

    @property
    def standardised(self) -> Tensor:
        """Xhat before gain and shift, L x d."""
        return self.centred / self.s.unsqueeze(1)

    @property
    def value(self) -> Tensor:
        """gamma * xhat + beta, L x d."""
        scaled = self.standardised if self.gamma is None else self.standardised * self.gamma
        return scaled if self.beta is None else scaled + self.beta

    @property
    def jacobian(self) -> Tensor:
        """d xhat_i / d x_i, symmetric, L x d x d; before the gain."""
        outer = self.u.unsqueeze(2) * self.u.unsqueeze(1)
        return (self.centring - self.rho_squared[:, None, None] * outer) / self.s[:, None, None]

    @property
    def jacobian_with_gain(self) -> Tensor:
        """L x d x d, with row vectors in mind: dx_i times it is dy_i."""
        return self.jacobian if self.gamma is None else self.jacobian * self.gamma

    def pull(self, r: Tensor) -> Tensor:
        """Return the gradient in X of <r, norm(X)>, L x d."""
        scaled = r if self.gamma is None else r * self.gamma
        return torch.einsum("ide,ie->id", self.jacobian, scaled)

    def curvature(self, r: Tensor) -> Tensor:
        """Return the second derivative of <r_i, norm(x_i)> in every row, L x d x d."""
        return self._curvature(r if self.gamma is None else r * self.gamma)

    def squared_error(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient (L x d) and Hessian (L x d x d) of sum_i ||norm(x_i) - target_i||^2 / 2 in every row."""
        gains = torch.ones_like(self.X[0]) if self.gamma is None else self.gamma
        shift = -target if self.beta is None else self.beta - target
        if not bool((gains == gains[0]).all()):
            residual = gains * self.standardised + shift
            J = self.jacobian * gains
            return self.pull(residual), J @ J.mT + self.curvature(residual)
        g, rho2, lack = gains[0], self.rho_squared, self.eps / self.s**2  # 1 - rho^2, exactly zero with eps
        outer = self.u.unsqueeze(2) * self.u.unsqueeze(1)
        own = (lack / self.s**2)[:, None, None] * (self.centring - 4 * rho2[:, None, None] * outer)
        slope = (lack / self.s).unsqueeze(1) * self.standardised
        return g**2 * slope + self.pull(shift), g**2 * own + self.curvature(shift)

    def _curvature(self, r: Tensor) -> Tensor:
        d, u, rho2 = self.X.shape[1], self.u, self.rho_squared
        across = torch.einsum("id,ie->ide", r @ self.centring, u)
        along = (u * r).sum(1)[:, None, None]
        inside = across + across.mT + along * (self.centring - 3 * rho2[:, None, None] * u.unsqueeze(2) * u.unsqueeze(1))
        return -(rho2.sqrt() / (d**0.5 * self.s**2))[:, None, None] * inside
