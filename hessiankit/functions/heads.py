"""The origin of logits: hidden states and weight of a linear head, and the row of each entry.

A cross entropy of logits, of which some rows may have been moved, cut off or copied since, is that of these hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from hessiankit.functions.cross_entropy import linear_cross_entropy, reduced
from hessiankit.primitives import linear_cross_entropy as linear_head
from hessiankit.support.torch_state import OF_LOGITS

RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"))
MOVES = frozenset(("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "narrow", "select"))
COPIES = frozenset(("contiguous", "clone", "float", "double", "to", "type", "type_as"))
PRODUCTS = frozenset(("matmul", "__matmul__", "mm"))
INTERVENTIONS = frozenset(("register_hook", "retain_grad", "__setitem__"))
"""Calls that write into logits or ask for their gradient, beside those whose names end in an underscore."""
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, eq=False)
class Head:
    """A linear head at its inputs.

    Attributes:
        hidden: (N, d).
        weight: (C, d).
        bias: (C,) or None.
        versions: Number of writes into each of them before the logits were made.
        interventions: Names of calls that wrote into its logits or asked for their gradient.
        row_weights: Factors of the gradients with respect to each row of logits, (N,); None: 1. See :func:`weigh`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, ...] = ()
    interventions: list[str] = field(default_factory=list)
    row_weights: Tensor | None = None

    @property
    def is_current(self) -> bool:
        """Whether the loss may be computed from the head: the logits were neither written nor read since."""
        return not self.interventions and self.versions == _versions(self.hidden, self.weight, self.bias)


def weigh(x: Tensor, weights: Tensor) -> None:
    """Multiply gradients with respect to x by weights, of the shape of its first axes, wherever they are computed.

    Gradients are differentiable with respect to the weights. Where a cross entropy is computed past its logits, those of its
    tokens are weighted.
    """
    if has_torch_function((x,)):
        handle_torch_function(weigh, (x,), x, weights)
    elif x.requires_grad:
        factors = weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim))
        x.register_hook(lambda gradient: gradient * factors)  # that holds x would keep it alive


class Logits:
    """The logits of large heads that are alive: tensor -> its head, the row of hidden states of each entry, its version.

    Rows are integers in the shape of the logits, one number in memory along the axis of the classes.
    """

    def __init__(self) -> None:
        self.records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def watch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Note what a function of torch has returned, if it is logits or made of logits."""
        if not args or not isinstance(args[0], Tensor):
            return
        name = function.__name__
        if function is weigh:
            self._weigh(*args)
        elif name == "linear":
            self._add(value, *args, **kwargs)
        elif name in PRODUCTS and len(args) == 2 and isinstance(args[1], Tensor) and args[1].ndim == 2:
            self._add(value, args[0], args[1].mT)
        elif self.records and args[0] in self.records:
            if name in INTERVENTIONS or (name.endswith("_") and not name.startswith("__")) or function == _DATA:
                self.records[args[0]][0].interventions.append(name)
            elif isinstance(value, Tensor):
                self._follow(name, function, args, kwargs, value)

    def _add(self, logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if logits.numel() <= linear_head.LOGITS or not torch.is_grad_enabled():
            return
        if weight.ndim != 2 or len(weight) < 2 or type(logits) is not Tensor:  # a tensor that several devices share, say
            return
        x, W = hidden.reshape(-1, hidden.shape[-1]).to(logits.dtype), weight.to(logits.dtype)  # as autocast converts them
        self._record(logits, Head(x, W, None if bias is None else bias.to(logits.dtype)))

    def _record(self, logits: Tensor, head: Head) -> None:
        rows = torch.arange(len(head.hidden), device=logits.device).view(*logits.shape[:-1], 1).expand(logits.shape)
        head = replace(head, versions=_versions(head.hidden, head.weight, head.bias))
        self.records[logits] = head, rows, logits._version

    def _weigh(self, logits: Tensor, weights: Tensor) -> None:
        head, rows, version = self.records.pop(logits, (None, None, 0))
        if head is None or version != logits._version or rows.stride(-1) or weights.ndim >= logits.ndim:
            return  # the loss reads the logits, and is weighted there
        by_row = weights.reshape(*weights.shape, *(1,) * (logits.ndim - 1 - weights.ndim)).expand(logits.shape[:-1])
        head = replace(head, hidden=head.hidden[rows.select(-1, 0).reshape(-1)], row_weights=by_row.reshape(-1))
        self._record(logits, head)

    def _follow(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, value: Tensor) -> None:
        head, rows, version = self.records[args[0]]
        if version != args[0]._version:
            return
        operand = args[1] if len(args) == 2 and not kwargs else None
        if name in RESHAPES:
            try:
                rows = _compact(rows).view(value.shape)
            except (RuntimeError, ValueError):  # rows and classes share an axis, or the entries are of one class
                return
        elif name == "__getitem__":
            if not _is_basic(operand):
                return
            rows = rows[operand]
        elif name in MOVES:
            rows = function(rows, *args[1:], **kwargs)
        elif name in ("mul", "div") and isinstance(operand, (int, float)):
            factor = operand if name == "mul" else 1 / operand
            head = replace(head, hidden=head.hidden * factor, bias=None if head.bias is None else head.bias * factor)
        elif name == "add" and isinstance(operand, Tensor) and operand.ndim:
            if rows.stride(-1) or not operand.numel() == operand.shape[-1] == len(head.weight):
                return
            bias = operand.to(value.dtype).reshape(-1)
            head = replace(head, bias=bias if head.bias is None else head.bias + bias)
        elif name not in COPIES or not value.is_floating_point():
            return
        head = replace(head, versions=_versions(head.hidden, head.weight, head.bias))
        self.records[value] = head, rows, value._version

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
        head, rows, version = self.records.get(logits, (None, None, 0))
        if OF_LOGITS.get() or head is None or not head.is_current or version != logits._version:
            return NotImplemented
        if weight is not None or target.dtype != torch.int64:  # weighted classes, or probabilities
            return NotImplemented
        axis = min(1, logits.ndim - 1)
        if rows.shape[axis] != len(head.weight) or rows.stride(axis):
            return NotImplemented
        loss_dtype = torch.promote_types(head.hidden.dtype, torch.float32)
        if torch.promote_types(logits.dtype, loss_dtype) != loss_dtype:  # copied into a wider type
            return NotImplemented
        row = rows.select(axis, 0)
        hidden = head.hidden[row] if row.numel() < len(head.hidden) or not row.is_contiguous() else head.hidden
        hidden = hidden.reshape(*row.shape, -1)
        options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
        losses = linear_cross_entropy(hidden, head.weight, target, bias=head.bias, **options)
        if head.row_weights is not None:
            weigh(losses, head.row_weights[row])
        loss = reduced(losses, target, ignore_index, REDUCTIONS[reduction])
        return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if x is None else x._version for x in tensors)


def _compact(rows: Tensor) -> Tensor:
    """Return rows contiguous in memory, except along the axis of the classes."""
    axis = rows.stride().index(0)
    return rows.select(axis, 0).contiguous().unsqueeze(axis).expand_as(rows)


def _is_basic(index: Any) -> bool:
    """Tell whether an index makes a view: of numbers, slices and new axes."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or (isinstance(part, (int, slice)) and not isinstance(part, bool)) for part in parts)
