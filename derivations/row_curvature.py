r"""The curvature of a loss in single rows, diag(D) plus a few pairs, pulled back through losses, norms and entrywise functions.

    K_n = diag(D_n) + sum_k ( a_nk b_nk^T + b_nk a_nk^T )

A squared error has a diagonal alone. A cross entropy has one pair, K = c (diag(p) - p p^T), or two where a row is nearly one-hot.
A norm adds two: with x, r = 1/s, nu, e and P = C - x x^T / d of :mod:`derivations.linearised_norms`,

    r^2 P diag(D) P                                     from the diagonal in the output, times gamma^2
    -nu r^2 (C - 3 x x^T / d) + e x^T + x e^T           from its own second derivative

are each a diagonal, a pair with 1 (which RMSNorm does not have) and a pair with x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.linearised_norms import LinearisedNorm
from derivations.loss import CrossEntropy, LinearisedCrossEntropy, MeanSquaredError
from derivations.primitive import Primitive
from derivations.softmax import nearly_one_hot, peaks


@dataclass(frozen=True, eq=False)
class RowCurvature:
    """diag(D) plus pairs.

    Attributes:
        D: (R, w).
        a: (n, R, w).
        b: (n, R, w).
    """

    D: Tensor
    a: Tensor
    b: Tensor

    def diagonal(self) -> Tensor:
        """Return the diagonal (R, w)."""
        return self.D + 2 * (self.a * self.b).sum(0)

    def forms(self, M: Tensor) -> Tensor:
        """Return the quadratic forms (R, S) of the rows of M (S, w).

        >>> one, none = torch.ones(1, 2), torch.zeros(0, 1, 2)
        >>> RowCurvature(one, none, none).forms(torch.tensor([[1.0, 2.0]])).tolist()
        [[5.0]]
        """
        return (self.D @ M.square().T).add_(((self.a @ M.T) * (self.b @ M.T)).sum(0), alpha=2)

    def pulled(self, T: Tensor, *, full: bool) -> Tensor:
        """Return T K T^T for T (R, S, w), as (R, S, S), or else its diagonal (R, S)."""
        left, right = T @ self.a.permute(1, 2, 0), T @ self.b.permute(1, 2, 0)  # (R, S, n)
        if full:
            between = left @ right.mT
            return (T * self.D.unsqueeze(1)) @ T.mT + between + between.mT
        return (T.square() @ self.D.unsqueeze(2)).squeeze(2).add_((left * right).sum(2), alpha=2)


def of_loss(primitive: Primitive, inputs: Sequence[Tensor], adjoint: Tensor) -> RowCurvature | None:
    """Return the curvature of a squared error or a cross entropy in its first input; None for another primitive."""
    if isinstance(primitive, MeanSquaredError):
        h = primitive.curvature(inputs, adjoint, (torch.ones_like(inputs[0]).unsqueeze(0), None))[0]
        assert h is not None
        D = h.reshape(-1, inputs[0].shape[-1])
        none = D.new_zeros(0, *D.shape)
        return RowCurvature(D, none, none)
    if isinstance(primitive, CrossEntropy):
        at = LinearisedCrossEntropy(primitive, inputs, adjoint, None)
        return covariance(at.p, adjoint / at.normalizer)
    return None


def covariance(p: Tensor, c: Tensor | float = 1.0) -> RowCurvature:
    """Return c (diag(p) - p p^T) for rows of probabilities, (R, w).

    Nearly one-hot rows are measured from their peak m, as p_m - p_m^2 would lose their digits: it is the covariance of e_j - e_m
    with j drawn from p. With the other weights o, their sum s, and e = e_m, that is
    diag(o + s e) - (o e^T + e o^T) - (o - s e)(o - s e)^T.

    >>> K = covariance(torch.tensor([[0.5, 0.5]]))
    >>> (torch.diag_embed(K.D)[0] + 2 * K.a[0].T @ K.b[0]).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    """
    if not nearly_one_hot(p, -1):
        return RowCurvature(c * p, p.unsqueeze(0), -0.5 * c * p.unsqueeze(0))
    peak = peaks(p, -1)
    e, o = torch.zeros_like(p).scatter_(-1, peak, 1), p.scatter(-1, peak, 0)
    s = o.sum(-1, keepdim=True)
    moved = o - s * e
    return RowCurvature(c * (o + s * e), torch.stack([e, moved]), torch.stack([-c * o, -0.5 * c * moved]))


def through_norm(primitive: Primitive, inputs: Sequence[Tensor | None], adjoint: Tensor | None, K: RowCurvature) -> RowCurvature:
    """Return the curvature in the input of a LayerNorm or RMSNorm over the last axis from that in its output.

    Args:
        primitive: The norm.
        inputs: X and, if there are any, gain and shift.
        adjoint: Of the output; None where the norm's own second derivative does not count.
        K: The curvature in the output.
    """
    at = primitive.linearise(inputs, adjoint, [k == 0 for k in range(len(inputs))])  # type: ignore[arg-type]
    assert isinstance(at, LinearisedNorm)
    x, d, r2 = at.off, at.d, at.slope.square()
    D = K.D if at.gamma is None else K.D * at.gamma.square()
    Dx = D * x
    to_x = r2 * (x * (Dx * x).sum(-1, keepdim=True) / (2 * d * d) - Dx / d)
    to_one = r2 * ((D.sum(-1, keepdim=True) / (2 * d) - D + x * Dx.sum(-1, keepdim=True) / d) / d)
    D = r2 * D
    if adjoint is not None:
        D = D + at.on_t
        to_x = to_x + at.e - (1.5 / d) * at.on_t * x
        to_one = to_one - at.on_t / (2 * d)
    left, right = ([torch.ones_like(x), x], [to_one, to_x]) if at.centred else ([x], [to_x])
    a, b = (at.pull(pairs)[0].reshape(pairs.shape) for pairs in (K.a, K.b))  # type: ignore[union-attr]
    return RowCurvature(D, torch.cat([torch.stack(left), a]), torch.cat([torch.stack(right), b]))


def through_entries(slope: Tensor, bend: Tensor | None, K: RowCurvature) -> RowCurvature:
    """Return the curvature in the input of an entrywise function with slopes (R, w) and second derivatives, or None."""
    D = K.D * slope.square()
    return RowCurvature(D if bend is None else D + bend, K.a * slope, K.b * slope)


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Curvature without such structure.

    Attributes:
        K: (R, w, w), symmetric.
    """

    K: Tensor

    def diagonal(self) -> Tensor:
        """Return the diagonal (R, w)."""
        return self.K.diagonal(dim1=1, dim2=2)

    def forms(self, M: Tensor) -> Tensor:
        """Return the quadratic forms (R, S) of the rows of M (S, w), each product of two entries once."""
        i, j = torch.triu_indices(M.shape[1], M.shape[1], device=M.device)
        twice = torch.where(i == j, 1, 2).to(M.dtype)
        return self.K[:, i, j] @ (M[:, i] * M[:, j] * twice).T

    def pulled(self, T: Tensor, *, full: bool) -> Tensor:
        """Return T K T^T for T (R, S, m w) and R m rows of K, as (R, S, S), or else its diagonal (R, S)."""
        rows, S, _ = T.shape
        n, w, _ = self.K.shape
        split = T.reshape(rows, S, n // rows, w).transpose(1, 2).reshape(n, S, w) if n > rows else T
        TK = split @ self.K
        TK = TK.reshape(rows, n // rows, S, w).transpose(1, 2).reshape(rows, S, -1) if n > rows else TK
        return TK @ T.mT if full else (TK * T).sum(2)
