"""What logits were made of: the hidden states and the weight of a linear head, and the row of each entry.

A cross entropy of logits, of which some rows may have been moved, cut off or copied since, is that of these hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hessiankit.functions.cross_entropy import linear_cross_entropy
from hessiankit.primitives import linear_cross_entropy as head_primitive

RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as".split())
MOVES = frozenset("__getitem__ transpose permute movedim moveaxis swapaxes swapdims narrow select".split())
COPIES = frozenset("contiguous clone float double to type type_as".split())
REACHES = frozenset(("register_hook", "retain_grad", "__setitem__"))
"""Calls by which the gradient of logits, or their entries, are reached otherwise than by what is made of them."""
REDUCTIONS = ("none", "mean", "sum")


@dataclass
class Head:
    """A linear head at its inputs.

    Attributes:
        hidden: (N, d).
        weight: (C, d).
        bias: (C,) or None.
        version: Number of writes into each of the tensors and the logits, when they were made.
        is_reached: Whether somebody has written into the logits or asked for their gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    version: tuple[int, ...] = ()
    is_reached: bool = False


class Logits:
    """Logits of heads that are alive, by tensor: their head, and the row of its hidden states for each entry.

    Rows are integers in the shape of the logits; along the axis of the classes they are one number in memory.
    """

    def __init__(self) -> None:
        self.known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def made(self, logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Note the result of a product with the weight of a head, (C, d), if it is large."""
        if logits.numel() <= head_primitive.LOGITS or weight.ndim != 2 or len(weight) < 2 or not torch.is_grad_enabled():
            return
        narrow = [None if x is None else x.to(logits.dtype) for x in (hidden.reshape(-1, hidden.shape[-1]), weight, bias)]
        rows = torch.arange(len(narrow[0]), device=logits.device).view(*logits.shape[:-1], 1).expand(logits.shape)
        self.known[logits] = Head(*narrow), rows, logits._version

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Note what a function has made of logits."""
        if not args or not isinstance(args[0], Tensor) or args[0] not in self.known:
            return
        name = function.__name__
        head, rows, _ = self.known[args[0]]
        if name in REACHES or (name.endswith("_") and not name.startswith("__")) or function == Tensor.data.__get__:
            head.is_reached = True
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if name in RESHAPES:
            try:
                rows = _compact(rows).view(value.shape)
            except RuntimeError:  # rows and classes would share an axis
                return
        elif name in MOVES and name != "__getitem__":
            rows = function(rows, *args[1:], **kwargs)
        elif name == "__getitem__" and _is_basic(args[1]):
            rows = rows[args[1]]
        elif name not in COPIES:
            return
        self.known[value] = head, rows, value._version

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        """Return the cross entropy of logits by their head; NotImplemented where there is none, or no closed form."""
        head, rows, version = self.known.get(logits, (None, None, 0))
        if head is None or head.is_reached or weight is not None or target.dtype != torch.int64 or version != logits._version:
            return NotImplemented
        axis = min(1, logits.ndim - 1)
        if rows.shape[axis] != len(head.weight) or rows.stride(axis):
            return NotImplemented
        computed = torch.promote_types(head.hidden.dtype, torch.float32)
        if torch.promote_types(logits.dtype, computed) != computed:  # copied into a wider type
            return NotImplemented
        row = rows.select(axis, 0)
        hidden = head.hidden[row] if row.numel() < len(head.hidden) or not row.is_contiguous() else head.hidden
        hidden = hidden.reshape(*row.shape, -1)
        options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": REDUCTIONS[reduction]}
        loss = linear_cross_entropy(hidden, head.weight, target, bias=head.bias, **options)
        return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def _compact(rows: Tensor) -> Tensor:
    """Return rows that lie one behind another in memory, but for the axis of the classes."""
    axis = rows.stride().index(0)
    return rows.select(axis, 0).contiguous().unsqueeze(axis).expand_as(rows)


def _is_basic(index: Any) -> bool:
    """Tell whether an index makes a view: of numbers, slices and new axes."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
