"""Fusion of attention written out in single operations: softmax(c Q K^T + B) V becomes ``scaled_dot_product_attention``.

Between the two products each operation is affine in the logits or rearranges them, so that the logits are c Q K^T + B wherever
weights are not exactly zero; elsewhere they may be minus infinity, or a number whose exponential vanishes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.primitives.cast import Cast
from hessiankit.primitives.elementwise import Divide
from hessiankit.primitives.fused_attention import IN_STRIPS, ScaledDotProductAttention
from hessiankit.primitives.indexing import Where
from hessiankit.primitives.linear import Add, Expand, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape
from hessiankit.primitives.primitive import hollow
from hessiankit.primitives.softmax import Softmax
from hessiankit.tracing.trace import Application, Trace, ancestors_of_output, last_readers

ENTRIES = IN_STRIPS
"""Weights of a head from which attention is fused: where fused attention works strip by strip."""

MOVES = (Reshape, Permute, Expand, Cast)
"""Primitives that only rearrange entries."""

AFFINE = (Multiple, Multiply, Divide, Add, MaskedFill, Where)


def fuse_attention(trace: Trace, bending: Container[int] | None = None) -> None:
    """Replace written-out attention on the way to the output of a trace, and release the values between its products.

    Left alone where another operation reads these values, or where the result would differ by more than rounding. Only second
    derivatives of the primitives that make the values in ``bending`` count; None: of all.
    """
    path = ancestors_of_output(trace)
    producers = {a.output: a for a in path}
    counts = Counter(at for a in path for at in a.inputs)
    sole_readers = {at: producers[by] for at, by in last_readers(path).items() if counts[at] == 1 and at in producers}
    substitutes: dict[int, list[Application]] = {}
    masks: list[Tensor] = []
    for a in path:
        chain = _between_products(a, producers, sole_readers) if isinstance(a.primitive, Softmax) else None
        if chain is None or trace.values[chain[-2].output].shape[-2:].numel() < ENTRIES:
            continue
        if bending is not None and (chain[0].output in bending) is not (chain[-1].output in bending):
            continue
        attention = _fused(trace, chain, producers, masks)
        if attention is not None:
            substitutes |= {a.output: [] for a in chain} | {chain[-1].output: attention}
    replace(trace, path, substitutes)


def replace(trace: Trace, path: Sequence[Application], substitutes: Mapping[int, Sequence[Application]]) -> None:
    """Replace applications of a trace, given by their outputs, and release values that are no longer read."""
    if substitutes:
        trace.applications[:] = [new for a in path for new in substitutes.get(a.output, [a])]
        trace.applications[:] = ancestors_of_output(trace)
        alive = {trace.output, *trace.parameters.values()}
        alive.update(at for a in trace.applications for at in (a.output, *a.inputs) if at is not None)
        for at in set(range(len(trace.values))) - alive:
            trace.values[at] = hollow(trace.values[at])


def _between_products(
    softmax: Application, producers: Mapping[int, Application], sole_readers: Mapping[int, Application]
) -> list[Application] | None:
    """Return the applications from a product through a softmax to one of the weights, unless another operation reads them."""
    chain = _from_product(softmax.inputs[0], producers, sole_readers)
    if chain is None:
        return None
    chain.append(softmax)
    while (a := sole_readers.get(chain[-1].output)) is not None and isinstance(a.primitive, MOVES):
        chain.append(a)
    return [*chain, a] if a is not None and isinstance(a.primitive, MatMul) and a.inputs[0] == chain[-1].output else None


def _from_product(
    at: int | None, producers: Mapping[int, Application], sole_readers: Mapping[int, Application]
) -> list[Application] | None:
    """Return the applications from a product to a value."""
    a = producers.get(at) if at in sole_readers else None  # type: ignore[arg-type]
    if a is None or isinstance(a.primitive, MatMul):
        return None if a is None else [a]
    if not isinstance(a.primitive, (*MOVES, *AFFINE)):
        return None
    chain = next((chain for k in a.inputs if (chain := _from_product(k, producers, sole_readers))), None)
    return chain and [*chain, a]


def _fused(
    trace: Trace, chain: Sequence[Application], producers: Mapping[int, Application], masks: list[Tensor]
) -> list[Application] | None:
    """Return attention as one application, after those that reshape Q and K for it; None if that would not be exact."""
    product, last, values = chain[0], chain[-1], trace.values
    (q, transposed), A = product.inputs, values[chain[-2].output]
    assert q is not None
    assert transposed is not None
    rows, shape = A.shape[:-2], values[product.output].shape[:-2]
    if rows != shape and not values[q].shape[:-2] == values[transposed].shape[:-2] == shape:
        return None
    logits = _Logits(trace, chain)
    # NaN where a row is masked as a whole, which fused attention sets to zero
    options = logits.options(masks) if bool(A.sum().isfinite()) and logits.follow() else None
    if options is None or (logits.moving is not None and options):
        return None
    new: list[Application] = []
    by, ndim = producers.get(transposed), values[transposed].ndim
    swap = Permute((*range(ndim - 2), ndim - 1, ndim - 2))
    k = by.inputs[0] if by is not None and by.primitive == swap else trace.derived(swap, (transposed,), last.name, new)
    assert k is not None
    if rows != shape:
        q, k = (trace.derived(Reshape((*rows, *values[at].shape[-2:])), (at,), last.name, new) for at in (q, k))
    inputs = (q, k, last.inputs[1], *(() if logits.moving is None else (logits.moving,)))
    attention = ScaledDotProductAttention(scale=logits.c, **options)  # type: ignore[arg-type]
    return [*new, Application(attention, inputs, last.output, last.name)]


@dataclass
class _Logits:
    """The logits as c X + bias for a product X, except at hidden entries, where the weights have to be zero.

    Attributes:
        bias: Finite, broadcasts to the weights as the second product reads them, (..., L, S); so does ``hidden``.
        moving: Id of a bias that moves.
    """

    trace: Trace
    chain: Sequence[Application]
    c: float = 1.0
    bias: Tensor | None = None
    hidden: Tensor | None = None
    moving: int | None = None

    def __post_init__(self) -> None:
        self.A = self.trace.values[self.chain[-2].output]
        X = self.trace.values[self.chain[0].output]
        self.at = torch.empty(X.shape, device="meta")  # its strides say where the entries of X are
        self.X = X

    def follow(self) -> bool:
        """Tell whether all operations are known; the weights that the second product reads have the order of X."""
        try:
            is_understood = all(
                self._apply(a, predecessor.output) for predecessor, a in zip(self.chain[:-2], self.chain[1:-1], strict=True)
            )
        except RuntimeError:  # not a view of X
            return False
        return is_understood and self.at.is_contiguous() and self.A.shape[-2:] == self.X.shape[-2:]

    def options(self, masks: list[Tensor]) -> dict[str, object] | None:
        """Return the mask as options of fused attention, reusing an equal one of ``masks``; None if it cannot be expressed."""
        if self.hidden is not None and not self._weightless(self.hidden):
            return None
        if self.bias is not None and self._weightless(bias_mask := self.bias != 0):
            self.bias, self.hidden = None, bias_mask if self.hidden is None else self.hidden | bias_mask
        L, S = self.A.shape[-2:]
        if self.bias is not None:
            mask = self.bias if self.hidden is None else self.bias.masked_fill(self.hidden, -torch.inf)
        elif self.hidden is None or not bool(self.hidden.any()):
            return {}
        elif L == S and bool((self.hidden == torch.ones(L, S, dtype=torch.bool, device=self.A.device).triu(1)).all()):
            return {"is_causal": True}
        else:
            mask = ~self.hidden
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (L, S)))
        equal = next((m for m in masks if m.dtype == mask.dtype and torch.equal(m, mask)), mask)
        if equal is mask:
            masks.append(mask)
        return {"mask": equal}

    def _apply(self, a: Application, source: int) -> bool:
        """Absorb one operation; return False if it is of an unknown kind."""
        p, value = a.primitive, self.trace.values[a.output]
        operands = [at for at in a.inputs if at != source]
        operand = self.trace.values[operands[0]] if operands and operands[0] is not None else None  # of two inputs
        if isinstance(p, Permute):
            self.at = self.at.permute(p.order)
        elif isinstance(p, Reshape):
            self.at = self.at.view(p.shape)
        elif value.device != self.X.device:
            return False
        else:
            self.at = self.at.expand(value.shape)  # repeated entries are not contiguous in the end
        if isinstance(p, Softmax):
            S = self.X.shape[-1]
            return self.at.shape[p.dim] == S and (self.at.stride(p.dim) == 1 or S == 1)
        if isinstance(p, Multiple):
            return self._scale(p.c)
        if isinstance(p, MaskedFill):
            return self._hide(p.mask)
        if isinstance(p, MOVES):
            return True
        first = a.inputs[0] == source
        if isinstance(p, Add):
            return self._scale(1.0 if first else p.alpha) and self._add(operands[0], p.alpha if first else 1.0)
        if operands[0] in self.trace.moving or operand is None:
            return False
        if isinstance(p, Where):
            return self._hide(~p.condition if first else p.condition)
        if operand.numel() > 1 or (isinstance(p, Divide) and not (first and bool(operand))):
            return False
        return self._scale(float(operand) if isinstance(p, Multiply) else 1 / float(operand))

    def _scale(self, c: float) -> bool:
        self.c *= c
        self.bias = None if self.bias is None else self.bias * c
        return math.isfinite(self.c) and (self.moving is None or c == 1)

    def _hide(self, mask: Tensor) -> bool:
        mask = self._arranged(mask)
        self.hidden = mask if self.hidden is None else self.hidden | mask
        return True

    def _add(self, at: int | None, alpha: float) -> bool:
        x = None if at is None else self.trace.values[at]
        if x is None or at in self.trace.moving:
            fits = self.moving is None and alpha == 1 and self.at.shape == self.A.shape and self.at.is_contiguous()
            self.moving = at
            return x is not None and fits
        bias = self._arranged(x).to(self.A.dtype) * alpha
        if bool((masked_entries := bias == -torch.inf).any()):
            self.hidden = masked_entries if self.hidden is None else self.hidden | masked_entries
            bias = bias.masked_fill(masked_entries, 0)
        self.bias = bias if self.bias is None else self.bias + bias
        return True

    def _arranged(self, x: Tensor) -> Tensor:
        """Return a tensor that broadcasts to the current logits, rearranged to broadcast to the weights without copies."""
        if self.at.shape != self.A.shape or not self.at.is_contiguous():
            order = sorted(range(self.at.ndim), key=self.at.stride, reverse=True)
            x = x.expand(self.at.shape).permute(order).reshape(self.A.shape)
        return torch.atleast_2d(x[tuple(slice(1 if step == 0 else None) for step in x.stride())])

    def _weightless(self, mask: Tensor) -> bool:
        """Tell whether the weights are exactly zero wherever a mask holds."""
        mask = mask.reshape((1,) * (self.A.ndim - mask.ndim) + mask.shape)
        axes = tuple(i for i, n in enumerate(mask.shape) if n == 1)
        largest = self.A.amax(axes, keepdim=True) if axes else self.A
        return not bool(((largest != 0) & mask).any())
