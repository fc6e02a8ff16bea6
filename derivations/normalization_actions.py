r"""LayerNorm and RMSNorm as primitives: value, push, pull and contracted second derivative of any batch of rows.

For one row with normalised entries x and adjoint w, let v = gamma o w. Every Jacobian is the symmetric map

    J0 t = (C t - x tau) / s,      tau = x.t / d,

and the second derivative contracted with the adjoint is the identity plus rank two (claim T-LN-H contracted):

    H[w] t = ( -nu C t - tau C v + (3 nu tau - omega) x ) / s^2,      nu = x.v / d,   omega = (C v).t / d ,

to which the gain adds <w, D_X D_gamma [., t_gamma]> = J0 (w o t_gamma) and <w, D_gamma D_X [., t]> = sum over rows of
w o J0 t (claim T-LN-cross). RMSNorm has C = I (claim T-RMS).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from derivations.directions import parts
from derivations.primitive import Covectors, Inputs, Primitive, Tangents


class _Rows(NamedTuple):
    """X read as rows: the normalised rows x (rows, d), the inverse scales r = 1/s (rows, 1), gain and shift (d,)."""

    x: Tensor
    r: Tensor
    gamma: Tensor | None
    beta: Tensor | None


class _Normalize(Primitive):
    """What LayerNorm and RMSNorm share. Rows are the axes in front of the last ``dims``; X is read as (rows, d).

    A tangent has S times as many entries as X. Each action makes one array of that size, its result, and uses it as
    the scratch space on the way; whatever depends on the row alone is computed once.
    """

    dims: int
    centred: bool

    @abstractmethod
    def _eps(self, X: Tensor) -> float: ...

    def value(self, *inputs: Tensor) -> Tensor:
        x, _, gamma, beta = self._read(inputs)
        y = x if gamma is None else x * gamma
        return (y if beta is None else y + beta).reshape(inputs[0].shape)

    @torch.no_grad()
    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        x, r, gamma, _ = self._read(inputs)
        t, t_gamma, t_beta = self._read_tangents(tangents, x)
        out = None
        if t is not None:
            out = t.new_empty(t.shape)
            scale = r if gamma is None else r * gamma
            for part in parts(t):
                some, into = t[part], out[part]
                tau = torch.mul(some, x, out=into).sum(-1, keepdim=True)
                torch.addcmul(some, tau, x, value=-1 / x.shape[-1], out=into)
                if self.centred:
                    into.sub_(some.mean(-1, keepdim=True))
                into.mul_(scale)
        if t_gamma is not None:
            moved = t_gamma.unsqueeze(1)
            out = x * moved if out is None else out.addcmul_(x, moved)
        if t_beta is not None:
            moved = t_beta.unsqueeze(1)
            out = moved.expand(-1, x.shape[0], -1) if out is None else out.add_(moved)
        if out is None:
            raise ValueError(f"{type(self).__name__}.jvp: every tangent is None; at least one input must move")
        return out.reshape(-1, *inputs[0].shape)

    @torch.no_grad()
    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        x, r, gamma, beta = self._read(inputs)
        d = x.shape[-1]
        u = adjoint.reshape(-1, *x.shape)
        out = u.new_empty(u.shape)
        to_gamma = u.new_empty(u.shape[0], d)
        scale, rx = r if gamma is None else r * gamma, r * x
        for part in parts(u):
            some, into = u[part], out[part]
            product = torch.mul(some, x, out=into)
            to_gamma[part] = product.sum(1)
            nu = product.sum(-1) if gamma is None else product @ gamma
            torch.mul(some, scale, out=into).addcmul_(nu.unsqueeze(-1), rx, value=-1 / d)
            if self.centred:
                total = some.sum(-1) if gamma is None else some @ gamma
                into.sub_(total.unsqueeze(-1) * (r / d))
        to_weights = (to_gamma if gamma is not None else None, u.sum(1) if beta is not None else None)
        return self._covectors(inputs, out, *to_weights)

    @torch.no_grad()
    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        rows = self._read(inputs)
        x, r, gamma, _ = rows
        t, t_gamma, _ = self._read_tangents(tangents, x)
        w = adjoint.reshape(x.shape)
        out = to_gamma = None
        if t is not None:
            out, to_gamma = self._bend(rows, w, t)
        if t_gamma is not None:
            moved, wr, d = t_gamma.unsqueeze(1), w * r, x.shape[-1]
            out = moved * wr if out is None else out.addcmul_(moved, wr)
            out.addcmul_((t_gamma @ (wr * x).mT).unsqueeze(-1), x, value=-1 / d)
            if self.centred:
                out -= (t_gamma @ wr.mT).div_(d).unsqueeze(-1)
        return self._covectors(inputs, out, to_gamma if gamma is not None else None, None)

    def rowwise(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim - self.dims and not any(moving[1:])

    def _bend(self, rows: _Rows, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return H[w] t, of the shape of t, and the covector of gamma, sum over rows of w o J0 t, of shape (S, d)."""
        x, r, gamma, _ = rows
        d = x.shape[-1]
        v = w if gamma is None else w * gamma
        nu = (x * v).mean(-1, keepdim=True)
        v = v - v.mean(-1, keepdim=True) if self.centred else v
        r2, wr = r * r, w * r
        on_t, on_tau, on_x, v_mean, wrx = -nu * r2, -r2 * v, r2 * x, v / d, wr * x
        out, to_gamma = t.new_empty(t.shape), t.new_empty(t.shape[0], d)
        for part in parts(t):
            some, into = t[part], out[part]
            mean = some.mean(-1, keepdim=True) if self.centred else None
            tau = torch.mul(some, x, out=into).sum(-1, keepdim=True).div_(d)
            omega = torch.mul(some, v_mean, out=into).sum(-1, keepdim=True)
            if gamma is not None:
                total = torch.mul(some, wr, out=into).sum(1)
                total -= tau.squeeze(-1) @ wrx
                to_gamma[part] = total if mean is None else total - mean.squeeze(-1) @ wr
            torch.mul(some, on_t, out=into)
            if mean is not None:
                into.sub_(mean * on_t)
            into.addcmul_(tau, on_tau).addcmul_((3 * nu) * tau - omega, on_x)
        return out, to_gamma

    def _read(self, inputs: Sequence[Tensor | None]) -> _Rows:
        X, gamma, beta = (*inputs, None, None)[:3]
        if X is None:
            raise ValueError(f"{type(self).__name__}: the input X is None")
        shape = X.shape[X.ndim - self.dims :]
        for name, weight in (("gamma", gamma), ("beta", beta)):
            if weight is not None and weight.shape != shape:
                raise ValueError(
                    f"{type(self).__name__}: {name} must have the shape {tuple(shape)} of the last {self.dims} axes of X, "
                    f"got {tuple(weight.shape)}"
                )
        m = X.reshape(-1, shape.numel())
        m = m - m.mean(-1, keepdim=True) if self.centred else m
        r = (m.square().mean(-1, keepdim=True) + self._eps(X)).rsqrt()
        return _Rows(m * r, r, *(None if weight is None else weight.reshape(-1) for weight in (gamma, beta)))

    @staticmethod
    def _read_tangents(tangents: Tangents, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        t, t_gamma, t_beta = (*tangents, None, None)[:3]
        return (
            None if t is None else t.reshape(t.shape[0], *x.shape),
            None if t_gamma is None else t_gamma.reshape(t_gamma.shape[0], -1),
            None if t_beta is None else t_beta.reshape(t_beta.shape[0], -1),
        )

    @staticmethod
    def _covectors(inputs: Inputs, *flat: Tensor | None) -> Covectors:
        """Return the covectors of X, gamma and beta in the shapes of those inputs that there are."""
        shaped = zip(inputs, flat, strict=False)
        return tuple(None if covector is None else covector.reshape(-1, *x.shape) for x, covector in shaped)


@dataclass(frozen=True)
class LayerNorm(_Normalize):
    """LayerNorm over the last ``dims`` axes, as ``torch.nn.functional.layer_norm``; inputs (X, gamma, beta).

    gamma and beta have the shape of those axes and may be None or left out. The actions themselves are not
    differentiable.

    >>> X = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    >>> LayerNorm(eps=0.5).value(X).tolist()
    [[-1.0, 1.0, 0.0, 0.0]]
    >>> LayerNorm(eps=0.5).jvp((X,), (torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]),)).tolist()
    [[[0.5, 0.0, -0.25, -0.25]]]
    """

    dims: int = 1
    eps: float = 1e-5
    centred = True

    def _eps(self, X: Tensor) -> float:
        return self.eps


@dataclass(frozen=True)
class RMSNorm(_Normalize):
    """RMSNorm over the last ``dims`` axes, as ``torch.nn.functional.rms_norm``; inputs (X, gamma).

    gamma has the shape of those axes and may be None or left out; ``eps=None`` is the machine epsilon of X, as in torch.

    >>> RMSNorm(eps=0.0).value(torch.tensor([[2.0, 0.0, 0.0, 0.0]])).tolist()
    [[2.0, 0.0, 0.0, 0.0]]
    """

    dims: int = 1
    eps: float | None = None
    centred = False

    def _eps(self, X: Tensor) -> float:
        return torch.finfo(X.dtype).eps if self.eps is None else self.eps
