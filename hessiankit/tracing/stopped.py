"""Values that torch's gradient holds constant: results of detach, .data and torch.no_grad, and numbers read out of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

NO_GRAD = "torch.no_grad"
NUMBERS = ("item", "tolist", "__float__", "__complex__", "__format__")
WRITTEN = object()
"""Mark of a value that the call writes into."""
MAKERS = ("_like", "new_", "size", "numpy")
"""Parts of the names of functions that read a tensor's shape or type, and not its values."""


def stop_of(function: Any, args: Sequence[Any], result: Any) -> str:
    """Return the name of the operation that cuts a result off from a differentiated argument, or "".

    >>> x = torch.ones(2, requires_grad=True)
    >>> stop_of(Tensor.detach, (x,), x.detach()), stop_of(torch.exp, (x,), x.exp())
    ('detach', '')
    """
    name = getattr(function, "__name__", "")
    name = getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name
    is_value = isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad
    if not (is_value or (name in NUMBERS)) or any(word in name for word in MAKERS):
        return ""
    reads = args[:1] if torch.is_grad_enabled() else args  # of x.to(y), y only says which type
    if not any(isinstance(x, Tensor) and x.requires_grad for x in _pytree.tree_leaves(reads)) or _is_in_function():
        return ""
    return name if torch.is_grad_enabled() else NO_GRAD


def _is_in_function() -> bool:
    """Tell whether a custom function's forward runs, without gradients: its backward says what the derivative is."""
    codes = set(_codes_of(torch.autograd.Function))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _codes_of(kind: type) -> Iterator[CodeType]:
    """Yield the forward code of a custom function and its subclasses; from torch 2.14 on ``apply`` has no frame."""
    for name in ("forward", "setup_context"):
        if hasattr(method := getattr(kind, name), "__code__"):
            yield method.__code__
    derived: type
    for derived in kind.__subclasses__():
        yield from _codes_of(derived)


def _version(x: Any) -> int:
    """Return how often a tensor has been written into; 0 for numbers and tensors of inference mode, which do not count it."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


class StoppedValues(TorchFunctionMode):
    """The values that torch holds constant in a call, so that the call at other parameters has the same ones.

    A difference of two losses, or of two gradients, moves what ``detach`` returns; torch's derivative does not. Within the first
    ``with`` block the values are recorded, in the order of the call; later blocks return them in place of new ones. Values that
    belong to a transform of ``torch.func`` end with it, and are computed anew; so are those that the call writes into, since
    they may share the memory of a differentiated value.

    >>> w, held = torch.ones(1, requires_grad=True), StoppedValues()
    >>> def value():
    ...     with held:
    ...         return w * w.detach()
    >>> first = float(value().detach())
    >>> w.data.fill_(3.0)
    tensor([3.])
    >>> first, float(value().detach())  # 1 * 1, 3 * 1
    (1.0, 3.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: list[tuple[str, Any]] = []
        self._recorded: list[tuple[Any, int]] = []  # results with their versions, while they are recorded
        self._later: Iterator[tuple[str, Any]] | None = None
        self._is_recorded = False

    def __enter__(self) -> StoppedValues:
        """Record, or start again with the first of the recorded values."""
        self._later = iter(self._values) if self._is_recorded else None
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Keep what was recorded."""
        super().__exit__(kind, error, trace)
        if not self._is_recorded:
            for k, (result, version) in enumerate(self._recorded):
                if _version(result) != version:
                    self._values[k] = (self._values[k][0], WRITTEN)
            self._recorded.clear()
        self._is_recorded = True

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function; where its result is held constant, record it or return the recorded one."""
        result = func(*args, **(kwargs or {}))
        stop = stop_of(func, args, result)
        is_inner = isinstance(result, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(result)
        if not stop or is_inner:
            return result
        if self._later is None:
            self._values.append((stop, result.detach().clone() if isinstance(result, Tensor) else result))
            self._recorded.append((result, _version(result)))
            return result
        name, value = next(self._later, ("", None))
        if name == stop and value is WRITTEN:
            return result
        shapes = [x.shape if isinstance(x, Tensor) else None for x in (value, result)]
        if name != stop or shapes[0] != shapes[1]:
            raise RuntimeError(f"the call holds {stop!r} constant where it held {name!r} before: it takes another course")
        if not isinstance(value, Tensor):
            return value
        return result.copy_(value) if args and result is args[0] else value.clone()


def held_values(call: Callable[[AbstractContextManager[Any]], Any]) -> AbstractContextManager[Any]:
    """Return a context for later calls that holds the values that the first call recorded.

    Nothing is held where the call does not run under a mode of torch, as ``torch.cond`` does not.
    """
    values = StoppedValues()
    try:
        call(values)
    except Exception:  # the same call has run without the mode
        return nullcontext()
    return values
