"""Autocast within a module: which type torch brings the arguments of an operation to, found by what the operation returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessiankit.errors import TraceError
from hessiankit.torch_state import without_autocast


def dtype_of_autocast(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the type that autocast brings the arguments of an operation to; None where it leaves them as they are.

    Torch does not tell. The operation is run as it is, and without autocast on arguments of each type that autocast knows: what
    returns the same bits is what autocast does.

    Raises:
        TraceError: None of them does.

    >>> x = torch.randn(2, 2)
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     dtype_of_autocast(torch.mm, (x, x), {}), dtype_of_autocast(torch.relu, (x,), {})
    (torch.bfloat16, None)
    """
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    device = tensors[0].device.type if tensors else "cpu"
    if not tensors or not torch.is_autocast_enabled(device) or getattr(getattr(function, "_schema", None), "is_mutable", False):
        return None
    with torch.no_grad(), torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch():
        found = _tensors(function(*args, **kwargs))
        with without_autocast():
            for dtype in (None, torch.get_autocast_dtype(device), torch.float32):
                if dtype is not None and all(x.dtype == dtype for x in tensors):
                    continue
                try:
                    alone = _tensors(function(*cast_to(dtype, args), **cast_to(dtype, kwargs)))
                except RuntimeError:  # types that do not go together without autocast
                    continue
                if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, alone, strict=True)):
                    return dtype
    name = getattr(function, "__name__", str(function))
    raise TraceError(
        f"trace: autocast changes what {name} returns in a way that cannot be traced; leave torch.autocast out, and convert the "
        "module, e.g. module.bfloat16()"
    )


def cast_to(dtype: torch.dtype | None, tree: Any) -> Any:
    """Return nested arguments, their floating-point tensors in a type but for those in float64, which autocast leaves alone."""
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return torch.utils._pytree.tree_map(cast, tree)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]
