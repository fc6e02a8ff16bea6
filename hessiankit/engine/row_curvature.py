r"""Curvature of the loss in a value, row by row, as a diagonal plus a few pairs of vectors.

    K_n = diag(D_n) + sum_k ( a_nk b_nk^T + b_nk a_nk^T )

A squared error has a diagonal alone, and a cross entropy one pair, K = c (diag(p) - p p^T), or two where a row is nearly
one-hot. A norm adds two: with the normalised row x, J0 = (I - (1 1^T + x x^T) / d) / s and the second derivative that
:mod:`derivations.normalization_actions` contracts with v = gamma o w,

    H[w] = ( -nu I + nu 1 1^T / d - ((C v) x^T + x (C v)^T - 3 nu x x^T) / d ) / s^2 ,       nu = x.v / d,

both J0 diag(D) J0 and H[w] are a diagonal, a pair with 1 and a pair with x. RMSNorm has C = I, and no terms with 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.loss import CrossEntropy, MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
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
    """Return the curvature of a loss in its first input, where the loss is a named one."""
    z = inputs[0]
    if isinstance(primitive, MeanSquaredError):
        h = primitive.curvature(inputs, adjoint, (torch.ones_like(z).unsqueeze(0), None))[0]
        assert h is not None
        D = h.reshape(-1, z.shape[-1])
        none = D.new_zeros(0, *D.shape)
        return RowCurvature(D, none, none)
    if isinstance(primitive, CrossEntropy):
        kept = (inputs[1] != primitive.ignore_index).reshape(-1, 1)
        p = torch.softmax(z, -1).reshape(-1, z.shape[-1]).where(kept, 0)
        c = adjoint / (primitive.normalizer or float(kept.sum()))
        if nearly_one_hot(p, -1):
            return _from_peak(p, peaks(p, -1), c)
        return RowCurvature(c * p, p.unsqueeze(0), -0.5 * c * p.unsqueeze(0))
    return None


def _from_peak(p: Tensor, peak: Tensor, c: Tensor) -> RowCurvature:
    """Return c (diag(p) - p p^T) for confident rows, measured from the peak m: p_m - p_m^2 would lose their digits.

    The covariance of e_j - e_m, j drawn from p: with the other weights o, their sum s, and e = e_m,
    diag(o + s e) - (o e^T + e o^T) - (o - s e)(o - s e)^T.
    """
    e = torch.zeros_like(p).scatter_(-1, peak, 1)
    o = p.scatter(-1, peak, 0)
    s = o.sum(-1, keepdim=True)
    moved = o - s * e
    return RowCurvature(c * (o + s * e), torch.stack([e, moved]), torch.stack([-c * o, -0.5 * c * moved]))


def through_norm(
    primitive: LayerNorm | RMSNorm, inputs: Sequence[Tensor | None], adjoint: Tensor | None, K: RowCurvature
) -> RowCurvature:
    """Return the curvature in the input of a norm over the last axis from that in its output.

    Args:
        primitive: The norm.
        inputs: X and, if there are any, gain and shift.
        adjoint: Of the output; None where the norm's own second derivative does not count.
        K: The curvature in the output.
    """
    X, gamma = (*inputs, None)[:2]
    assert X is not None
    d, centred = X.shape[-1], isinstance(primitive, LayerNorm)
    m = X.reshape(-1, d)
    m = m - m.mean(-1, keepdim=True) if centred else m
    r = (m.square().mean(-1, keepdim=True) + primitive.eps_at(X)).rsqrt()
    x, one = m * r, torch.ones_like(m)

    def centre(t: Tensor) -> Tensor:
        return t - t.mean(-1, keepdim=True) if centred else t

    def project(t: Tensor) -> Tensor:
        return r * (centre(t) - x * ((t * x).sum(-1, keepdim=True) / d))

    D, a, b = K.D, K.a, K.b
    if gamma is not None:
        D, a, b = D * gamma.square(), a * gamma, b * gamma
    Dx = D * x
    to_x = -Dx / d + x * (Dx * x).sum(-1, keepdim=True) / (2 * d * d)
    to_one = -D / d + one * D.sum(-1, keepdim=True) / (2 * d * d) + x * Dx.sum(-1, keepdim=True) / (d * d)
    if adjoint is not None:
        w = adjoint.reshape(-1, d)
        v = w if gamma is None else w * gamma
        nu = (x * v).mean(-1, keepdim=True)
        to_x = to_x - centre(v) / d + (1.5 / d) * nu * x
        to_one = to_one + nu * one / (2 * d)
        D = D - nu
    r2 = r.square()
    left, right = ([one, x], [r2 * to_one, r2 * to_x]) if centred else ([x], [r2 * to_x])
    return RowCurvature(r2 * D, torch.cat([torch.stack(left), project(a)]), torch.cat([torch.stack(right), project(b)]))


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
