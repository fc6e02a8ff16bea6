"""The table of rules, filled by the modules next to this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.primitives.primitive import Primitive

Match: TypeAlias = "tuple[Primitive, tuple[Tensor | None, ...]] | None"
Rule: TypeAlias = Callable[..., Match]

aten = torch.ops.aten
RULES: dict[Any, Rule] = {}


def are_real(*values: Any) -> bool:
    """Tell whether all are floating-point tensors, of one type or several."""
    return all(isinstance(x, Tensor) and x.is_floating_point() for x in values)


def axes_of(x: Tensor, dims: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return the axes that an operation of torch means: all of them for None or (), none of a tensor without axes.

    >>> axes_of(torch.zeros(2, 3), -1), axes_of(torch.zeros(2, 3), ()), axes_of(torch.zeros(()), 0)
    ((1,), (0, 1), ())
    """
    positions = [dims] if isinstance(dims, int) else list(dims or ())
    return tuple(i % x.ndim for i in positions if x.ndim) if positions else tuple(range(x.ndim))


def positions(x: Tensor) -> Tensor:
    """Return the position of each entry of a tensor, in its shape: operations that rearrange entries are applied to these."""
    return torch.arange(x.numel(), device=x.device).reshape(x.shape)


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register a rule for some operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operations, function))
        return function

    return register
