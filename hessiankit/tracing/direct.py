"""Functions of torch that run one operation with their arguments as they are.

Such a call can be noted where Python makes it. On its way through the dispatcher it would come back to Python to be noted,
which takes longer than most operations of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_BINARY = {"matmul": aten.matmul.default} | {name: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}
_UNARY = {name: getattr(aten, name).default for name in ("exp", "relu", "sigmoid", "sin", "tanh")}

DIRECT: dict[tuple[Callable[..., Any], int], Any] = {
    (torch._C._nn.linear, 2): aten.linear.default,
    (torch._C._nn.linear, 3): aten.linear.default,
    **{(getattr(where, name), 2): operation for where in (torch, Tensor) for name, operation in _BINARY.items()},
    **{(getattr(where, name), 1): operation for where in (torch, Tensor) for name, operation in _UNARY.items()},
    **{(where.transpose, 3): aten.transpose.int for where in (torch, Tensor)},
}
"""A function, and how many arguments it is given by position -> its operation."""


def operation_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the operation that a call with these arguments, and none by keyword, is; None where that is not known.

    >>> operation_of(torch.add, (torch.ones(2), 1.0)), operation_of(torch.add, (torch.ones(2), 2, torch.ones(2)))
    (<OpOverload(op='aten.add', overload='Tensor')>, None)
    """
    operation = DIRECT.get((function, len(args)))
    if operation is None or not isinstance(args[0], Tensor):
        return None
    plain = all(x is None or isinstance(x, (Tensor, int, float)) for x in args[1:])
    return operation if plain else None
