"""Numbers that a module takes out of its tensors: the tracer must see each, since a number has no derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ARRAYS: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__))
_UNSEEN = _ARRAYS | {Tensor.tolist, torch.tensor, torch.as_tensor}


class ShowReading(TorchFunctionMode):
    """Leaves an ``aten.item`` in the graph wherever values are read in a way that by itself leaves nothing there.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def read(x):
    ...     with ShowReading():
    ...         return x * x.tolist()[0]
    >>> graph = make_fx(read, pre_dispatch=True, _error_on_data_dependent_ops=False)(torch.ones(2)).graph
    >>> any(node.target is torch.ops.aten.item.default for node in graph.nodes)
    True
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call through, after a mark where it is needed."""
        if func in _UNSEEN:
            for x in torch.utils._pytree.tree_leaves(args):
                if isinstance(x, Tensor):
                    x.sum().item()
            if func in _ARRAYS:
                args = (args[0].detach(), *args[1:])  # the mark is what refuses it, in words of its own
        return func(*args, **(kwargs or {}))
