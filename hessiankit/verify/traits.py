"""Traits of a module, seen in one forward pass, at which references are known to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    defective: frozenset[str] = frozenset()  # operations of :data:`DEFECTS` on differentiated values
    lowered_by: str = ""  # the operation that first went below the type of the parameters
    padding: str = ""  # why torch's gradient is not that of the loss, where an embedding reads its padding token
    padding_tokens: dict[int, int] = field(default_factory=dict, repr=False)  # id of such an embedding's weight -> that token
    stopped_by: str = ""  # the first operation that cut a differentiated value off (``detach``, ``.data``, ``no_grad``)


def traits(problem: Problem) -> Traits:
    """Run the loss once and record the traits of its operations.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).double()
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> traits(Problem(module, x, x))
    Traits(precision=torch.float64, defective=frozenset({'layer_norm'}), lowered_by='', padding='', stopped_by='')
    """
    watch = _TraitWatch(problem.dtype)
    with problem.at(), watch:
        problem.call()
    return watch.record


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


_FORWARD = frozenset({"forward-over-reverse", "jacfwd(jacrev)"})
_NORM = (frozenset({"jacfwd(jacrev)"}), "the derivative through {} with a gain loses a term (functorch issue 534)")
DEFECTS: Mapping[str, tuple[frozenset[str], str]] = {
    "layer_norm": _NORM,
    "batch_norm": _NORM,
    "instance_norm": _NORM,
    "scatter_reduce": (_FORWARD, "forward mode of {} with products is wrong (pytorch issue 196702)"),
    "cholesky_inverse": (_FORWARD, "forward mode of {} is wrong (pytorch issue 196682)"),
    "triangular_solve": (_FORWARD, "forward mode of the gradient of {} is wrong"),
}
"""Function of torch -> groups of references that are wrong through it, and how (docs/concepts/wrong_second_derivatives.md)."""


def known_defect(group: str, module_traits: Traits) -> str:
    """Return the known defects of a group of references that a module with these traits may trigger, or ""."""
    defects = [DEFECTS[name][1].format(name) for name in sorted(module_traits.defective) if group in DEFECTS[name][0]]
    return f"known torch defect: {'; '.join(defects)}" if defects else ""


class _TraitWatch(TorchFunctionMode):
    """Record operations with known defects, casts to a lower precision, and stopped gradients among the differentiated values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.record = Traits(dtype)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function and inspect its result."""
        kwargs, record = kwargs or {}, self.record
        result = func(*args, **kwargs)
        record.stopped_by = record.stopped_by or stop_of(func, args, result)
        name = getattr(func, "__name__", "")
        if name in DEFECTS and any(y.requires_grad for y in (result if isinstance(result, tuple) else (result,))):
            record.defective |= {name}
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            if name == "embedding" and (token := _padding_read(*args, **kwargs)) is not None:
                record.padding = PADDING
                record.padding_tokens[id(kwargs.get("weight", args[1] if len(args) > 1 else None))] = token
            if torch.finfo(result.dtype).eps > torch.finfo(record.precision).eps:
                record.precision, record.lowered_by = result.dtype, name
        return result
