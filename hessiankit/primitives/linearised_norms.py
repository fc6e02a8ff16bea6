r"""LayerNorm and RMSNorm linearised at rows: quantities that depend on the row only are computed once.

With x the normalised rows, r = 1/s, gamma the gain and w the adjoint, the formulas are those of
:mod:`hessiankit.primitives.normalization`, ordered by what a tangent t or a covector u multiplies:

    push    (r gamma) o (t - mean t - x tau) + x o t_gamma + t_beta,                   tau = x.t / d
    pull    P z + (e.t + 2 nu r^2 tau) x + (d tau) e,                                  e = -r^2 C v / d
            z = (r gamma) o u - nu r^2 t + r w o t_gamma,                              P = C - x x^T / d

J0 is r P. So P acts once, on the sum z of what J0 acts on, u and w o t_gamma, and of the part of H[w] t that it leaves so. The
gain gets the sum over rows of u o x + w o J0 t. RMSNorm has C = I.

Two entries of LayerNorm, or one of RMSNorm, move along x alone. There C - x x^T / d is P = eps r^2 C, of which the difference
loses all digits where eps is small beside the variance, and H[w] t = -3 nu r^2 P t: the formulas with 0 for the x of P and of
H[w], and for e, and with the factor eps r^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hessiankit.primitives.directions import stacks
from hessiankit.primitives.primitive import Linearised, hollow, total

if TYPE_CHECKING:
    from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents


class LinearisedNorm(Linearised):
    """A norm of rows; inputs (X, gamma, beta), the last two in one axis, absent or None.

    A tangent has S times as many entries as X. Each action allocates one array of that size, its result; scratch memory fits
    the processor's cache.

    Args:
        primitive: The norm.
        inputs: X in any shape, gamma and beta.
        adjoint: Adjoint of the output, as in :class:`hessiankit.primitives.primitive.Linearised`.
        needs: The inputs whose covectors are read; None: all.
        x: The normalised rows (rows, d).
        r: The inverse scales (rows, 1).
        eps: Number that is added to the variance.
        centred: Whether the mean is taken off.
    """

    def __init__(
        self,
        primitive: Primitive,
        inputs: Inputs,
        adjoint: Tensor | None,
        needs: Sequence[bool] | None,
        *,
        x: Tensor,
        r: Tensor,
        eps: float,
        centred: bool,
    ) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.x, self.r, self.centred, self.d = x, r, centred, x.shape[-1]
        _, gamma, beta = (*inputs, None, None)[:3]
        self.gamma = None if gamma is None else gamma.reshape(-1)
        self.moves_gain = gamma is not None and self.needs[1]
        self.moves_shift = beta is not None and self.needs[2]
        self.alone = self.d == (2 if centred else 1)
        self.off, self.slope = (torch.zeros_like(x), eps * r**3) if self.alone else (x, r)  # the x of P, and r times its factor
        self.keeps_products = True

    def forget(self) -> None:
        """Keep the normalised rows as the only tensor of the size of X."""
        self.inputs, self.keeps_products = (hollow(self.inputs[0]), *self.inputs[1:]), False
        self._let_go()

    def push(self, tangents: Tangents) -> Tensor:
        """Return the tangent of the normalised rows, with gain and shift."""
        t, t_gamma, t_beta = self._read(tangents)
        x, out = self.off, None
        if t is not None:
            out = t.new_empty(t.shape)
            for part, into in stacks(t, out):
                projection = torch.mul(part, x, out=into).sum(-1, keepdim=True)
                torch.addcmul(part, projection, x, value=-1 / self.d, out=into)
                if self.centred:
                    into.sub_(part.sum(-1, keepdim=True), alpha=1 / self.d)
                into.mul_(self.scale)
        if t_gamma is not None:
            out = self.x * t_gamma if out is None else out.addcmul_(self.x, t_gamma)
        if t_beta is not None:
            out = t_beta.expand(-1, x.shape[0], -1) if out is None else out.add_(t_beta)
        self._let_go()
        return total(self.primitive, out).reshape(-1, *self.inputs[0].shape)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the covectors of X, gamma and beta."""
        u = None if bar is None else bar.reshape(len(bar), *self.x.shape)
        t, t_gamma, _ = (None, None, None) if tangents is None else self._read(tangents)
        covectors = (*self._to_rows_and_gain(u, t, t_gamma), u.sum(1) if u is not None and self.moves_shift else None)
        self._let_go()
        shaped = zip(self.inputs, covectors, strict=False)
        return tuple(None if covector is None else covector.reshape(len(covector), *x.shape) for x, covector in shaped)

    def _to_rows_and_gain(
        self, u: Tensor | None, t: Tensor | None, t_gamma: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the covectors of X, (S, rows, d), and of gamma, (S, d)."""
        present = u if u is not None else t if t is not None else t_gamma
        if present is None:
            return None, None
        out, scratch = present.new_empty(present.shape[0], *self.x.shape), None
        to_gamma = out.new_empty(out.shape[0], self.d) if self.moves_gain and present is not t_gamma else None
        for into, some_u, some_t, some_gain, gain in stacks(out, u, t, t_gamma, to_gamma):
            scratch = torch.empty_like(into) if scratch is None else scratch[: len(into)]
            projection = None if some_t is None else _dot(some_t, self.off, scratch)  # d tau
            if gain is not None:
                self._to_gain(some_u, some_t, projection, gain, scratch)
            if self.needs[0]:
                self._to_rows(some_u, some_t, projection, some_gain, into, scratch)
        return out if self.needs[0] else None, to_gamma

    def _to_rows(
        self, u: Tensor | None, t: Tensor | None, projection: Tensor | None, t_gamma: Tensor | None, out: Tensor, scratch: Tensor
    ) -> None:
        """Write the covector of X."""
        terms = [] if u is None else [(u, self.scale)]
        terms += [] if t is None else [(t, self.on_t)]
        _weighted(out, terms if t_gamma is None else [*terms, (t_gamma, self.wr)])
        if self.centred:
            out.sub_(out.sum(-1, keepdim=True), alpha=1 / self.d)
        if t is None or projection is None:
            out.addcmul_(_dot(out, self.off, scratch), self.off, value=-1 / self.d)
            return
        on_x = torch.mul(t, self.e, out=scratch).addcmul_(out, self.off, value=-1 / self.d).sum(-1, keepdim=True)
        out.addcmul_(on_x.addcmul_(projection, self.on_t, value=-2 / self.d), self.off).addcmul_(projection, self.e)

    def _to_gain(self, u: Tensor | None, t: Tensor | None, projection: Tensor | None, out: Tensor, scratch: Tensor) -> None:
        """Write the covector of gamma."""
        terms = [] if u is None else [(u, self.x)]
        torch.sum(_weighted(scratch, terms if t is None else [*terms, (t, self.wr)]), 1, out=out)
        if t is None or projection is None:
            return
        out.sub_(projection.squeeze(-1) @ self.wrx, alpha=1 / self.d)
        if self.centred:
            out.sub_(t.sum(-1) @ self.wr, alpha=1 / self.d)

    def _let_go(self) -> None:
        for name in () if self.keeps_products else ("scale", "wr", "wrx", "e"):
            vars(self).pop(name, None)

    @cached_property
    def scale(self) -> Tensor:
        """r gamma, with the factor of P."""
        return self.slope if self.gamma is None else self.slope * self.gamma

    @cached_property
    def wr(self) -> Tensor:
        """w r, with the factor of P."""
        return self.adjoint.reshape(self.x.shape) * self.slope

    @cached_property
    def wrx(self) -> Tensor:
        """w r x."""
        return self.wr * self.off

    @property
    def rv(self) -> Tensor:
        """r v, with the factor of P."""
        return self.wr if self.gamma is None else self.wr * self.gamma

    @cached_property
    def on_t(self) -> Tensor:
        """-nu r^2, three times for a tangent along x."""
        return (self.x * self.rv).mean(-1, keepdim=True) * (self.r * (-3 if self.alone else -1))

    @cached_property
    def e(self) -> Tensor:
        """-r^2 C v / d, or 0 for a tangent along x."""
        if self.alone:
            return self.off
        rv = self.rv
        return (rv - rv.mean(-1, keepdim=True) if self.centred else rv) * (self.r / -self.d)

    def _read(self, tangents: Tangents) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the tangents as (S, rows, d), (S, 1, d) and (S, 1, d)."""
        t, t_gamma, t_beta = (*tangents, None, None)[:3]
        return (
            None if t is None else t.reshape(t.shape[0], *self.x.shape),
            None if t_gamma is None else t_gamma.reshape(t_gamma.shape[0], 1, -1),
            None if t_beta is None else t_beta.reshape(t_beta.shape[0], 1, -1),
        )


def _weighted(out: Tensor, terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of value o weight over one or more terms, in ``out``."""
    torch.mul(*terms[0], out=out)
    for value, weight in terms[1:]:
        out.addcmul_(value, weight)
    return out


def _dot(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    """Return the scalar products of rows, with a last axis of 1."""
    return torch.mul(a, b, out=scratch).sum(-1, keepdim=True)
