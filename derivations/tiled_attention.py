"""Fused attention read tile by tile: products with its derivatives of first and second order in memory linear in the context.

The formulas are those of :mod:`derivations.fused_attention`. With T = c (q K^T + Q k^T) the tangent of the logits, N the output,
W its adjoint and b the second-order adjoint, every array of queries times keys is made for one tile of A = exp(S - lse) and let
go. What crosses tiles is one number a row:

    r = sum of A o T,   tau = T - r,        dN = (A o tau) V + A v
    D = sum of W o N,   dD = sum of b o N + W o dN,        M = A o (W V^T - D)
    dM = M o tau + A o (W v^T + b V^T - dD)
    to Q: c (dM K + M k),   to K: c (dM^T Q + M^T q),   to V: (A o tau)^T W + A^T b

A row whose weight lies almost wholly on one key, its peak p, loses its digits in T - r and W V^T - D. As the rows of A sum to
one, T, V and W V^T may be counted from the peak: T_j - T_p, which is zero there, and N - V_p = sum over j other than p of
A_j (V_j - V_p). That is how they are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

Moved: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
Peaks: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # rows and columns of a tile, and which of these are marked

NOT_NUMBERS = (
    "scaled_dot_product_attention: the attention weights are not numbers; "
    "Q, K and the mask must be finite, except for entries of the mask that are minus infinity"
)

QUERIES, KEYS = 256, 512
"""Rows and columns of a tile: a quarter of a megabyte of float32, of which a handful stay in a core's second-level cache."""

ON_AN_ACCELERATOR = 8
"""How many times as long the sides of a tile are where large arrays are fast."""


