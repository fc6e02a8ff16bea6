"""Traits of a module, seen in one forward pass, at which references are known to fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessiankit.tracing.stopped import stop_of
from hessiankit.verify.problem import Problem


@dataclass
class Traits:
    """Result of ``traits``; a name is "" where there is no such operation."""

    precision: torch.dtype  # the lowest floating type that differentiated values pass through
    layer_norm_gain: bool = False  # a ``layer_norm`` with a gain was called on differentiated values
    lowered_by: str = ""  # the operation that first went below the type of the parameters
    padding: str = ""  # why torch's gradient is not that of the loss, where an embedding reads its padding token
    still: dict[int, int] = field(default_factory=dict, repr=False)  # the id of such an embedding's weight, and that token
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


def _padding_read(tokens: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **options: Any) -> int | None:
    """Return the padding token if an embedding reads it."""
    if padding_idx is None:
        return None
    token = padding_idx % len(weight)
    return token if bool((tokens == token).any()) else None


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
        seen.stopped_by = seen.stopped_by or stop_of(func, args, result)
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            name = getattr(func, "__name__", "")
            gain = kwargs.get("weight", args[2] if len(args) > 2 else None)
            if name == "embedding" and (token := _padding_read(*args, **kwargs)) is not None:
                seen.padding = PADDING
                seen.still[id(kwargs.get("weight", args[1] if len(args) > 1 else None))] = token
            seen.layer_norm_gain |= name == "layer_norm" and gain is not None
            if torch.finfo(result.dtype).eps > torch.finfo(seen.precision).eps:
                seen.precision, seen.lowered_by = result.dtype, name
        return result
