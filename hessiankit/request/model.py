"""The module that is asked about, checked once, with the parameters of interest at a point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.batch_loss import ModulePoint
from hessiankit.request.non_finite import are_finite, spoiled_at
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState
from hessiankit.support.containers import check_values
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import strided_parts


def read_point(module: nn.Module, params: Params, loss: Callable[..., Any], *, share: bool) -> ModulePoint:
    """Check a module, and return it with the parameters that are meant.

    Args:
        module: The user's module.
        params: As in :func:`hessiankit.hessian`.
        loss: What else is called and may hold something that a call changes.
        share: Hold the module's parameters themselves, in place of copies.

    Raises:
        InputError: The module is sharded, scripted, quantised, random, without values, or not finite; or ``params`` is not of it.
    """
    check_layers(module)
    names = select("request", module, params)
    check_tensors(module, names)
    state = ModuleState(module, loss, share=share)
    return ModulePoint(module, {name: state.values[name] for name in names}, state)


def check_layers(module: nn.Module) -> None:
    """Refuse modules that cannot be traced as they are, or whose loss is random.

    Raises:
        InputError: A scripted or quantised module; dropout in training mode.
    """
    for name, layer in module.named_modules():
        what = f"{name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise InputError(f"request: {what} is a TorchScript module, which cannot be traced; pass the Python module behind it")
        if type(layer).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(
                f"request: {what} is a {type(layer).__name__} with quantised weights, of which the loss is not a smooth "
                "function; pass the module from before quantisation"
            )
        drops = ""
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            drops = f"is a dropout layer (p={layer.p})"
        elif isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
            drops = f"has a dropout layer for its attention weights (dropout={layer.dropout}) and is"
        if drops and layer.training:
            raise InputError(f"request: {what} {drops} in training mode, so the loss is random; call module.eval() first")


def check_tensors(module: nn.Module, parameters: Mapping[str, Tensor], *, one_dtype: bool = False) -> None:
    """Check the tensors of a module with respect to some parameters of which derivatives are asked for.

    Raises:
        InputError: The parameters are not real numbers, or on several devices, or of several dtypes where ``one_dtype`` allows
            one alone; or something of the module holds no values, is not dense, or is not finite.
    """
    for what in ("dtype", "device") if one_dtype else ("device",):
        first: dict[Any, str] = {}
        for name, p in parameters.items():
            first.setdefault(getattr(p, what), name)
        if len(first) > 1:
            verb = "on" if what == "device" else "is"
            listing = ", ".join(f"{name!r} {verb} {kind}" for kind, name in first.items())
            raise InputError(f"request: the parameters have several {what}s: {listing}. Bring them to one, e.g. module.to(...)")
    buffers = dict(module.named_buffers())  # which may hold the -inf of a mask
    everything = [*module.named_parameters(), *buffers.items()]
    meta = next((name for name, x in everything if x.is_meta), None)
    if meta is not None:
        raise InputError(f"request: {meta!r} is on the meta device, which holds no values; load the weights first")
    odd = next((p.dtype for p in parameters.values() if not p.dtype.is_floating_point), None)
    if odd is not None:
        raise InputError(
            f"request: the parameters are {odd}; expected real ones, such as the real and imaginary parts, which forward puts "
            "together by torch.complex"
        )
    for name, x in everything:
        check_values("request", name, x, constant=name in buffers)
    reals = [(name, strided_parts(x)[-1]) for name, x in everything if x.is_floating_point()]
    for (name, x), finite in zip(reals, are_finite([x for _, x in reals]), strict=True):
        if not finite and spoiled_at(x, mask=name in buffers) is not None:
            raise InputError(
                f"request: {name!r} contains NaN or infinity; a Hessian at such a point is not defined. Re-initialise it."
            )
