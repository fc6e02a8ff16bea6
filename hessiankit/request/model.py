"""The module of a request, checked once, with the selected parameters at a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hessiankit.request.batch_loss import ModulePoint
from hessiankit.request.checks import check_layers, check_tensors
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState


def read_point(module: nn.Module, params: Params, loss: Callable[..., Any], state: Callable[..., ModuleState]) -> ModulePoint:
    """Check a module, and return it with the selected parameters.

    Args:
        module: The user's module.
        params: Argument of :func:`hessiankit.hessian`.
        loss: Loss function, whose state a call may change.
        state: Function that records the state of the module and of the loss.

    Raises:
        InputError: The module is sharded, scripted, quantised, random, without values, or not finite; or ``params`` is not of it.
    """
    check_layers(module)
    names = select("request", module, params)
    check_tensors(module, names)
    recorded = state(module, loss)
    return ModulePoint(module, {name: recorded.values[name] for name in names}, recorded)
