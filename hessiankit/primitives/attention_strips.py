"""Fused attention read a strip of queries at a time: first and second derivatives in memory linear in the context.

The formulas are those of :mod:`hessiankit.primitives.fused_attention`. A strip is some queries with all keys that they see, of
one head or of several; everything of queries times keys is made for it and let go. With A the strip's weights, t the tangent of
its logits, W the adjoint of its output and b the second-order adjoint, where C_A is the covariance of a row:

    dN = C_A(t) V + A v,     tau = t - A.t,     M = C_A(W V^T)
    dM = C_A(b V^T + W v^T) + M o tau - A (M.tau)
    to Q: c (dM K + M k),    to K: c (dM^T Q + M^T q),    to V: (A o tau)^T W + A^T b
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hessiankit.primitives.softmax import peaks

NOT_NUMBERS = (
    "scaled_dot_product_attention: the attention weights are not numbers; "
    "Q, K and the mask must be finite, except for entries of the mask that are minus infinity"
)

ENTRIES, ON_AN_ACCELERATOR = 2**18, 2**24
"""Entries of a strip: on a processor a megabyte of float32, of which a handful pass through a core's caches."""

CAUSAL = 4
"""Strips of a head at least, on a processor, where a query sees the keys up to its own only: later keys are left out."""


