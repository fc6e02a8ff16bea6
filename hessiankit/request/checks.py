"""Checks of modules and tensors that need no call. A message says what was asked, seen and expected, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.non_finite import are_finite, spoiled_at
from hessiankit.support.containers import check_values
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import is_narrow, strided_parts

IGNORE_INDEX = -100
"""Label that torch's cross entropy leaves out."""


def check_layers(module: nn.Module) -> None:
    """Refuse modules that cannot be traced as they are, or whose loss is random.

    Raises:
        InputError: A scripted or quantised module; dropout in training mode.
    """
    for name, layer in module.named_modules():
        part = f"{name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise InputError(f"request: {part} is a TorchScript module, which cannot be traced; pass the Python module behind it")
        if type(layer).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(
                f"request: {part} is a {type(layer).__name__} with quantised weights, of which the loss is not a smooth "
                "function; pass the module from before quantisation"
            )
        drops = ""
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            drops = f"is a dropout layer (p={layer.p})"
        elif isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
            drops = f"has a dropout layer for its attention weights (dropout={layer.dropout}) and is"
        if drops and layer.training:
            raise InputError(f"request: call model.eval() first: {part} {drops} in training mode, so the loss is random")


def check_tensors(module: nn.Module, parameters: Mapping[str, Tensor], *, one_dtype: bool = False) -> None:
    """Check the tensors of a module with respect to some parameters of which derivatives are asked for.

    Raises:
        InputError: The parameters are not real numbers, or on several devices, or of several dtypes where ``one_dtype`` allows
            one alone; or something of the module holds no values, is not dense, or is not finite.
    """
    for trait in ("dtype", "device") if one_dtype else ("device",):
        first: dict[Any, str] = {}
        for name, p in parameters.items():
            first.setdefault(getattr(p, trait), name)
        if len(first) > 1:
            verb = "on" if trait == "device" else "is"
            listing = ", ".join(f"{name!r} {verb} {kind}" for kind, name in first.items())
            raise InputError(f"request: the parameters have several {trait}s: {listing}. Bring them to one, e.g. module.to(...)")
    buffers = dict(module.named_buffers())  # which may hold the -inf of a mask
    tensors = [*module.named_parameters(), *buffers.items()]
    meta = next((name for name, x in tensors if x.is_meta), None)
    if meta is not None:
        raise InputError(f"request: {meta!r} is on the meta device, which holds no values; load the weights first")
    odd = next((p.dtype for p in parameters.values() if is_narrow(p) or not p.is_floating_point()), None)
    if odd is not None:
        advice = (
            "real ones, such as the real and imaginary parts, which forward puts together by torch.complex"
            if odd.is_complex
            else "a type that derivatives are computed in: float16 or wider"
        )
        raise InputError(f"request: the parameters are {odd}; expected {advice}")
    for name, x in tensors:
        check_values("request", name, x, constant=name in buffers, wrapper=name not in parameters)
    reals = [(name, part) for name, x in tensors for part in strided_parts(x) if part.is_floating_point()]
    for (name, x), finite in zip(reals, are_finite([x for _, x in reals]), strict=True):
        if not finite and spoiled_at(x, mask=name in buffers) is not None:
            raise InputError(
                f"request: {name!r} contains NaN or infinity; a Hessian at such a point is not defined. Re-initialise it."
            )


def check_tensor(
    name: str,
    x: Tensor,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    mask: bool = False,
    reference: str = "the parameters are",
) -> None:
    """Check a tensor that enters the computation; a ``dtype`` of None allows any, ``reference`` names its owner.

    Raises:
        InputError: It is empty, elsewhere, of another dtype, or not finite.
    """
    if x.numel() == 0:
        raise InputError(f"request: {name} has shape {tuple(x.shape)}, with no entries; pass at least one sample and one token")
    check_place(name, x, device, constant=True)
    if x.is_complex():
        raise InputError(f"request: {name} is {x.dtype}; the Hessian is of a real function, pass {dtype or 'a real one'}")
    if not x.is_floating_point():
        return
    if dtype is not None and x.dtype != dtype:
        raise InputError(f"request: {name} is {x.dtype}, {reference} {dtype}; convert one of them, e.g. {name}.to({dtype})")
    where = spoiled_at(strided_parts(x)[-1], mask=mask)
    if where is not None:
        raise InputError(f"request: {name} contains NaN or infinity, first at index {where}; clean the data first")


def check_place(name: str, x: Tensor, device: torch.device, *, constant: bool = False) -> None:
    """Raise InputError for a tensor on another device than the parameters, or of a layout that :func:`check_values` refuses."""
    if x.device != device:
        raise InputError(f"request: {name} is on {x.device}, the parameters are on {device}; move one of them")
    check_values("request", name, x, constant=constant)


def check_same_shape(target: Tensor, shape: Sequence[int], loss_name: str = "squared error") -> None:
    """Raise InputError unless a target has the shape of the output that it is compared with."""
    if target.shape != tuple(shape):
        raise InputError(
            f"request: target has shape {tuple(target.shape)}, the module's output has {tuple(shape)}; "
            f"{loss_name} needs equal shapes (nothing is broadcast)"
        )


def check_labels(target: Tensor, shape: Sequence[int]) -> None:
    """Raise InputError unless a target holds one integer label for each row of logits of this shape."""
    if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
        raise InputError(f"request: target is {target.dtype}; cross entropy needs integer class labels")
    if target.shape != shape[:-1]:
        raise InputError(
            f"request: target has shape {tuple(target.shape)}, expected {tuple(shape[:-1])}: one label for each row of the "
            f"logits {tuple(shape)}, whose last axis holds the classes"
        )
    labels = target[target != IGNORE_INDEX]
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < shape[-1]):
        raise InputError(
            f"request: labels lie in [{int(labels.min())}, {int(labels.max())}], expected 0 to {shape[-1] - 1} for "
            f"{shape[-1]} classes (or {IGNORE_INDEX} to ignore a position)"
        )