@dataclass(frozen=True, eq=False)
class TiledHead:
    """N = softmax(c Q K^T + mask) V for matrices, by tiles.

    Args:
        Q: L x E.
        K: S x E.
        V: S x E_v.
        c: The scale.
        mask: Constant, L x S or with axes of length 1: boolean (True takes part), or additive; None for none.
        causal: Query i sees the keys up to i only.

    >>> zeros = torch.zeros(1, 1)
    >>> head = TiledHead(zeros, torch.ones(2, 1), torch.tensor([[2.0], [4.0]]), 1.0)
    >>> head.push((torch.ones(1, 1), None, None))[0].tolist()  # both keys gain alike
    [[0.0]]
    >>> head.push((zeros, torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)))[0].tolist()  # Q is zero: only V counts
    [[1.0]]
    """

    Q: Tensor
    K: Tensor
    V: Tensor
    c: float
    mask: Tensor | None = None
    causal: bool = False

    def push(self, moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
        """Return dN, r counted from the peak (L, 1), and dN - v_p, in the order of the rows."""
        q, k, v = moved
        change = self.V.new_zeros(len(self.Q), self.V.shape[1])
        r = self.Q.new_zeros(len(self.Q), 1)
        at_peak = self._logits_at_peak(q, k)
        for rows, cols in self._tiles():
            A, peak = self._weights(rows, cols)
            _zero(A, peak)
            if v is not None:
                change[rows].addmm_(A, v[cols])
            if at_peak is not None:
                A.mul_(self._moved_logits(q, k, rows, cols).sub_(at_peak[rows]))
                r[rows] += A.sum(-1, keepdim=True)
                change[rows].addmm_(A, self.V[cols])
        change.addcmul_(r, self.V_peak + self.N_change, value=-1)
        if v is None:
            return change, r, change
        v_peak = v[self.peak]
        change.addcmul_(self.others, v_peak, value=-1)
        return change + v_peak.masked_fill_(self.empty, 0), r, change

    def pull(
        self,
        W: Tensor | None,
        b: Tensor | None,
        moved: Moved,
        r: Tensor | None,
        change: Tensor | None,
        out: Sequence[Tensor | None],
    ) -> None:
        """Add the covectors of Q, K and V to those of ``out`` that are there.

        Args:
            W: The adjoint; None where no tangents are pulled.
            b: The second-order adjoint, or None.
            moved: Tangents of Q, K and V.
            r: As :meth:`push` returns it for these.
            change: dN - v_p, the same.
            out: Where to add.
        """
        q, k, v = moved
        at_peak = self._logits_at_peak(q, k)
        Y = [(x, y, _dot(x, y[self.peak])) for x, y in ((W, v), (b, self.V)) if x is not None and y is not None]
        X = [(W, self.V, _dot(W, self.V_peak))] if W is not None and at_peak is not None else []
        dD = [_dot(x, n) for x, n in ((W, change), (b, self.N_change)) if x is not None and n is not None]
        total, D = sum(dD[1:], dD[0]), _dot(W, self.N_change) if X and W is not None else None
        for rows, cols in self._tiles():
            A, peak = self._weights(rows, cols)
            dM = -total[rows] if not Y else _from_peak(Y, rows, cols, peak).sub_(total[rows])
            M, bent = None, None
            dM = dM * A if not Y else dM.mul_(A)
            if X and D is not None and r is not None and at_peak is not None:
                M = _from_peak(X, rows, cols, peak).sub_(D[rows]).mul_(A)
                tau = _zero(self._moved_logits(q, k, rows, cols).sub_(at_peak[rows]), peak).sub_(r[rows])
                dM.addcmul_(M, tau)
                bent = tau.mul_(A)
            for into, left, right, turned, moved_right in ((out[0], rows, cols, False, k), (out[1], cols, rows, True, q)):
                if into is not None:
                    other = self.Q if turned else self.K
                    into[left].addmm_(dM.mT if turned else dM, other[right], alpha=self.c)
                    if M is not None and moved_right is not None:
                        into[left].addmm_(M.mT if turned else M, moved_right[right], alpha=self.c)
            if out[2] is not None:
                if bent is not None and W is not None:
                    out[2][cols].addmm_(bent.mT, W[rows])
                if b is not None:
                    out[2][cols].addmm_(A.mT, b[rows])

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of every row of logits the log-sum-exp, infinite where all are masked, and where the largest is, both (L, 1); and the
        sums of A and of A V over the other keys.

        One pass: what is summed refers to the largest logit so far, and is scaled where a larger one comes.
        """
        top = self.Q.new_full((len(self.Q), 1), -torch.inf)
        peak = torch.zeros_like(top, dtype=torch.long)
        others, seen = torch.zeros_like(top), self.V.new_zeros(len(self.Q), self.V.shape[1])
        for rows, cols in self._tiles():
            T = self._logits(rows, cols)
            largest = T.amax(-1, keepdim=True)
            larger = largest > top[rows]
            at = self._where(larger)
            if at.numel():
                i, new, column = at + rows.start, larger[at], T[at].argmax(-1, keepdim=True)
                less = (top[i] - largest[at]).exp_()
                others[i] = torch.where(new, (others[i] + 1) * less, others[i])
                seen[i] = torch.where(new, (seen[i] + self.V[peak[i, 0]]) * less, seen[i])
                top[i], peak[i] = torch.maximum(top[i], largest[at]), torch.where(new, column + cols.start, peak[i])
            A = T.sub_(top[rows].masked_fill(top[rows].isneginf(), 0)).exp_()
            if at.numel():
                _zero(A, (at, column.squeeze(1), new.squeeze(1)))
            others[rows] += A.sum(-1, keepdim=True)
            seen[rows].addmm_(A, self.V[cols])
        if others.isnan().any() or top.isposinf().any():
            raise ValueError(NOT_NUMBERS)
        whole = 1 + others
        lse = (top + whole.log()).masked_fill_(top.isneginf(), torch.inf)
        return lse, peak, others.div_(whole), seen.div_(whole)

    @cached_property
    def peak(self) -> Tensor:
        """The key of every query's largest weight, (L,)."""
        return self._rows[1].squeeze(1)

    @cached_property
    def empty(self) -> Tensor:
        """The queries that see no key, (L, 1)."""
        return self._rows[0].isposinf()

    @cached_property
    def K_peak(self) -> Tensor:
        """K at the peaks, L x E."""
        return self.K[self.peak]

    @cached_property
    def V_peak(self) -> Tensor:
        """V at the peaks, L x E_v."""
        return self.V[self.peak]

    @cached_property
    def others(self) -> Tensor:
        """The weights but for the largest, summed over each row, (L, 1)."""
        return self._rows[2]

    @cached_property
    def N_change(self) -> Tensor:
        """N - V_p, L x E_v: nothing in rows that see no key."""
        _, _, others, seen = self._rows
        return torch.addcmul(seen, others, self.V_peak, value=-1)

    @cached_property
    def _scaled(self) -> Tensor:
        """c Q."""
        return self.c * self.Q

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of the tiles in which a query may see a key."""
        more = 1 if self.Q.device.type == "cpu" else ON_AN_ACCELERATOR
        for i, j in itertools.product(range(0, len(self.Q), more * QUERIES), range(0, len(self.K), more * KEYS)):
            rows, cols = slice(i, min(i + more * QUERIES, len(self.Q))), slice(j, min(j + more * KEYS, len(self.K)))
            if not (self.causal and j >= rows.stop) and not self._masks_all(rows, cols):
                yield rows, cols

    def _mask(self, rows: slice, cols: slice) -> Tensor | None:
        if self.mask is None:
            return None
        return self.mask[rows if self.mask.shape[0] > 1 else slice(None), cols if self.mask.shape[1] > 1 else slice(None)]

    def _masks_all(self, rows: slice, cols: slice) -> bool:
        mask = self._mask(rows, cols)
        return mask is not None and not bool((mask if mask.dtype == torch.bool else mask.isfinite()).any())

    def _logits(self, rows: slice, cols: slice) -> Tensor:
        T = self._scaled[rows] @ self.K[cols].mT
        mask = self._mask(rows, cols)
        if mask is not None:
            T = T.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else T.add_(mask)
        if self.causal and cols.stop - 1 > rows.start:
            at = torch.arange(cols.start, cols.stop, device=T.device)
            T.masked_fill_(at > torch.arange(rows.start, rows.stop, device=T.device).unsqueeze(1), -torch.inf)
        return T

    def _weights(self, rows: slice, cols: slice) -> tuple[Tensor, Peaks]:
        """Return a tile of A, and where the peaks of rows are in it."""
        lse, peak, _, _ = self._rows
        column = peak[rows, 0] - cols.start
        inside = (column >= 0) & (column < cols.stop - cols.start)
        at = self._where(inside)
        found = column[at].clamp(0, cols.stop - cols.start - 1)
        return self._logits(rows, cols).sub_(lse[rows]).exp_(), (at, found, inside[at])

    def _where(self, rows: Tensor) -> Tensor:
        """Return the rows that are marked, or all on an accelerator, which would have to wait for their number."""
        if self.Q.device.type == "cpu":
            return rows.reshape(-1).nonzero().squeeze(1)
        return torch.arange(len(rows), device=rows.device)

    def _moved_logits(self, q: Tensor | None, k: Tensor | None, rows: slice, cols: slice) -> Tensor:
        if q is None:
            assert k is not None
            return self._scaled[rows] @ k[cols].mT
        out = torch.mm(q[rows], self.K[cols].mT).mul_(self.c)
        return out if k is None else out.addmm_(self._scaled[rows], k[cols].mT)

    def _logits_at_peak(self, q: Tensor | None, k: Tensor | None) -> Tensor | None:
        """The tangent of the largest logits, (L, 1); None if the logits do not move."""
        pairs = ((q, self.K_peak), (self.Q, None if k is None else k[self.peak]))
        terms = [_dot(x, y) for x, y in pairs if x is not None and y is not None]
        return self.c * sum(terms[1:], terms[0]) if terms else None


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the scalar products of rows, (L, 1)."""
    return (x * y).sum(-1, keepdim=True)


def _zero(x: Tensor, at: Peaks) -> Tensor:
    """Set to zero, in place, the entries that are marked."""
    rows, columns, marked = at
    if rows.numel():
        x[rows, columns] = x[rows, columns].masked_fill_(marked, 0)
    return x


def _from_peak(terms: Sequence[tuple[Tensor, Tensor, Tensor]], rows: slice, cols: slice, peak: Peaks) -> Tensor:
    """Return a tile of the sum of x y^T, counted from its values at the peaks: zero there."""
    x, y, least = terms[0]
    out = (x[rows] @ y[cols].mT).sub_(least[rows])
    for x, y, least in terms[1:]:
        out.addmm_(x[rows], y[cols].mT).sub_(least[rows])
    return _zero(out, peak)
