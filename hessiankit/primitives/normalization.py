r"""LayerNorm and RMSNorm as primitives: value, push, pull and contracted second derivative of any batch of rows.

For one row with normalised entries x and adjoint w, let v = gamma o w. Every Jacobian is the symmetric map

    J0 t = (C t - x tau) / s,      tau = x.t / d,

and the second derivative contracted with the adjoint is the identity plus rank two:

    H[w] t = ( -nu C t - tau C v + (3 nu tau - omega) x ) / s^2,      nu = x.v / d,   omega = (C v).t / d ,

to which the gain adds <w, D_X D_gamma [., t_gamma]> = J0 (w o t_gamma) and <w, D_gamma D_X [., t]> = sum over rows of
w o J0 t. RMSNorm has C = I.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.linearised_norms import LinearisedNorm
from hessiankit.primitives.primitive import ByLinearising, Inputs, Linearised, Role


class _Normalize(ByLinearising):
    """Base class of LayerNorm and RMSNorm. Rows are the axes in front of the last ``dims``; X is read as (rows, d)."""

    dims: int
    centred: bool
    is_quick = True

    @property
    def roles(self) -> Mapping[int, Role]:
        return {1: "gain", 2: "bias"} if self.dims == 1 else {}

    @abstractmethod
    def eps_at(self, X: Tensor) -> float:
        """Return eps, which may depend on the type of X."""

    def value(self, *inputs: Tensor) -> Tensor:
        x, _ = self._rows(inputs)
        gamma, beta = (None if weight is None else weight.reshape(-1) for weight in (*inputs[1:], None, None)[:2])
        y = x if gamma is None else x * gamma
        return (y if beta is None else y + beta).reshape(inputs[0].shape)

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        x, r = self._rows(inputs)
        return LinearisedNorm(self, inputs, adjoint, needs, x=x, r=r, eps=self.eps_at(inputs[0]), centred=self.centred)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim - self.dims and not any(motion[1:])

    def _rows(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the normalised rows (rows, d) and their inverse scales (rows, 1)."""
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
        r = (m.square().mean(-1, keepdim=True) + self.eps_at(X)).rsqrt()
        return m * r, r


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

    def eps_at(self, X: Tensor) -> float:
        return self.eps


@dataclass(frozen=True)
class RMSNorm(_Normalize):
    """RMSNorm over the last ``dims`` axes, as ``torch.nn.functional.rms_norm``; inputs (X, gamma).

    gamma has the shape of those axes and may be None or left out; ``eps=None`` is the machine epsilon of X,
    or of float32 where X has fewer digits, as in torch.

    >>> RMSNorm(eps=0.0).value(torch.tensor([[2.0, 0.0, 0.0, 0.0]])).tolist()
    [[2.0, 0.0, 0.0, 0.0]]
    """

    dims: int = 1
    eps: float | None = None
    centred = False

    def eps_at(self, X: Tensor) -> float:
        return torch.finfo(torch.promote_types(X.dtype, torch.float32)).eps if self.eps is None else self.eps
