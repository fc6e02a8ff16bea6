"""The operation that first returns NaN or infinity in a forward pass, and the usual reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hessiankit.tracing.source_line import source_line

MASKED = "a softmax meets a row of -inf only: every key of that query is masked, so leave each query at least one key"
NORM = "a norm meets a constant row with eps = 0: use eps > 0, or rows that are not constant"
OTHER = (
    "keep its inputs away from where it is not defined (a division by 0, a norm of a constant row), or use a wider dtype if a "
    "value overflows"
)


class _Found(BaseException):
    """Ends the forward pass at the operation in question."""


class _Watch(TorchDispatchMode):
    def __init__(self, spoiled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.spoiled = spoiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and stop where its result is spoiled and none of its inputs is."""
        result = func(*args, **(kwargs or {}))
        if self._any_spoiled(result) and not self._any_spoiled((args, kwargs)):
            raise _Found(_reason(func, args))
        return result

    def _any_spoiled(self, tree: Any) -> bool:
        tensors = (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())
        return any(bool(self.spoiled(x).any()) for x in tensors)


def first_spoiled(run: Callable[[], Any]) -> str:
    """Return a phrase that names the first operation of a run to return NaN or infinity, and what to do; "" if there is none.

    An entry of -inf counts only where there is no other: it masks.

    >>> first_spoiled(lambda: torch.zeros(2) / 0).rpartition("aten")[2][:38]
    '.div.Tensor is the first to return NaN'
    """
    for spoiled in (lambda x: x.isnan() | (x == torch.inf), lambda x: ~x.isfinite()):
        try:
            with torch.no_grad(), _Watch(spoiled):
                run()
        except _Found as found:
            line = source_line(found)
            return f"{f'at {line}: ' if line else ''}{found}"
    return ""


def _reason(func: Any, args: Any) -> str:
    name = str(func)
    first = next((x for x in args if isinstance(x, Tensor)), None)
    if "softmax" in name and first is not None and bool((first == -torch.inf).all(-1).any()):
        return MASKED
    if "norm" in name and "weight_norm" not in name:
        return NORM
    return f"{name} is the first to return NaN or infinity; {OTHER}"
