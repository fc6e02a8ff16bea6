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

import torch
from torch import Tensor

from derivations.primitive import Covectors, Inputs, Primitive, Tangents


class _Normalize(Primitive):
    """What LayerNorm and RMSNorm share. Rows are the axes in front of the last ``dims``; X is read as (rows, d).

    A tangent has S times as many entries as X, so each action makes one array of that size, its result, and uses it as
    the scratch space on the way.
    """

    dims: int
    centred: bool

    @abstractmethod
    def _eps(self, X: Tensor) -> float: ...

    def value(self, *inputs: Tensor) -> Tensor:
        X, gamma, beta = self._read(inputs)
        x, _ = self._normalized(X)
        y = x if gamma is None else x * gamma
        return (y if beta is None else y + beta).reshape(inputs[0].shape)

    @torch.no_grad()
    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        X, gamma, _ = self._read(inputs)
        x, r = self._normalized(X)
        t, t_gamma, t_beta = self._read_tangents(tangents, X)
        out = None
        if t is not None:
            out = t * x
            tau = out.sum(-1, keepdim=True)
            torch.addcmul(t, tau, x, value=-1 / x.shape[-1], out=out)
            if self.centred:
                out -= t.mean(-1, keepdim=True)
            out *= r if gamma is None else r * gamma
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
        X, gamma, beta = self._read(inputs)
        x, r = self._normalized(X)
        d = x.shape[-1]
        u = adjoint.reshape(-1, *x.shape)
        out = u * x
        covectors: list[Tensor | None] = [None] * len(inputs)
        if gamma is not None:
            covectors[1] = out.sum(1).reshape(-1, *inputs[1].shape)
        if beta is not None:
            covectors[2] = u.sum(1).reshape(-1, *inputs[2].shape)
        nu = (out.sum(-1) if gamma is None else out @ gamma).unsqueeze(-1)
        torch.mul(u, r if gamma is None else r * gamma, out=out)
        out.addcmul_(nu, r * x, value=-1 / d)
        if self.centred:
            total = (u.sum(-1) if gamma is None else u @ gamma).unsqueeze(-1)
            out.sub_(total * (r / d))
        covectors[0] = out.reshape(-1, *inputs[0].shape)
        return tuple(covectors)

    @torch.no_grad()
    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        X, gamma, _ = self._read(inputs)
        x, r = self._normalized(X)
        d = x.shape[-1]
        t, t_gamma, _ = self._read_tangents(tangents, X)
        w = adjoint.reshape(x.shape)
        covectors: list[Tensor | None] = [None] * len(inputs)
        out = None
        if t is not None:
            v = w if gamma is None else w * gamma
            nu = (x * v).mean(-1, keepdim=True)
            v = v - v.mean(-1, keepdim=True) if self.centred else v
            mean = t.mean(-1, keepdim=True) if self.centred else None
            out = t * x
            tau = out.sum(-1, keepdim=True).div_(d)
            if gamma is None:
                omega = torch.mul(t, v, out=out).sum(-1, keepdim=True).div_(d)
            else:
                omega, to_gamma = self._gain_curvature(t, mean, tau, w * r, x, r, gamma, out)
                covectors[1] = to_gamma.reshape(-1, *inputs[1].shape)
            r2 = r * r
            torch.mul(t, -nu * r2, out=out)
            if mean is not None:
                out += mean * (nu * r2)
            out.addcmul_(tau, r2 * v, value=-1)
            out.addcmul_((3 * nu) * tau - omega, r2 * x)
        if t_gamma is not None:
            moved, scaled = t_gamma.unsqueeze(1), w * r
            out = moved * scaled if out is None else out.addcmul_(moved, scaled)
            out.addcmul_((t_gamma @ (scaled * x).mT).unsqueeze(-1), x, value=-1 / d)
            if self.centred:
                out -= (t_gamma @ scaled.mT).div_(d).unsqueeze(-1)
        covectors[0] = None if out is None else out.reshape(-1, *inputs[0].shape)
        return tuple(covectors)

    def rowwise(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim - self.dims and not any(moving[1:])

    def _gain_curvature(
        self, t: Tensor, mean: Tensor | None, tau: Tensor, wr: Tensor, x: Tensor, r: Tensor, gamma: Tensor, scratch: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return omega, of shape (S, rows, 1), and the covector of gamma, sum over rows of w o J0 t, of shape (S, d)."""
        product = torch.mul(t, wr, out=scratch)
        to_gamma = product.sum(1) - tau.squeeze(-1) @ (wr * x)
        omega = (product @ gamma).unsqueeze(-1) / (r * x.shape[-1])
        if mean is not None:
            to_gamma -= mean.squeeze(-1) @ wr
            omega -= mean * ((wr @ gamma).unsqueeze(-1) / (r * x.shape[-1]))
        return omega, to_gamma

    def _normalized(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised rows (rows, d) and the inverse scales 1/s (rows, 1)."""
        m = X - X.mean(-1, keepdim=True) if self.centred else X
        r = (m.square().mean(-1, keepdim=True) + self._eps(X)).rsqrt()
        return m * r, r

    def _read(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
        flat = [None if weight is None else weight.reshape(-1) for weight in (gamma, beta)]
        return X.reshape(-1, shape.numel()), flat[0], flat[1]

    @staticmethod
    def _read_tangents(tangents: Tangents, X: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        t, t_gamma, t_beta = (*tangents, None, None)[:3]
        return (
            None if t is None else t.reshape(t.shape[0], *X.shape),
            None if t_gamma is None else t_gamma.reshape(t_gamma.shape[0], -1),
            None if t_beta is None else t_beta.reshape(t_beta.shape[0], -1),
        )


@dataclass(frozen=True)
class LayerNorm(_Normalize):
    """LayerNorm over the last ``dims`` axes, as ``torch.nn.functional.layer_norm``; inputs (X, gamma, beta).

    gamma and beta have the shape of those axes and may be None or left out. No entry of a result is differentiable.

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
