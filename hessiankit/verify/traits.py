"""Traits of a module, seen in one forward pass, at which references are known to fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessiankit.verify.problem import Problem


@dataclass
class Traits:
    """Result of ``traits``; a name is "" where there is no such operation."""

    precision: torch.dtype  # the lowest floating type that differentiated values pass through
    layer_norm_gain: bool = False  # a ``layer_norm`` with a gain was called on differentiated values
    lowered_by: str = ""  # the operation that first went below the type of the parameters
    padding: str = ""  # why torch's gradient is not that of the loss, where an embedding reads its padding token
    stopped_by: str = ""  # the first operation that cut a differentiated value off (``detach``, ``.data``, ``no_grad``)


def traits(problem: Problem) -> Traits:
    """Run the loss once and record the traits of its operations.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).double()
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> traits(Problem(module, x, x))
    Traits(precision=torch.float64, layer_norm_gain=True, lowered_by='', padding='', stopped_by='')
    """
    watch = _TraitWatch(problem.dtype)
    with problem.at(), watch:
        problem.call()
    return watch.seen


PADDING = (
    "an embedding reads its padding_idx: torch leaves that row out of the gradient, which is that of the loss only if the token "
    "is masked everywhere else; where it is not, no two routes agree: mask it, or build the embedding with padding_idx=None"
)

STOPPED = (
    "{} stops a gradient: torch holds that value constant, and H is the derivative of torch's gradient with it held; central "
    "differences of the gradient move it too, so where it enters the loss they differ and are no reference here"
)
NO_GRAD = "torch.no_grad"
_MAKERS = ("_like", "new_", "size", "item", "tolist", "numpy")


def _reads_padding(tokens: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **options: Any) -> bool:
    return padding_idx is not None and bool((tokens == padding_idx % len(weight)).any())


def known_defect(group: str, seen: Traits) -> str:
    """Return the known defect of a group of references that a module with these traits triggers, or ""."""
    if group == "jacfwd(jacrev)" and seen.layer_norm_gain:
        return "known torch defect: the derivative through layer_norm with a gain loses a term (pytorch issues 196700, 198017)"
    return ""


class _TraitWatch(TorchFunctionMode):
    """Record layer norms with a gain, casts to a lower precision, and stopped gradients among the differentiated values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = Traits(dtype)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function and inspect its result."""
        kwargs, seen = kwargs or {}, self.seen
        result = func(*args, **kwargs)
        if not seen.stopped_by and isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad:
            self._note_stop(func, args)
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            name = getattr(func, "__name__", "")
            gain = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if name == "embedding" and _reads_padding(*args, **kwargs):
                seen.padding = PADDING
            seen.layer_norm_gain |= name == "layer_norm" and gain is not None
            if torch.finfo(result.dtype).eps > torch.finfo(seen.precision).eps:
                seen.precision, seen.lowered_by = result.dtype, name
        return result

    def _note_stop(self, func: Any, args: Sequence[Any]) -> None:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        reads = args[:1] if torch.is_grad_enabled() else args  # of x.to(y), y only says which type
        moving = any(isinstance(x, Tensor) and x.requires_grad for x in reads)
        if moving and not any(word in name for word in _MAKERS):
            self.seen.stopped_by = name if torch.is_grad_enabled() else NO_GRAD
