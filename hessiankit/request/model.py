"""The module that is asked about, checked once, with the parameters of interest at a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hessiankit.request.batch_loss import ModulePoint
from hessiankit.request.checks import check_layers, check_tensors
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState


def read_point(module: nn.Module, params: Params, loss: Callable[..., Any], state: Callable[..., ModuleState]) -> ModulePoint:
    """Check a module, and return it with the parameters that are meant.

    Args:
        module: The user's module.
        params: Argument of :func:`hessiankit.hessian`.
        loss: Function that is called too and may hold something that a call changes.
        state: Function that records the state of the module and of the loss.

    Raises:
        InputError: The module is sharded, scripted, quantised, random, without values, or not finite; or ``params`` is not of it.
    """
    check_layers(module)
    names = select("request", module, params)
    check_tensors(module, names)
    recorded = state(module, loss)
    return ModulePoint(module, {name: recorded.values[name] for name in names}, recorded)
