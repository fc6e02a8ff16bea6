r"""LayerNorm and RMSNorm linearised at rows: what depends on the row alone is computed once.

With x the normalised rows, r = 1/s, gamma the gain and w the adjoint, the formulas are those of
:mod:`derivations.normalization_actions`, ordered by what a tangent t or a covector u multiplies:

    push    (r gamma) o (t - mean t - x tau) + x o t_gamma + t_beta,                   tau = x.t / d
    pull    (r gamma) o u - r x (x.(gamma o u)) / d - r mean(gamma o u)
    bend    -nu r^2 (t - mean t) - r^2 (C v) tau + r^2 x (3 nu tau - omega)            and, for t_gamma, J0 (w o t_gamma)

where RMSNorm drops the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from derivations.directions import stacks
from derivations.linearised import Linearised, plus

if TYPE_CHECKING:
    from derivations.primitive import Covectors, Inputs, Primitive, Tangents


class LinearisedNorm(Linearised):
    """A norm of rows; inputs (X, gamma, beta), the last two in one axis, absent or None.

    A tangent has S times as many entries as X. Each action makes one array of that size, its result, and uses it as the
    scratch space on the way.

    Args:
        primitive: The norm.
        inputs: X in any shape, gamma and beta.
        adjoint: As :class:`derivations.linearised.Linearised` has it.
        wanted: The same.
        x: The normalised rows (rows, d).
        r: The inverse scales (rows, 1).
        centred: Whether the mean is taken off.
    """

    def __init__(
        self,
        primitive: Primitive,
        inputs: Inputs,
        adjoint: Tensor | None,
        wanted: Sequence[bool] | None,
        *,
        x: Tensor,
        r: Tensor,
        centred: bool,
    ) -> None:
        super().__init__(primitive, inputs, adjoint, wanted)
        self.x, self.r, self.centred, self.d = x, r, centred, x.shape[-1]
        _, gamma, beta = (*inputs, None, None)[:3]
        self.gamma = None if gamma is None else gamma.reshape(-1)
        self.moves_gain = gamma is not None and self.wanted[1]
        self.moves_shift = beta is not None and self.wanted[2]
        self.scale = r if self.gamma is None else r * self.gamma

    def push(self, tangents: Tangents) -> Tensor:
        """Return the tangent of the normalised rows, with gain and shift."""
        t, t_gamma, t_beta = self._read(tangents)
        x, out = self.x, None
        if t is not None:
            out = t.new_empty(t.shape)
            for some, into in stacks(t, out):
                along = torch.mul(some, x, out=into).sum(-1, keepdim=True)
                torch.addcmul(some, along, x, value=-1 / self.d, out=into)
                if self.centred:
                    into.sub_(some.sum(-1, keepdim=True), alpha=1 / self.d)
                into.mul_(self.scale)
        if t_gamma is not None:
            out = x * t_gamma if out is None else out.addcmul_(x, t_gamma)
        if t_beta is not None:
            out = t_beta.expand(-1, x.shape[0], -1) if out is None else out.add_(t_beta)
        if out is None:
            raise ValueError(f"{type(self.primitive).__name__}.jvp: every tangent is None; at least one input must move")
        return out.reshape(-1, *self.inputs[0].shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the covectors of X, gamma and beta."""
        to_x = to_gamma = to_beta = None
        if bar is not None:
            u = bar.reshape(-1, *self.x.shape)
            to_x, to_gamma = self._pull(u)
            to_beta = u.sum(1) if self.moves_shift else None
        t, t_gamma, _ = (None, None, None) if tangents is None else self._read(tangents)
        if t is not None:
            to_x, bent = self._bend(t, to_x)
            to_gamma = plus(to_gamma, bent)
        if t_gamma is not None:
            to_x = self._turn(t_gamma, to_x)
        flat = (to_x, to_gamma if self.moves_gain else None, to_beta)
        shaped = zip(self.inputs, flat, strict=False)
        return tuple(None if covector is None else covector.reshape(-1, *x.shape) for x, covector in shaped)

    def _pull(self, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the covectors of X and gamma for the covector u of the output, (S, rows, d)."""
        gamma, out = None if self.gamma is None else self.gamma.unsqueeze(1), u.new_empty(u.shape)
        to_gamma = u.new_empty(u.shape[0], self.d) if self.moves_gain else None
        for some, into, gain in stacks(u, out, to_gamma):
            product = torch.mul(some, self.x, out=into)
            if gain is not None:
                torch.sum(product, 1, out=gain)
            along = product.sum(-1, keepdim=True) if gamma is None else product @ gamma
            torch.mul(some, self.scale, out=into).addcmul_(along, self.rx, value=-1 / self.d)
            if self.centred:
                total = some.sum(-1, keepdim=True) if gamma is None else some @ gamma
                into.addcmul_(total, self.r, value=-1 / self.d)
        return out, to_gamma

    def _bend(self, t: Tensor, add_to: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return H[w] t, added to, and the covector of gamma, sum over rows of w o J0 t, of shape (S, d)."""
        nu, on_t, on_along, on_x, v = self._bending
        out = t.new_empty(t.shape)
        to_gamma = t.new_empty(t.shape[0], self.d) if self.moves_gain else None
        for some, into, gain, more in stacks(t, out, to_gamma, add_to):
            total = some.sum(-1, keepdim=True) if self.centred else None
            along = torch.mul(some, self.x, out=into).sum(-1, keepdim=True)  # d tau
            omega = torch.mul(some, v, out=into).sum(-1, keepdim=True)
            if gain is not None:
                torch.sum(torch.mul(some, self.wr, out=into), 1, out=gain)
                gain.sub_(along.squeeze(-1) @ self.wrx, alpha=1 / self.d)
                if total is not None:
                    gain.sub_(total.squeeze(-1) @ self.wr, alpha=1 / self.d)
            torch.mul(some, on_t, out=into)
            if total is not None:
                into.addcmul_(total, on_t, value=-1 / self.d)
            into.addcmul_(along, on_along).addcmul_(omega.addcmul_(nu, along, value=-3 / self.d), on_x, value=-1)
            if more is not None:
                into.add_(more)
        return out, to_gamma

    def _turn(self, t_gamma: Tensor, out: Tensor | None) -> Tensor:
        """Return J0 (w o t_gamma), of shape (S, rows, d), added to ``out`` in place."""
        out = t_gamma * self.wr if out is None else out.addcmul_(t_gamma, self.wr)
        t_gamma = t_gamma.squeeze(1)
        out.addcmul_((t_gamma @ self.wrx.mT).unsqueeze(-1), self.x, value=-1 / self.d)
        if self.centred:
            out.sub_((t_gamma @ self.wr.mT).div_(self.d).unsqueeze(-1))
        return out

    @cached_property
    def rx(self) -> Tensor:
        """r x."""
        return self.r * self.x

    @cached_property
    def wr(self) -> Tensor:
        """w r."""
        return self.adjoint.reshape(self.x.shape) * self.r

    @cached_property
    def wrx(self) -> Tensor:
        """w r x."""
        return self.wr * self.x

    @cached_property
    def _bending(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """nu; what t, d tau and 3 nu tau - omega multiply; and C v / d, whose product with t is omega."""
        w, r2 = self.adjoint.reshape(self.x.shape), self.r * self.r
        v = w if self.gamma is None else w * self.gamma
        nu = (self.x * v).mean(-1, keepdim=True)
        v = (v - v.mean(-1, keepdim=True) if self.centred else v) / self.d
        return nu, -nu * r2, -r2 * v, r2 * self.x, v

    def _read(self, tangents: Tangents) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the tangents as (S, rows, d), (S, 1, d) and (S, 1, d)."""
        t, t_gamma, t_beta = (*tangents, None, None)[:3]
        return (
            None if t is None else t.reshape(t.shape[0], *self.x.shape),
            None if t_gamma is None else t_gamma.reshape(t_gamma.shape[0], 1, -1),
            None if t_beta is None else t_beta.reshape(t_beta.shape[0], 1, -1),
        )
