"""Origin of NaN and infinity: the first entry of a tensor, the first operation of a run, the first submodule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hessiankit.support.torch_state import is_narrow, read_numbers
from hessiankit.tracing.graph import tensors_in
from hessiankit.tracing.source_line import at_line


def spoiled_at(x: Tensor, *, mask: bool) -> tuple[int, ...] | None:
    """Return where the first entry is that is NaN or infinite; -inf is allowed in a tensor that may be an additive mask."""
    if are_finite([x])[0]:
        return None
    x = _readable(x)
    good = torch.isfinite(x) | (x == -float("inf")) if mask else torch.isfinite(x)
    return None if bool(good.all()) else tuple(int(i) for i in (~good).nonzero()[0])


def _readable(x: Tensor) -> Tensor:
    """Return floating-point numbers of eight bits, which torch has few operations for, in single precision."""
    return x.float() if is_narrow(x) else x


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Tell of each tensor whether no entry is NaN or infinite: a finite sum proves it, and is the quickest test."""
    reals = map(_readable, tensors)  # one at a time, as some are copies
    sums = read_numbers(x.sum() if x.is_floating_point() else torch.isfinite(x).logical_not().sum() for x in reals)
    return [
        math.isfinite(total) or bool(torch.isfinite(_readable(x)).all()) if x.is_floating_point() else total == 0
        for x, total in zip(tensors, sums, strict=True)
    ]


MASK_HINT = "a softmax meets a row of -inf only: every key of that query is masked, so leave each query at least one key"
NORM_HINT = "a norm meets a constant row with eps = 0: use eps > 0, or rows that are not constant"
GENERAL_HINT = (
    "keep its inputs away from where it is not defined (a division by 0, a norm of a constant row), or use a wider dtype if a "
    "value overflows"
)


class _NonFiniteResult(BaseException):
    """Ends the forward pass at the operation in question."""


class _NonFiniteWatch(TorchDispatchMode):
    def __init__(self, spoiled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.spoiled = spoiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and stop at the first non-finite result of finite inputs."""
        result = func(*args, **(kwargs or {}))
        if self._any_spoiled(result) and not self._any_spoiled((args, kwargs)):
            raise _NonFiniteResult(_reason(func, args))
        return result

    def _any_spoiled(self, tree: Any) -> bool:
        return any(bool(self.spoiled(_readable(x)).any()) for x in tensors_in(tree) if x.is_floating_point())


def first_spoiled(run: Callable[[], Any]) -> str:
    """Return a phrase that names the first operation of a run to return NaN or infinity, and what to do; "" if there is none.

    An entry of -inf counts only where there is no other: it masks.

    >>> first_spoiled(lambda: torch.zeros(2) / 0).rpartition("aten")[2][:38]
    '.div.Tensor is the first to return NaN'
    """
    for spoiled in (lambda x: x.isnan() | (x == torch.inf), lambda x: ~x.isfinite()):
        try:
            with torch.no_grad(), _NonFiniteWatch(spoiled):
                run()
        except _NonFiniteResult as stop:
            return f"{at_line(stop, 'at {}: ')}{stop}"
    return ""


def _reason(func: Any, args: Any) -> str:
    name = str(func)
    first = next((x for x in args if isinstance(x, Tensor)), None)
    if "softmax" in name and first is not None and bool((first == -torch.inf).all(-1).any()):
        return MASK_HINT
    if "norm" in name and "weight_norm" not in name:
        return NORM_HINT
    return f"{name} is the first to return NaN or infinity; {GENERAL_HINT}"


def first_spoiled_module(module: nn.Module, run: Callable[[], Any]) -> str:
    """Return the name of the first submodule of a run to return NaN or infinity, with the row; "" if none does."""
    bad: list[str] = []

    def look(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not bad and isinstance(output, Tensor) and output.is_floating_point():
            where = spoiled_at(output, mask=True)
            if where is not None:
                bad.append(f"{name or 'the module'!r} (row {where[:-1]})")

    with ExitStack() as hooks:
        for name, m in module.named_modules():
            hooks.callback(m.register_forward_hook(partial(look, name)).remove)
        run()
    return "".join(bad)