@dataclass(frozen=True, eq=False)
class Heads:
    """N = softmax(c Q K^T + mask) V for H heads of equal sizes.

    Args:
        Q: (H, L, E).
        K: (H, S, E).
        V: (H, S, E_v).
        c: The scale.
        mask: Constant, n masks (n, L, S): boolean (True takes part), or additive; None for none.
        mask_of: The number of each head's mask, (H,), where n is above 1.
        causal: Query i sees the keys up to i only.
        adjoint: W, (H, L, E_v); None where no tangents are pulled.
        keeps_weights: Whether A and M are kept from one call to the next.
        seen: The strips whose rows are known: their largest weight, and the logarithm of their sum.
        kept: A and M of strips, where they are kept; not the strips, which refer to these heads and would form a cycle.

    >>> zeros, ones = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    >>> heads = Heads(zeros, torch.ones(1, 2, 1), torch.tensor([[[2.0], [4.0]]]), 1.0)
    >>> heads.push((ones[None], None, None)).tolist()  # both keys gain alike
    [[[[0.0]]]]
    >>> heads.push((zeros[None], torch.tensor([[[[1.0], [0.0]]]]), torch.ones(1, 1, 2, 1))).tolist()  # Q is zero: only V counts
    [[[[1.0]]]]
    """

    Q: Tensor
    K: Tensor
    V: Tensor
    c: float
    mask: Tensor | None = None
    mask_of: Tensor | None = None
    causal: bool = False
    adjoint: Tensor | None = None
    keeps_weights: bool = False
    seen: set[tuple[int, int]] = field(default_factory=set, repr=False)
    kept: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @cached_property
    def peaks(self) -> Tensor:
        """Room for the key with the largest weight of each query, (H, L, 1)."""
        return torch.zeros(*self.Q.shape[:2], 1, dtype=torch.long, device=self.Q.device)

    @cached_property
    def log_sums(self) -> Tensor:
        """Room for log sum exp T of each query, (H, L, 1); infinity where it sees no key."""
        wide = torch.promote_types(self.Q.dtype, torch.float32)
        return torch.zeros(*self.Q.shape[:2], 1, dtype=wide, device=self.Q.device)

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """Return dN, (count, H, L, E_v), for tangents of Q, K and V, (count, H, ...) or None."""
        count = next(len(x) for x in tangents if x is not None)
        out = self.output(count)
        for strip in self.strips():
            for s in range(count):
                strip.push([None if x is None else x[s] for x in tangents], out[s])
        return out

    def output(self, count: int) -> Tensor:
        """Return zeros for tangents of the output, (count, H, L, E_v)."""
        return self.V.new_zeros(count, *self.Q.shape[:2], self.V.shape[-1])

    def pull(self, bar: Tensor | None, tangents: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        """Add the covectors of Q, K and V and the tangent of N to those of ``out`` that are there, (count, H, ...).

        Args:
            bar: The second-order adjoints, (count, H, L, E_v), or None.
            tangents: Tangents of Q, K and V.
            out: Sums to add to.
        """
        count = next(len(x) for x in (bar, *tangents) if x is not None)
        for strip in self.strips():
            for s in range(count):
                q, k, v, b, *into = (None if x is None else x[s] for x in (*tangents, bar, *out))
                strip.pull(b, (q, k, v), into)

    def strips(self) -> Iterator[Strip]:
        """Yield the strips in which a query may see a key: whole heads together, or some queries of one head."""
        for strip in self._made():
            at = (strip.heads.start, strip.queries.start)
            vars(strip).update(self.kept.get(at, {}))
            yield strip
            if self.keeps_weights:
                self.kept[at] = {name: x for name, x in vars(strip).items() if name in ("A", "M")}

    def _made(self) -> Iterator[Strip]:
        (count, L, _), S = self.Q.shape, self.K.shape[1]
        on_cpu = self.Q.device.type == "cpu"
        entries = ENTRIES if on_cpu else ON_AN_ACCELERATOR
        longest = max(1, math.ceil(L / CAUSAL) if self.causal and on_cpu else L)
        heads_per_strip, rows = max(1, entries // max(1, longest * S)), max(1, min(longest, entries // max(1, S)))
        for first in range(0, count, heads_per_strip):
            heads = slice(first, min(first + heads_per_strip, count))
            for start in range(0, L, rows):
                queries = slice(start, min(start + rows, L))
                keys = slice(0, min(queries.stop, S) if self.causal else S)
                mask = self._mask_of(heads, queries)
                if mask is not None and on_cpu:
                    keys = _seen(mask)
                    mask = mask[..., keys]
                if keys.start < keys.stop:
                    yield Strip(self, heads, queries, keys, mask)

    def _mask_of(self, heads: slice, queries: slice) -> Tensor | None:
        if self.mask is None:
            return None
        part = self.mask[:, queries]
        return part if self.mask_of is None else part[self.mask_of[heads]]


def _seen(mask: Tensor) -> slice:
    """Return the keys from the first to the last that a mask lets a query see."""
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    at = visible.flatten(0, -2).any(0).nonzero()
    return slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)


@dataclass(frozen=True, eq=False)
class Strip:
    """Some queries of some heads, with the keys that they see.

    Args:
        of: All heads.
        heads: Range of heads.
        queries: Range of queries.
        keys: Range of keys.
        mask: Mask of these queries and keys.
    """

    of: Heads
    heads: slice
    queries: slice
    keys: slice
    mask: Tensor | None

    def push(self, tangents: Sequence[Tensor | None], out: Tensor) -> None:
        """Add dN to an output of all heads."""
        tau = self._along(tangents)
        self._push(None if tau is None else tau.mul_(self.A), self._keys(tangents[2]), out[self.heads, self.queries])

    def _push(self, weights: Tensor | None, v: Tensor | None, out: Tensor) -> None:
        """Add dN, for the tangent A o tau of the weights."""
        if weights is not None:
            out.baddbmm_(weights, self.V)
        if v is not None:
            out.baddbmm_(self.A, v)

    def pull(self, b: Tensor | None, tangents: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        """Add the covectors, and the tangent of N, to those of all heads."""
        A, c, W = self.A, self.of.c, self._queries(self.of.adjoint)
        q, k, v, b = self._queries(tangents[0]), self._keys(tangents[1]), self._keys(tangents[2]), self._queries(b)
        to_Q, to_K, to_V, to_N = self._queries(out[0]), self._keys(out[1]), self._keys(out[2]), self._queries(out[3])
        tau = self._along(tangents)
        M = None if tau is None else self.M
        dM = None if b is None else torch.bmm(b, self.V.mT)
        if v is not None and W is not None:
            dM = torch.bmm(W, v.mT) if dM is None else dM.baddbmm_(W, v.mT)
        if dM is not None:
            self._from_peak(dM).mul_(A)
        if tau is not None and M is not None:
            dM = tau * M if dM is None else dM.addcmul_(tau, M)
        if dM is not None:
            dM.addcmul_(A, dM.sum(-1, keepdim=True), value=-1)
            if to_Q is not None:
                to_Q.baddbmm_(dM, self.K, alpha=c)
            if to_K is not None:
                to_K.baddbmm_(dM.mT, self.Q, alpha=c)
        if M is not None:
            if to_Q is not None and k is not None:
                to_Q.baddbmm_(M, k, alpha=c)
            if to_K is not None and q is not None:
                to_K.baddbmm_(M.mT, q, alpha=c)
        weights = None if tau is None else tau.mul_(A)
        if to_V is not None and weights is not None and W is not None:
            to_V.baddbmm_(weights.mT, W)
        if to_V is not None and b is not None:
            to_V.baddbmm_(A.mT, b)
        if to_N is not None:
            self._push(weights, v, to_N)

    @cached_property
    def Q(self) -> Tensor:
        """The queries."""
        return self.of.Q[self.heads, self.queries]

    @cached_property
    def K(self) -> Tensor:
        """The keys."""
        return self.of.K[self.heads, self.keys]

    @cached_property
    def V(self) -> Tensor:
        """The values of the keys."""
        return self.of.V[self.heads, self.keys]

    @cached_property
    def A(self) -> Tensor:
        """The weights, zero where a query sees no key."""
        T = self._product(self.Q, self.K)
        if self.of.causal:
            first = self.queries.start
            hidden = torch.ones(T.shape[1], T.shape[2] - first, dtype=torch.bool, device=T.device).triu(1)
            T[..., first:].masked_fill_(hidden, -torch.inf)
        if self.mask is not None:
            T = T.masked_fill_(~self.mask, -torch.inf) if self.mask.dtype == torch.bool else T.add_(self.mask)
        return T.sub_(self._log_sums(T)).exp_()

    def _log_sums(self, T: Tensor) -> Tensor:
        """Return log sum exp T of each row, computed once per point, like the keys with the largest weights."""
        at = (self.heads.start, self.queries.start)
        log_sums, peak = (rows[self.heads, self.queries] for rows in (self.of.log_sums, self.of.peaks))
        if at not in self.of.seen:
            sums = torch.logsumexp(T.to(log_sums.dtype), -1, keepdim=True)
            if T.device.type == "cpu" and not (sums < torch.inf).all():  # a device would have to be waited for
                raise ValueError(NOT_NUMBERS)
            log_sums.copy_(sums.masked_fill_(sums == -torch.inf, torch.inf))
            peak.copy_(peaks(T, -1))
            self.of.seen.add(at)
        return log_sums

    @cached_property
    def peak(self) -> Tensor:
        """The key with the largest weight in each row of A."""
        _ = self.A  # the point knows the peaks of rows whose weights were computed
        return self.of.peaks[self.heads, self.queries]

    @cached_property
    def M(self) -> Tensor:
        """C_A(W V^T)."""
        W = self._queries(self.of.adjoint)
        assert W is not None
        M = self._from_peak(torch.bmm(W, self.V.mT)).mul_(self.A)
        return M.addcmul_(self.A, M.sum(-1, keepdim=True), value=-1)

    def _along(self, tangents: Sequence[Tensor | None]) -> Tensor | None:
        """Return tau = t - A.t; None if the logits do not move."""
        q, k = self._queries(tangents[0]), self._keys(tangents[1])
        t = None if q is None else self._product(q, self.K)
        if k is not None:
            t = self._product(self.Q, k) if t is None else t.baddbmm_(self.Q, k.mT, alpha=self.of.c)
        if t is None:
            return None
        self._from_peak(t)
        return t.sub_(torch.einsum("hij,hij->hi", self.A, t).unsqueeze(-1))

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        """Return c q k^T."""
        return torch.bmm(q * self.of.c, k.mT)

    def _from_peak(self, t: Tensor) -> Tensor:
        """Subtract from tangents their value at the peak of their row, in place: a covariance does not depend on it."""
        return t.sub_(t.gather(-1, self.peak))

    def _queries(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.heads, self.queries]

    def _keys(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.heads, self.keys]
