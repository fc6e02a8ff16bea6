"""Fused attention, torch's ``scaled_dot_product_attention``, as one primitive with closed-form actions.

The fused kernels have neither a second derivative nor a forward mode; the formula that they compute has both. With
T = c Q K^T + B, A = softmax(T) row by row, N = A V, and C_A(x) = A o x - A (A.x) the covariance of a row (A.x its sum of A o x):

    dN   = dA V + A dV,   dA = C_A(dT),   dT = c (dQ K^T + Q dK^T) + dB
    to V = A^T W,   to T (and B) = M = C_A(W V^T),   to Q = c M K,   to K = c M^T Q        for an adjoint W

The contracted second derivative is the differential of the second line. Its only new object is that of M,

    dM = M o dT - M (A.dT) - A (M.dT) + C_A(W dV^T),

diagonal plus rank two in dT as for softmax, and a covariance in dV. Derivatives read A alone, so entries that are masked
vanish, and rows that are masked altogether, which torch sets to zero, vanish as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.directions import parts
from derivations.linear import align, unbroadcast
from derivations.primitive import Covectors, Inputs, Primitive, Tangents


@dataclass(frozen=True, eq=False)
class ScaledDotProductAttention(Primitive):
    """N = softmax(c Q K^T + B) V; inputs (Q, K, V) or (Q, K, V, B) with an additive mask B that may move.

    Q is (..., L, E), K (..., S, E), V (..., S, E_v) and B broadcasts to (..., L, S); leading axes broadcast.

    Args:
        mask: A constant mask: boolean, True where an entry takes part, or additive. Not together with an input B.
        is_causal: Query i sees the keys up to i only. Not together with a mask.
        scale: c; 1/sqrt(E) if None.
        enable_gqa: The heads, axis -3, of K and V are fewer than Q's, and each serves as many consecutive ones of Q.

    >>> zeros, V = torch.zeros(1, 1), torch.tensor([[2.0], [4.0]])
    >>> attention, inputs = ScaledDotProductAttention(), (zeros, torch.ones(2, 1), V)
    >>> attention.value(*inputs).tolist(), attention.vjp(inputs, torch.ones(1, 1, 1))[2].tolist()
    ([[3.0]], [[[0.5], [0.5]]])
    """

    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def value(self, *inputs: Tensor) -> Tensor:
        """Return N, by torch's own kernel."""
        Q, K, V = inputs[:3]
        return torch.nn.functional.scaled_dot_product_attention(
            Q,
            K,
            V,
            attn_mask=inputs[3] if len(inputs) > 3 else self.mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    @torch.no_grad()
    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        count = _directions(tangents)
        if count is None:
            raise ValueError("ScaledDotProductAttention.jvp: every tangent is None; at least one input must move")
        Q, K, V = (self._arrange(x.unsqueeze(0), inputs) for x in inputs[:3])
        A, moved = self._weights(inputs), self._moved(inputs, tangents)
        shape = (*torch.broadcast_shapes(A.shape[1:-2], V.shape[1:-2]), A.shape[-2], V.shape[-1])
        out = A.new_empty(count, *shape)
        for part in _parts(count, A):
            q, k, v, b = (None if t is None else t[part] for t in moved)
            t = _logits(self._scale(inputs), Q, K, q, k, b)
            along_T = 0 if t is None else _product(_covariance(A, t), V)
            along_V = 0 if v is None else _product(A, v)
            out[part] = along_T + along_V
        return out.reshape(count, *self._rows(inputs), *shape[-2:])

    @torch.no_grad()
    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        Q, K, V = (self._arrange(x.unsqueeze(0), inputs) for x in inputs[:3])
        A, W, c = self._weights(inputs), self._arrange(adjoint, inputs), self._scale(inputs)
        out = [adjoint.new_empty(adjoint.shape[0], *x.shape) for x in inputs]
        for part in _parts(adjoint.shape[0], A):
            M = _covariance(A, _product(W[part], V.mT))
            found = (c * _product(M, K), c * _product(M.mT, Q), _product(A.mT, W[part]), M)
            self._store(out, part, found, inputs)
        return tuple(out)

    @torch.no_grad()
    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        count = _directions(tangents)
        if count is None:
            return (None,) * len(inputs)
        Q, K, V = (self._arrange(x.unsqueeze(0), inputs) for x in inputs[:3])
        A, W, c = self._weights(inputs), self._arrange(adjoint.unsqueeze(0), inputs), self._scale(inputs)
        M, moved = _covariance(A, W @ V.mT), self._moved(inputs, tangents)
        shifts = any(t is not None for k, t in enumerate(moved) if k != 2)  # whether the logits move
        out = [None if k == 2 and not shifts else adjoint.new_empty(count, *x.shape) for k, x in enumerate(inputs)]
        for part in _parts(count, A):
            q, k, v, b = (None if t is None else t[part] for t in moved)
            t = _logits(c, Q, K, q, k, b)
            dM: Tensor | None = None if v is None else _covariance(A, _product(W, v.mT))
            to_V = None
            if t is not None:
                centred = t - (A * t).sum(-1, keepdim=True)
                to_V = _product((A * centred).mT, W)
                second = M * centred
                second = second - A * second.sum(-1, keepdim=True)  # M.1 = 0, so this sum is M.dT
                dM = second if dM is None else dM + second
            assert dM is not None
            to_Q = _product(dM, K) if k is None else _product(dM, K) + _product(M, k)
            to_K = _product(dM.mT, Q) if q is None else _product(dM.mT, Q) + _product(M.mT, q)
            self._store(out, part, (c * to_Q, c * to_K, to_V, dM), inputs)
        return tuple(out)

    def rowwise(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        """Batches and heads stay apart where every moving input has them; query tokens too where Q alone moves."""
        rows = self._rows(inputs)
        if axes == len(rows) + 1:
            return not any(moving[1:]) and inputs[0].shape[:-2] == rows
        fits = (x.ndim == len(rows) + 2 and x.shape[:axes] == rows[:axes] for x, m in zip(inputs, moving, strict=True) if m)
        return axes <= len(rows) and all(fits)

    def _rows(self, inputs: Inputs) -> torch.Size:
        """The output's leading axes."""
        shapes = [x.shape[:-2] for x in inputs[:3]]
        if self.enable_gqa:  # the heads are Q's
            shapes[1:] = [torch.Size((*s[:-1], 1)) for s in shapes[1:]]
        return torch.broadcast_shapes(*shapes)

    def _scale(self, inputs: Inputs) -> float:
        return 1 / math.sqrt(inputs[0].shape[-1]) if self.scale is None else self.scale

    def _arrange(self, t: Tensor, inputs: Inputs) -> Tensor:
        """Give (S, *shape) as many axes as the others have; with fewer heads of K and V, split heads as (groups, members)."""
        ndim = max(x.ndim for x in inputs[:3])
        t = align(t, t.shape[1:], ndim)
        if not self.enable_gqa:
            return t
        groups, heads = inputs[1].shape[-3], t.shape[-3]
        return t.unflatten(-3, (1, 1) if heads == 1 else (groups, heads // groups))

    def _moved(self, inputs: Inputs, tangents: Tangents) -> list[Tensor | None]:
        arranged = [None if t is None else self._arrange(t, inputs) for t in tangents]
        return arranged + [None] * (4 - len(arranged))

    def _weights(self, inputs: Inputs) -> Tensor:
        """A, arranged: (1, ..., L, S)."""
        Q, K = (self._arrange(x.unsqueeze(0), inputs) for x in inputs[:2])
        T = self._scale(inputs) * (Q @ K.mT)
        mask = inputs[3] if len(inputs) > 3 else self.mask
        if self.is_causal:
            mask = torch.ones(T.shape[-2:], dtype=torch.bool, device=T.device).tril()
        if mask is not None:
            arranged = mask if self.is_causal else self._arrange(mask.unsqueeze(0), inputs)
            T = T.masked_fill(~arranged, -torch.inf) if mask.dtype == torch.bool else T + arranged
        A = torch.softmax(T, -1)
        if mask is not None:
            A = A.masked_fill(T.isneginf().all(-1, keepdim=True), 0)
        if A.isnan().any():
            raise ValueError(
                "scaled_dot_product_attention: the attention weights are not numbers; "
                "Q, K and the mask must be finite, except for entries of the mask that are minus infinity"
            )
        return A

    def _store(self, out: Sequence[Tensor | None], part: slice, found: Sequence[Tensor | None], inputs: Inputs) -> None:
        """Write covectors, summed over what was broadcast, in their inputs' shapes."""
        for into, covector, x in zip(out, found, inputs, strict=False):
            if into is not None and covector is not None:
                arranged = self._arrange(x.unsqueeze(0), inputs).shape[1:]
                summed = unbroadcast(covector, arranged)
                into[part] = summed.expand(summed.shape[0], *arranged).reshape(-1, *x.shape)


def _directions(tangents: Tangents) -> int | None:
    return next((int(t.shape[0]) for t in tangents if t is not None), None)


def _logits(c: float, Q: Tensor, K: Tensor, q: Tensor | None, k: Tensor | None, b: Tensor | None) -> Tensor | None:
    """dT = c (q K^T + Q k^T) + b."""
    terms = (None if q is None else c * _product(q, K.mT), None if k is None else c * _product(Q, k.mT), b)
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def _parts(count: int, A: Tensor) -> list[slice]:
    return list(parts(A.expand(count, *A.shape[1:])))


def _covariance(A: Tensor, x: Tensor) -> Tensor:
    weighted = A * x
    return weighted - A * weighted.sum(-1, keepdim=True)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, but where one of them is repeated along the directions, those become rows of one product: matmul copies it."""
    return torch.einsum("...ij,...jk->...ik", a, b)
