"""From a perturbation of a value back to the parameters that made it.

At z = X W + b, at z = x_hat o gamma + beta and at z = W[tokens] a perturbation delta of z, row by row, is linear in the
parameters:

    delta[n, o] = sum_i X[n, i] dW[i, o]        (a Kronecker jacobian, X (x) I)
    delta[n, o] = x_hat[n, o] dgamma[o]         (a diagonal jacobian; ones in place of x_hat for a bias)
    delta[n, o] = dW[tokens[n], o]              (an index jacobian)

so curvature between two such values, K_nn' for a pair of rows, becomes a block of the Hessian by sums over the rows,
H = sum_nn' (x_n x_n'^T) (x) K_nn' for two Kronecker jacobians. Nothing of size (rows x outputs x parameters) is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH = 2**21  # entries that lifting row by row may take at once


@dataclass(frozen=True, eq=False)
class ParameterJacobian(ABC):
    """How one parameter moves a value.

    Args:
        parameter: Its name.
        at: Positions in vec_r of the parameter that the jacobian reaches, in order; None for all of them.
    """

    parameter: str
    at: Tensor | None

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of entries of the parameter that the jacobian reaches."""

    @abstractmethod
    def vjp_by_group(self, x: Tensor) -> Tensor:
        """Turn covectors (G, m, p, c) of G groups of m rows into covectors (G, size, c) of the parameter."""

    @abstractmethod
    def by_entry(self, t: Tensor) -> Tensor:
        """Turn derivatives by delta, (p, rows, f), into derivatives by the parameter, (size, rows, f)."""

    def vjp(self, x: Tensor) -> Tensor:
        """Turn covectors (R, p, c) of all rows into one covector (size, c) of the parameter."""
        return self.vjp_by_group(x.unsqueeze(0))[0]


@dataclass(frozen=True, eq=False)
class WeightJacobian(ParameterJacobian):
    """A weight that multiplies rows ``weights`` (R, i); stored as (i, p) or, ``transposed``, as (p, i)."""

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
    """A gain that multiplies ``weights`` (R, p) entry by entry."""

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
        """Multiply the columns of K (R, p, q), row by row."""
        return K if self.is_ones else K * self.X.unsqueeze(1)

    @property
    def is_ones(self) -> bool:
        """Whether it is the jacobian of a bias."""
        return self.X.stride() == (0, 0)


@dataclass(frozen=True, eq=False)
class IndexJacobian(ParameterJacobian):
    """Entries of a table: row n, column o of the value is entry ``at[which[n, o]]`` of the parameter."""

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
    """Entries of a parameter that are coordinates themselves, from the ``start``-th on."""

    start: int
    count: int

    @property
    def size(self) -> int:
        return self.count

    def vjp_by_group(self, x: Tensor) -> Tensor:
        return x[:, 0, self.start : self.start + self.count]

    def by_entry(self, t: Tensor) -> Tensor:
        return t[self.start : self.start + self.count]
