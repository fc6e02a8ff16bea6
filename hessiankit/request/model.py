"""The module of a request, checked once, with the selected parameters at a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hessiankit.request.batch_loss import ModulePoint
from hessiankit.request.checks import check_layers, check_tensors
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState


def read_point(module: nn.Module, params: Params, loss: Callable[..., Any], *, share: bool) -> ModulePoint:
    """Check a module, and return it with the selected parameters.

    Args:
        module: The user's module.
        params: Argument of :func:`hessiankit.hessian`.
        loss: Loss function, whose state a call may change.
        share: Hold the module's parameters themselves, in place of copies.

    Raises:
        InputError: The module is sharded, scripted, quantised, random, without values, or not finite; or ``params`` is not of it.
    """
    check_layers(module)
    names = select("request", module, params)
    check_tensors(module, names)
    state = ModuleState(module, loss, share=share)
    return ModulePoint(module, {name: state.values[name] for name in names}, state)
