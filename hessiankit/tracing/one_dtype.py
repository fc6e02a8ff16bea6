"""One floating-point type for the derivatives of a trace, whatever types the module itself computes in.

A module may mix types: a norm or a softmax in float32 within a bfloat16 model, a float64 mask, a loss in float32. The values
of a trace are those that the module computed, rounded as it rounds; the derivatives of each primitive are then taken at these
values in the widest type that occurs among them, and in no less than float32. A change of type is the identity, as it is for
autograd, so nothing of the chain rule depends on where the module casts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest floating-point type, at least float32, that holds all of these types.

    >>> widest([torch.bfloat16]), widest([torch.float8_e5m2, torch.float64])
    (torch.float32, torch.float64)
    """
    return reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.itemsize > 1), torch.float32)  # eight bits: none


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a floating-point type, where it has a narrower one.

    >>> [widened(torch.ones(1, dtype=kind), torch.float32).dtype for kind in (torch.bfloat16, torch.float64, torch.int8)]
    [torch.float32, torch.float64, torch.int8]
    """
    return x.to(dtype) if x.is_floating_point() and x.itemsize < dtype.itemsize else x


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
