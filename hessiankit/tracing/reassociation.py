"""Rewriting of a trace so that rows stay apart: products of three matrices reassociated, axes of rows kept.

Attention over tokens X, A (X W_V) and Q (X W_K)^T, mixes the rows of X W. As (A X) W_V and (Q W_K^T) X^T the weights multiply
rows of A X and Q, each of which reaches one row of the result: curvature is a sum over rows and not over pairs of rows. Where
X depends on parameters, every direction passes A X in place of A (X W_V), so that X may not be wider than X W there.

Where a product with a weight takes X (B, L, d) as rows (B L, d), as in GPT-2, it is taken with the axes of X: attention after it
keeps samples apart then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.primitives.linear import Add, Linear, MatMul, Permute, Reshape
from hessiankit.primitives.loss import CrossEntropy
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.softmax import Softmax
from hessiankit.tracing.trace import Application, Trace, ancestors_of_output


def reassociate(trace: Trace) -> None:
    """Rewrite the products of a trace, in place."""
    _keep_axes(trace)
    producers = {a.output: a for a in trace.applications}
    uses = Counter(at for a in trace.applications for at in a.inputs if at is not None)
    applications: list[Application] = []
    for a in trace.applications:
        applications += _values_last(trace, a, producers, uses) or _keys_last(trace, a, producers, uses) or [a]
    trace.applications[:] = applications
    trace.applications[:] = ancestors_of_output(trace)  # without those of the old brackets


def _keep_axes(trace: Trace) -> None:
    """Apply weights, biases and a cross entropy to values with their axes of rows, where the module flattens these for them.

    Values that are asked for, as the module's output, stay between what comes before and after them.
    """
    rows: dict[int, torch.Size] = {}  # axes that values (B L, d) get again
    for a in reversed(trace.applications):
        source, out = a.inputs[0], trace.values[a.output]
        if source is not None and isinstance(a.primitive, Reshape) and _flattens(out, trace.values[source]):
            rows[source] = out.shape[:-1]
        elif source is not None and a.output in rows and _acts_on_rows(trace, a):
            rows[source] = rows[a.output]
    outputs = {trace.output, *trace.marked}
    batched: dict[int, int] = {}  # values (B, L, d) by those of the same entries (B L, d)
    copies: dict[int, int] = {}  # values by those that they are a copy of
    applications: list[Application] = []
    for a in trace.applications:
        a = replace(a, inputs=tuple(at if at is None else copies.get(at, at) for at in a.inputs))
        first, out = a.inputs[0], trace.values[a.output]
        acts = first is not None and _acts_on_rows(trace, a)
        if first in rows and first not in trace.moving and acts:
            batched[first] = trace.add_value(trace.values[first].reshape(*rows[first], -1))
        if isinstance(a.primitive, Reshape) and first is not None:
            a = replace(a, inputs=(first := batched.get(first, first),))
            if trace.values[first].shape == out.shape and a.output not in outputs:
                copies[a.output] = first
                continue
            if _flattens(trace.values[first], out) and a.output not in outputs:
                batched[a.output] = first
        elif first in batched and isinstance(a.primitive, CrossEntropy):
            labels = trace.values[a.inputs[1]].reshape(trace.values[batched[first]].shape[:-1])  # type: ignore[index]
            a = replace(a, inputs=(batched[first], trace.add_value(labels)))
        elif first in batched and acts and a.output not in outputs:
            at = trace.add_value(out.reshape(*trace.values[batched[first]].shape[:-1], -1), moving=True)
            applications.append(replace(a, inputs=(batched[first], *a.inputs[1:]), output=at))
            batched[a.output] = at
            a = Application(Reshape(tuple(out.shape)), (at,), a.output, f"{a.name}_rows")
        applications.append(a)
    trace.applications[:] = applications


def _flattens(x: Tensor, rows: Tensor) -> bool:
    """Tell whether the second value is the first with its axes of rows as one."""
    return rows.ndim == 2 < x.ndim and x.shape[-1] == rows.shape[-1]


def _acts_on_rows(trace: Trace, a: Application) -> bool:
    """Tell whether an application is X W, X W^T + b, or X + b for one row b."""
    axes = 2 if isinstance(a.primitive, MatMul) else 1 if isinstance(a.primitive, Add) else 0
    one = axes > 0 and len(a.inputs) > 1 and a.inputs[1] is not None and trace.values[a.inputs[1]].ndim == axes
    return one or isinstance(a.primitive, Linear)


def _projection(trace: Trace, at: int | None, producers: dict[int, Application], uses: Counter[int]) -> Application | None:
    """Return the application X W or X W^T that computes a value, if the value is read once and not narrower than a moving X."""
    a = producers.get(at) if at is not None else None
    if a is None or uses[a.output] != 1 or not isinstance(a.primitive, (MatMul, Linear)):
        return None
    x, weight = a.inputs[0], a.inputs[1]
    if x is None or weight is None or trace.values[weight].ndim != 2 or trace.values[x].ndim < 3:
        return None
    is_narrower = trace.values[a.output].shape[-1] < trace.values[x].shape[-1]
    return None if x in trace.moving and is_narrower else a


def _values_last(trace: Trace, a: Application, producers: dict[int, Application], uses: Counter[int]) -> list[Application]:
    """A (X W + b) as (A X) W + b; the bias only where the rows of A sum to one."""
    weights = a.inputs[0]
    projection = _projection(trace, a.inputs[1], producers, uses) if isinstance(a.primitive, MatMul) else None
    if projection is None or weights is None:
        return []
    softmax = producers.get(weights)
    sums_to_one = (
        softmax is not None and isinstance(softmax.primitive, Softmax) and softmax.primitive.dim in (-1, _last(trace, weights))
    )
    bias = projection.inputs[2] if len(projection.inputs) > 2 else None
    x = projection.inputs[0]
    assert x is not None
    if trace.values[weights].shape[:-2] != trace.values[x].shape[:-2] or (bias is not None and not sums_to_one):
        return []
    first: list[Application] = []
    at = trace.derived(MatMul(), (weights, x), f"{a.name}_mixed", first)
    return [*first, Application(projection.primitive, (at, *projection.inputs[1:]), a.output, a.name)]


def _keys_last(trace: Trace, a: Application, producers: dict[int, Application], uses: Counter[int]) -> list[Application]:
    """Q (X W)^T as (Q W^T) X^T."""
    left, right = a.inputs[0], producers.get(a.inputs[1]) if isinstance(a.primitive, MatMul) and a.inputs[1] is not None else None
    if right is None or left is None or uses[right.output] != 1 or not _transposes(right.primitive):
        return []
    projection = _projection(trace, right.inputs[0], producers, uses)
    if projection is None or any(at is not None for at in projection.inputs[2:]):
        return []
    x, weight = projection.inputs[0], projection.inputs[1]
    assert x is not None
    assert weight is not None
    if trace.values[left].shape[:-2] != trace.values[x].shape[:-2]:
        return []
    projecting: Primitive = Linear() if isinstance(projection.primitive, MatMul) else MatMul()
    first: list[Application] = []
    at = trace.derived(projecting, (left, weight), f"{a.name}_keyed", first)
    transposed = trace.derived(right.primitive, (x,), f"{a.name}_transposed", first)
    return [*first, Application(MatMul(), (at, transposed), a.output, a.name)]


def _transposes(primitive: Primitive) -> bool:
    n = len(primitive.order) if isinstance(primitive, Permute) else 0
    return n >= 3 and primitive.order == (*range(n - 2), n - 1, n - 2)  # type: ignore[attr-defined]


def _last(trace: Trace, at: int) -> int:
    return trace.values[at].ndim - 1
