"""Fusion of a linear head with the cross entropy that reads its logits, so that those of all tokens are never held.

Between the two, operations move rows of logits as a whole, such as the shift and the flattening of a causal language model's
loss. They are applied to the head's input instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from hessiankit.primitives.cast import Cast
from hessiankit.primitives.indexing import Slice
from hessiankit.primitives.linear import Linear, MatMul, Multiple, Permute, Reshape
from hessiankit.primitives.linear_cross_entropy import LOGITS, LinearCrossEntropy
from hessiankit.primitives.loss import CrossEntropy, SampledLoss
from hessiankit.tracing.attention_fusion import replace
from hessiankit.tracing.trace import Application, Trace, ancestors_of_output

ENTRIES = LOGITS
"""Logits beyond which a head is fused: where they are made for some tokens at a time."""


def fuse_head(trace: Trace, bending: Container[int] | None = None) -> None:
    """Replace heads and their cross entropies on the way to the output of a trace; logits with other readers are kept.

    ``bending`` is as in :func:`fuse_attention`.
    """
    path = ancestors_of_output(trace)
    producers, counts = {a.output: a for a in path}, Counter(at for a in path for at in a.inputs)
    substitutes: dict[int, list[Application]] = {}
    for loss in path:
        ce = loss.primitive.loss if isinstance(loss.primitive, SampledLoss) else loss.primitive
        if not isinstance(ce, CrossEntropy) or ce.normalizer is None:
            continue
        chain = _from_product(trace, loss, producers, counts)
        if chain and trace.values[chain[0].output].numel() > ENTRIES and (bending is None or loss.output in bending):
            has_inner_curvature = bending is None or chain[0].output in bending
            head = _fused(trace, chain, loss, ce, producers, gauss_newton=not has_inner_curvature)
            substitutes |= {a.output: [] for a in chain} | {loss.output: head}
    replace(trace, path, substitutes)


def _from_product(
    trace: Trace, loss: Application, producers: Mapping[int, Application], counts: Mapping[int | None, int]
) -> list[Application] | None:
    """Return the applications from a product to a loss, if they only move rows of logits that have no other reader."""
    chain: list[Application] = []
    at = loss.inputs[0]
    while at is not None and counts[at] == 1 and (a := producers.get(at)) is not None:
        chain.insert(0, a)
        if isinstance(a.primitive, (Linear, MatMul)):
            weight = trace.values[a.inputs[1]]  # type: ignore[index]
            biased = len(a.inputs) > 2 and a.inputs[2] is not None
            is_plain = weight.ndim == 2 and not (biased and any(isinstance(b.primitive, Multiple) for b in chain))
            return chain if is_plain and _rows_move(trace, chain) else None
        if not isinstance(a.primitive, (Reshape, Permute, Slice, Cast, Multiple)):
            return None
        at = a.inputs[0]
    return None


def _rows_move(trace: Trace, chain: Sequence[Application]) -> bool:
    """Tell whether the classes stay one axis of the logits behind a product, and are the last one in the end."""
    shape = trace.values[chain[0].output].shape
    axis = len(shape) - 1
    for a in chain[1:]:
        p, input_shape, shape = a.primitive, shape, trace.values[a.output].shape
        if isinstance(p, Permute):
            axis = p.order.index(axis)
        elif isinstance(p, Reshape):
            if axis != len(input_shape) - 1 or shape[-1:] != input_shape[-1:]:
                return False
            axis = len(shape) - 1
        elif isinstance(p, Slice) and p.dim % len(input_shape) == axis:
            return False
    return axis == len(shape) - 1


def _fused(
    trace: Trace,
    chain: Sequence[Application],
    loss: Application,
    ce: CrossEntropy,
    producers: Mapping[int, Application],
    *,
    gauss_newton: bool,
) -> list[Application]:
    """Return the head with its loss as one application, after those that reshape its input and weight for it."""
    product, values, new = chain[0], trace.values, list[Application]()
    at, weight, *rest = product.inputs
    assert at is not None
    assert weight is not None
    for a in chain[1:]:
        p = a.primitive
        p = Reshape((*p.shape[:-1], values[at].shape[-1])) if isinstance(p, Reshape) else p
        at = trace.derived(p, (at,), loss.name, new)
    if isinstance(product.primitive, MatMul):
        by, swap = producers.get(weight), Permute((1, 0))
        weight = by.inputs[0] if by is not None and by.primitive == swap else trace.derived(swap, (weight,), loss.name, new)
    head = LinearCrossEntropy(ce.ignore_index, ce.label_smoothing, ce.normalizer, gauss_newton)
    labels: tuple[int | None, ...] = (loss.inputs[1],)
    if isinstance(loss.primitive, SampledLoss):  # (B, 1 + M, ...): the data's labels, and drawn ones
        target = values[loss.inputs[1]]  # type: ignore[index]
        labels = (trace.add_value(target[:, 0]), trace.add_value(target[:, 1:].movedim(1, -1)))
    return [*new, Application(head, (at, weight, rest[0] if rest else None, *labels), loss.output, loss.name)]
