"""Fusion of steps, for fewer operations a product: reshapes in a row become one, and a product takes its bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace

from hessiankit.primitives.indexing import Concatenate
from hessiankit.primitives.linear import Add, MatMul, Reshape
from hessiankit.tracing.trace import Application, Trace, ancestors_of_output


def fuse_steps(trace: Trace, outputs: Container[int | None] = ()) -> None:
    """Fuse steps, in place, that a product with an operator would run one by one.

    Args:
        trace: The trace.
        outputs: Values read outside the trace.
    """
    fuse_reshapes(trace, outputs)
    fuse_biases(trace, outputs)
    trace.applications[:] = ancestors_of_output(trace)


def fuse_reshapes(trace: Trace, outputs: Container[int | None]) -> None:
    """Let readers of a reshaped value read the value before all reshapes if the shapes are equal, else one reshape of it.

    Joined to nothing but empty tensors, as the keys of a first token are, a value is itself too.
    """
    copies: dict[int, int] = {}
    sources: dict[int, int] = {}  # of a reshape: what it reshapes, through all reshapes before it
    applications: list[Application] = []
    for a in trace.applications:
        inputs = tuple(at if at is None else copies.get(at, at) for at in a.inputs)
        source = _source(trace, a, inputs)
        if source is not None:
            source = sources.get(source, source) if isinstance(a.primitive, Reshape) else source
            if (
                trace.values[source].shape == trace.values[a.output].shape
                and a.output != trace.output
                and a.output not in outputs
            ):
                copies[a.output] = source
                continue
            if isinstance(a.primitive, Reshape):
                sources[a.output], inputs = source, (source,)
        applications.append(a if inputs == a.inputs else replace(a, inputs=inputs))
    trace.applications[:] = applications


def _source(trace: Trace, a: Application, inputs: tuple[int | None, ...]) -> int | None:
    """The value whose entries, in their order, an application returns."""
    if isinstance(a.primitive, Reshape):
        return inputs[0]
    if isinstance(a.primitive, Concatenate):
        parts = [at for at in inputs if at is not None and trace.values[at].numel()]
        return parts[0] if len(parts) == 1 and parts[0] in trace.moving else None
    return None


def fuse_biases(trace: Trace, outputs: Container[int | None]) -> None:
    """Let a product with one matrix for all rows add the vector that is added to all rows of it, where it has no other reader."""
    reads = Counter(at for a in ancestors_of_output(trace) for at in a.inputs)
    products = {a.output: a for a in trace.applications if isinstance(a.primitive, MatMul)}
    for k, a in enumerate(trace.applications):
        product = products.get(a.inputs[0]) if a.inputs[0] is not None and a.primitive == Add() else None
        if product is None or product.output in outputs or reads[product.output] != 1 or a.output in trace.narrow:
            continue
        matrix, bias = (None if at is None else trace.values[at] for at in (product.inputs[1], a.inputs[1]))
        if matrix is not None and bias is not None and matrix.ndim == 2 and bias.shape == matrix.shape[1:]:
            trace.applications[k] = replace(product, inputs=(*product.inputs, a.inputs[1]), output=a.output)
