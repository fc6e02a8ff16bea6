"""Parameter Jacobians: how a value z moves with a parameter that enters it, row by row.

At z = X W + b, at z = x_hat o gamma + beta and at z = W[tokens],

    dz[n, o] = sum_i X[n, i] dW[i, o]        X (x) I
    dz[n, o] = x_hat[n, o] dgamma[o]         a diagonal; ones in place of x_hat for a bias
    dz[n, o] = dW[tokens[n], o]              a selection

so that curvature K_nn' between rows of two such values becomes a block of the Hessian by sums over rows,
H = sum_nn' (x_n x_n'^T) (x) K_nn' for two weights. Nothing of size (rows x outputs x parameters) is formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH = 2**21  # entries of work space


@dataclass(frozen=True, eq=False)
class ParameterJacobian(ABC):
    """The Jacobian of a value z, (R, p), in one parameter.

    Args:
        parameter: Its name.
        at: Positions in vec_r of the parameter's entries that enter, in order; None: all.
    """

    parameter: str
    at: Tensor | None

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of entries of the parameter that enter."""

    @abstractmethod
    def vjp_by_group(self, x: Tensor) -> Tensor:
        """Return J^T x for covectors x (G, m, p, c) of G groups of m rows, summed in each group: (G, size, c)."""

    @abstractmethod
    def by_entry(self, t: Tensor) -> Tensor:
        """Return derivatives (p, rows, f) of a function of one row by z as derivatives by the parameter, (size, rows, f)."""

    def vjp(self, x: Tensor) -> Tensor:
        """Return J^T x for covectors x (R, p, c), summed over all rows: (size, c)."""
        return self.vjp_by_group(x.unsqueeze(0))[0]


@dataclass(frozen=True, eq=False)
class WeightJacobian(ParameterJacobian):
    """X (x) I for z = X W, X (R, i); W is stored as (i, p) or, ``transposed``, as (p, i)."""

    X: Tensor
    width: int
    transposed: bool

    @property
    def size(self) -> int:
        return self.X.shape[1] * self.width

    def vjp_by_group(self, x: Tensor) -> Tensor:
        groups, m, p, c = x.shape
        w = self.X.reshape(-1, m, self.X.shape[1])  # (groups, m, i)
        out = (w.mT @ x.reshape(groups, m, p * c)).reshape(groups, -1, p, c)
        return (out.transpose(1, 2) if self.transposed else out).reshape(groups, -1, c)

    def by_entry(self, t: Tensor) -> Tensor:
        w = self.X.T.unsqueeze(-1)  # (i, rows, 1)
        pairs = t.unsqueeze(1) * w.unsqueeze(0) if self.transposed else t.unsqueeze(0) * w.unsqueeze(1)
        return pairs.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class GainJacobian(ParameterJacobian):
    """diag(X[n]) for z = X o gamma, X (R, p)."""

    X: Tensor

    @property
    def size(self) -> int:
        return self.X.shape[1]

    def vjp_by_group(self, x: Tensor) -> Tensor:
        if self.is_ones:
            return x.sum(1)
        m, p = x.shape[1:3]
        return (self.X.reshape(-1, m, p, 1) * x).sum(1)

    def by_entry(self, t: Tensor) -> Tensor:
        return t * self.X.T.unsqueeze(-1)

    def scale_columns(self, K: Tensor) -> Tensor:
        """Return K (R, p, q) with column q of row n multiplied by X[n, q]."""
        return K if self.is_ones else K * self.X.unsqueeze(1)

    @property
    def is_ones(self) -> bool:
        """Whether the parameter is a bias."""
        return self.X.stride() == (0, 0)


@dataclass(frozen=True, eq=False)
class IndexJacobian(ParameterJacobian):
    """A selection: z[n, o] is entry ``at[which[n, o]]`` of the parameter."""

    which: Tensor

    @property
    def size(self) -> int:
        assert self.at is not None
        return self.at.numel()

    def vjp_by_group(self, x: Tensor) -> Tensor:
        groups, m, p, c = x.shape
        shift = torch.arange(groups, device=x.device).reshape(-1, 1) * self.size
        into = x.new_zeros(groups * self.size, c)
        into.index_add_(0, (self.which.reshape(groups, m * p) + shift).reshape(-1), x.reshape(-1, c))
        return into.reshape(groups, self.size, c)

    def by_entry(self, t: Tensor) -> Tensor:
        rows, p = self.which.shape
        out = t.new_zeros(self.size, rows, t.shape[2])
        row = torch.arange(rows, device=t.device).unsqueeze(1).expand(rows, p)
        out.index_put_((self.which, row), t.transpose(0, 1), accumulate=True)
        return out


@dataclass(frozen=True, eq=False)
class IdentityJacobian(ParameterJacobian):
    """The identity, for a parameter taken whole: its entries are coordinates ``start`` to ``start + count`` of the vertex."""

    start: int
    count: int

    @property
    def size(self) -> int:
        return self.count

    def vjp_by_group(self, x: Tensor) -> Tensor:
        return x[:, 0, self.start : self.start + self.count]

    def by_entry(self, t: Tensor) -> Tensor:
        return t[self.start : self.start + self.count]
