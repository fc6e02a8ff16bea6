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
from functools import cached_property

import torch
from torch import Tensor

from hessiankit.primitives.attention_strips import NOT_NUMBERS, Heads
from hessiankit.primitives.directions import align, parts, unbroadcast
from hessiankit.primitives.primitive import ByLinearising, Covectors, Inputs, Linearised, Primitive, Tangents, hollow, plus, total
from hessiankit.primitives.softmax import covariance, from_peak, peaks

TORCHS = torch.nn.functional.scaled_dot_product_attention
"""Torch's function, also while another one is called by its name."""

IN_STRIPS = 512**2
"""Queries times keys from which attention is read strip by strip, which is faster too."""

ALL_HEADS = 2**14
"""Weights of all heads from which it is so on a processor, whose caches then hold those of a few directions only."""


@dataclass(frozen=True, eq=False)
class ScaledDotProductAttention(ByLinearising):
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
        (Q, K, V), scale = inputs[:3], self.scale
        mask = inputs[3] if len(inputs) > 3 else self.mask
        if self.is_causal and scale is not None and scale <= 0:  # torch's kernel on a processor scales the -inf of its mask too
            Q, scale = (-Q, -scale) if scale else (0 * Q, 1.0)
        return TORCHS(Q, K, V, attn_mask=mask, is_causal=self.is_causal, scale=scale, enable_gqa=self.enable_gqa)

    def output_like(self, *inputs: Tensor) -> Tensor:
        """Return an empty N."""
        return inputs[0].new_empty(*self._rows(inputs), inputs[0].shape[-2], inputs[2].shape[-1])

    def written_out(self, *inputs: Tensor) -> Tensor:
        """Return N in operations that torch differentiates any number of times, which keep the weights."""
        out = self._weights(inputs) @ self._arrange(inputs[2].unsqueeze(0), inputs)
        return out.reshape(*self._rows(inputs), *out.shape[-2:])

    def multiplications(self, inputs: Inputs, output: Tensor) -> int:
        return 2 * output.numel() * inputs[1].shape[-2]

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        moves_mask = len(inputs) > 3 and (needs is None or needs[3])
        if self._is_large(inputs) and not moves_mask:
            return AttentionInStrips(self, inputs, adjoint, needs)
        return LinearisedAttention(self, inputs, adjoint, needs)

    def _is_large(self, inputs: Inputs) -> bool:
        weights = inputs[0].shape[-2] * inputs[1].shape[-2]
        on_cpu = inputs[0].device.type == "cpu"
        return weights >= IN_STRIPS or (on_cpu and self._rows(inputs).numel() * weights >= ALL_HEADS)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        """Batches and heads stay apart where every moving input has them; query tokens too where Q alone moves."""
        rows = self._rows(inputs)
        if axes == len(rows) + 1:
            return not any(motion[1:]) and inputs[0].shape[:-2] == rows
        fits = (x.ndim == len(rows) + 2 and x.shape[:axes] == rows[:axes] for x, m in zip(inputs, motion, strict=True) if m)
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
        """Reshape (S, *shape) to the others' number of axes; with fewer heads of K and V, split heads as (groups, members)."""
        ndim = max(x.ndim for x in inputs[:3])
        t = align(t, t.shape[1:], ndim)
        if not self.enable_gqa:
            return t
        groups, heads = inputs[1].shape[-3], t.shape[-3]
        return t.unflatten(-3, (1, 1) if heads == 1 else (groups, heads // groups))

    def _weights(self, inputs: Inputs) -> Tensor:
        """A, arranged: (1, ..., L, S)."""
        Q, K = (self._arrange(x.unsqueeze(0), inputs) for x in inputs[:2])
        T = self._scale(inputs) * (Q @ K.mT)
        mask = inputs[3] if len(inputs) > 3 else self.mask
        if self.is_causal:
            mask = torch.ones(T.shape[-2:], dtype=torch.bool, device=T.device).tril()
        if mask is None:
            return torch.softmax(T, -1)
        arranged = mask if self.is_causal else self._arrange(mask.unsqueeze(0), inputs)
        T = T.masked_fill(~arranged, -torch.inf) if mask.dtype == torch.bool else T + arranged
        empty = T.isneginf().all(-1, keepdim=True)
        return torch.softmax(T.masked_fill(empty, 0), -1).masked_fill(empty, 0)


class LinearisedAttention(Linearised):
    """A, and the covector M of the logits for the adjoint, with Q, K and V arranged alike."""

    primitive: ScaledDotProductAttention

    def __init__(
        self, primitive: ScaledDotProductAttention, inputs: Inputs, adjoint: Tensor | None, needs: Sequence[bool] | None
    ) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.Q, self.K, self.V = (self._arrange(x.unsqueeze(0)) for x in inputs[:3])
        self.A, self.c = primitive._weights(inputs), primitive._scale(inputs)
        if self.A.device.type == "cpu" and self.A.isnan().any():  # a device would have to be waited for
            raise ValueError(NOT_NUMBERS)

    @cached_property
    def W(self) -> Tensor:
        """The adjoint, arranged."""
        return self._arrange(self.adjoint.unsqueeze(0))

    @cached_property
    def M(self) -> Tensor:
        """C_A(W V^T)."""
        return covariance(self.A, self.W @ self.V.mT, self.peak)

    @cached_property
    def peak(self) -> Tensor:
        """The key with the largest weight in each row of A."""
        return peaks(self.A, -1)

    def push(self, tangents: Tangents) -> Tensor:
        """Return C_A(dT) V + A dV."""
        count = _moving(self.primitive, tangents)
        A, V, heads = self.A, self.V, self._moved(tangents)
        shape = (*torch.broadcast_shapes(A.shape[1:-2], V.shape[1:-2]), A.shape[-2], V.shape[-1])
        out = A.new_empty(count, *shape)
        for part in _parts(count, A):
            q, k, v, b = (None if t is None else t[part] for t in heads)
            t = _logits(self.c, self.Q, self.K, q, k, b)
            along_T = 0 if t is None else _product(covariance(A, t, self.peak), V)
            out[part] = along_T + (0 if v is None else _product(A, v))
        return out.reshape(count, *self.primitive._rows(self.inputs), *shape[-2:])

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the covectors of M' = C_A(bar V^T) + dM as logits, of A^T bar + dA^T W, and of M with dQ and dK."""
        count = _directions((bar, *(tangents or ())))
        if count is None:
            return (None,) * len(self.inputs)
        heads = [None] * 4 if tangents is None else self._moved(tangents)
        bars = None if bar is None else self._arrange(bar)
        out: list[Tensor | None] = [
            self.A.new_empty(count, *x.shape) if w else None for x, w in zip(self.inputs, self.needs, strict=True)
        ]
        if bar is None and all(t is None for k, t in enumerate(heads) if k != 2):
            out[2] = None  # the logits do not move
        for part in _parts(count, self.A):
            covector = None if bars is None else bars[part]
            covectors = self._pull(covector, *(None if t is None else t[part] for t in heads))
            self._store(out, part, covectors)
        return tuple(out)

    def _pull(
        self, bar: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, b: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the covectors of Q, K, V and B for a few directions."""
        A, Q, K, c = self.A, self.Q, self.K, self.c
        to_weights = None if bar is None else _product(bar, self.V.mT)
        if v is not None:
            to_weights = plus(to_weights, _product(self.W, v.mT))
        dM = None if to_weights is None else covariance(A, to_weights, self.peak)
        to_V = None if bar is None else _product(A.mT, bar)
        t = _logits(c, Q, K, q, k, b)
        if t is not None:
            t = from_peak(t, self.peak, -1)
            deviation = t - (A * t).sum(-1, keepdim=True)
            to_V = plus(to_V, _product((A * deviation).mT, self.W))
            second = self.M * deviation
            dM = plus(dM, second - A * second.sum(-1, keepdim=True))  # M.1 = 0, so this sum is M.dT
        assert dM is not None
        to_Q = _product(dM, K) if k is None else _product(dM, K) + _product(self.M, k)
        to_K = _product(dM.mT, Q) if q is None else _product(dM.mT, Q) + _product(self.M.mT, q)
        return c * to_Q, c * to_K, to_V, dM

    def _arrange(self, t: Tensor) -> Tensor:
        return self.primitive._arrange(t, self.inputs)

    def _moved(self, tangents: Tangents) -> list[Tensor | None]:
        arranged = [None if t is None else self._arrange(t) for t in tangents]
        return arranged + [None] * (4 - len(arranged))

    def _store(self, out: Sequence[Tensor | None], part: slice, covectors: Sequence[Tensor | None]) -> None:
        """Write covectors, summed over what was broadcast, in their inputs' shapes."""
        for into, covector, x in zip(out, covectors, self.inputs, strict=False):
            if into is not None and covector is not None:
                arranged = self._arrange(x.unsqueeze(0)).shape[1:]
                total = unbroadcast(covector, arranged)
                into[part] = total.expand(total.shape[0], *arranged).reshape(-1, *x.shape)


def _directions(tangents: Tangents) -> int | None:
    return next((int(t.shape[0]) for t in tangents if t is not None), None)


def _moving(primitive: Primitive, tangents: Tangents) -> int:
    return len(total(primitive, next((t for t in tangents if t is not None), None)))


def _logits(c: float, Q: Tensor, K: Tensor, q: Tensor | None, k: Tensor | None, b: Tensor | None) -> Tensor | None:
    """dT = c (q K^T + Q k^T) + b."""
    terms = (None if q is None else c * _product(q, K.mT), None if k is None else c * _product(Q, k.mT), b)
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def _parts(count: int, A: Tensor) -> list[slice]:
    return list(parts(A.expand(count, *A.shape[1:])))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; where one factor is shared by all directions, these become rows of one product, since matmul would copy it."""
    return torch.einsum("...ij,...jk->...ik", a, b)


class AttentionInStrips(Linearised):
    """Fused attention at one point, a strip of queries at a time: of large heads no matrix of queries times keys is kept."""

    primitive: ScaledDotProductAttention

    def __init__(
        self, primitive: ScaledDotProductAttention, inputs: Inputs, adjoint: Tensor | None, needs: Sequence[bool] | None
    ) -> None:
        super().__init__(primitive, inputs, adjoint, needs)
        self.arranged = [primitive._arrange(x.unsqueeze(0), inputs).shape[1:] for x in inputs[:3]]
        self.lead = torch.broadcast_shapes(*(shape[:-2] for shape in self.arranged))
        Q, K, V = (self._heads(x.unsqueeze(0))[0] for x in inputs[:3])
        mask, mask_of = inputs[3] if len(inputs) > 3 else primitive.mask, None
        if mask is not None:
            strip_mask = primitive._arrange(mask.unsqueeze(0), inputs)[0]
            mask = strip_mask.reshape(-1, *strip_mask.shape[-2:]).expand(-1, Q.shape[1], K.shape[1])
            if len(mask) > 1:
                numbers = torch.arange(len(mask), device=mask.device).reshape(strip_mask.shape[:-2])
                mask_of = numbers.expand(self.lead).reshape(-1)
        W = None if adjoint is None else self._heads(adjoint.unsqueeze(0))[0]
        keeps_weights = Q.shape[1] * K.shape[1] < IN_STRIPS
        self.heads = Heads(Q, K, V, primitive._scale(inputs), mask, mask_of, primitive.is_causal, W, keeps_weights)

    def forget(self) -> None:
        """Keep the arrays arranged by heads; of Q, K and V as given, the shapes stay."""
        self.inputs = (*map(hollow, self.inputs[:3]), *self.inputs[3:])

    def push(self, tangents: Tangents) -> Tensor:
        """Return C_A(t) V + A v."""
        count = _moving(self.primitive, tangents)
        out = self.heads.push([None if t is None else self._heads(t) for t in tangents[:3]])
        return out.reshape(count, *self.primitive._rows(self.inputs), *out.shape[-2:])

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the covectors of Q, K and V; a mask is a constant."""
        return self._pull(bar, tangents, None)

    def push_and_pull(self, bar: Tensor | None, tangents: Tangents) -> tuple[Tensor, Covectors]:
        """Return both, with the weights of each strip computed once."""
        out = self.heads.output(_moving(self.primitive, tangents))
        covectors = self._pull(bar, tangents, out)
        return out.reshape(-1, *self.primitive._rows(self.inputs), *out.shape[-2:]), covectors

    def _pull(self, bar: Tensor | None, tangents: Tangents | None, tangent_sum: Tensor | None) -> Covectors:
        """Return the covectors, and add the tangents of the output to ``tangent_sum`` where it is there."""
        heads_of = [None if t is None else self._heads(t) for t in (tangents or (None,) * 3)[:3]]
        count = _directions((bar, *heads_of))
        if count is None:
            return (None,) * len(self.inputs)
        if any(t is not None for t in heads_of):
            _ = self.adjoint  # without one tangents cannot be pulled
        is_fixed = bar is None and heads_of[0] is None and heads_of[1] is None  # then V's covector is zero
        heads = self.heads
        sums = [
            x.new_zeros(count, *x.shape) if w and not (is_fixed and x is heads.V) else None
            for x, w in zip((heads.Q, heads.K, heads.V), self.needs[:3], strict=True)
        ]
        heads.pull(None if bar is None else self._heads(bar), heads_of, [*sums, tangent_sum])
        covectors = [
            None if x is None else unbroadcast(x.unflatten(1, self.lead or (1,)), shape).reshape(-1, *like.shape)
            for x, shape, like in zip(sums, self.arranged, self.inputs, strict=False)
        ]
        return (*covectors, *(None,) * (len(self.inputs) - 3))

    def _heads(self, t: Tensor) -> Tensor:
        """Return tangents of an input as (S, heads, rows, columns), repeated where heads share it."""
        t = self.primitive._arrange(t, self.inputs)
        return t.expand(t.shape[0], *self.lead, *t.shape[-2:]).reshape(t.shape[0], -1, *t.shape[-2:])
