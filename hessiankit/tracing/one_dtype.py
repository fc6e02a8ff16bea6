"""One floating-point type for the derivatives of a trace, whatever types the module itself computes in.

A module may mix types: a norm or a softmax in float32 within a bfloat16 model, a float64 mask, a loss in float32. The values
of a trace are those that the module computed, rounded as it rounds; the derivatives of each primitive are then taken at these
values in the widest type that occurs among them, and in no less than float32. A change of type is the identity, as it is for
autograd, so nothing of the chain rule depends on where the module casts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from derivations.cast import Cast

if TYPE_CHECKING:
    from hessiankit.tracing.trace import Trace


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest floating-point type that holds all of some, and has no fewer digits than float32.

    >>> widest([torch.bfloat16]), widest([torch.float16, torch.float64])
    (torch.float32, torch.float64)
    """
    return reduce(torch.promote_types, dtypes, torch.float32)


def in_one_dtype(trace: Trace) -> None:
    """Convert the floating-point values of a trace, in place, to the widest type among those that the parameters reach."""
    trace.eps = max((torch.finfo(x.dtype).eps for x in trace.values if x.is_floating_point()), default=0.0)
    moving = {trace.values[at].dtype for at in trace.moving}
    dtype = widest(moving)
    if all(x.dtype == dtype or not x.is_floating_point() for x in trace.values):
        return
    trace.narrow = {at: x.dtype for at, x in enumerate(trace.values) if at in trace.moving and x.dtype != dtype}
    trace.values[:] = [x.to(dtype) if x.is_floating_point() else x for x in trace.values]
    for i, a in enumerate(trace.applications):
        if isinstance(a.primitive, Cast):
            trace.applications[i] = replace(a, primitive=replace(a.primitive, dtype=dtype))


def converted(tree: Any, dtype: torch.dtype) -> Any:
    """Return nested arguments of an operation, their floating-point tensors and types replaced by those of ``dtype``.

    >>> converted((torch.ones(1), 2, torch.float16), torch.float64)
    (tensor([1.], dtype=torch.float64), 2, torch.float64)
    """

    def convert(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(dtype)
        return dtype if isinstance(x, torch.dtype) and x.is_floating_point else x

    return torch.utils._pytree.tree_map(convert, tree)
