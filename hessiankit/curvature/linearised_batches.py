"""Batches of a request, linearised for an operator, and checks of the options of :func:`hessiankit.hessian_operator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hessiankit.engine.diagnosis import without_effect
from hessiankit.engine.linearisation import Constant, LinearisedBatch, Recompute, linearise
from hessiankit.engine.paged_parameters import PagedModel
from hessiankit.engine.parameter_memory import ParameterMemory
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.read import Request
from hessiankit.support.errors import InputError, check_count
from hessiankit.support.torch_state import one_at_a_time

WHO = "hessian_operator"


@one_at_a_time
def linearise_all(
    request: Request,
    *,
    recompute: Recompute = None,
    micro_batch: int | None = None,
    memory: Callable[[], ParameterMemory] = ParameterMemory,
) -> tuple[list[BatchLoss], list[LinearisedBatch]]:
    """Return the loss of every batch, and the same linearised; options as in :func:`hessian_operator`."""
    options: dict[str, Any] = {"recompute": recompute, "micro_batch": micro_batch}
    batches: list[BatchLoss] = []
    linearised: list[LinearisedBatch] = []
    gauss_newton = request.curvature.kind != "hessian"
    for batch in request.batches():
        with torch.no_grad():
            linearised.append(linearise(batch, gauss_newton=gauss_newton, parameters=memory(), **options))
        batches.append(batch.unchecked() if batches else batch)  # one gradient, not one a batch
    return request.shared(batches), linearised


def check_effect(batches: Sequence[BatchLoss], linearised: Sequence[LinearisedBatch]) -> None:
    """Raise InputError if no batch's loss depends on the parameters."""
    if all(isinstance(one, Constant) for one in linearised):
        raise without_effect(WHO, batches[0].parameters)


def paged_model(module: nn.Module, offload: bool | str | torch.device, others: Sequence[str]) -> PagedModel:
    """Return a module whose parameters are to be moved to a device.

    Raises:
        InputError: There is no such device, the module is not on the host, or there are options that do not go with it.
    """
    device = torch.accelerator.current_accelerator() if isinstance(offload, bool) else _device(offload)
    if device is None:
        raise InputError(f"{WHO}: offload=True, and torch has no accelerator here; pass offload='cuda', or leave it out")
    if (place := next((p.device for p in module.parameters() if p.device.type != "cpu"), None)) is not None:
        raise InputError(f"{WHO}: offload= moves parameters from the host, and some are on {place}; pass module.cpu()")
    if others:
        remedy = {"micro_batch": "pass a list of small batches", "handshake": "pass handshake=True"}
        raise InputError(f"{WHO}: {others[0]}= does not go with offload=; {remedy.get(others[0], 'leave one out')}")
    return PagedModel(WHO, module, device)


def _device(name: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a name that torch does not know, or a device that is not there
        raise InputError(f"{WHO}: offload={name!r}: {str(error).splitlines()[0]}") from error


def check_options(block_size: int | None, recompute: Recompute = None, micro_batch: int | None = None) -> None:
    """Raise InputError if the options of an operator cannot be used."""
    check_count("block_size", block_size, "vector")
    check_count("micro_batch", micro_batch, "sample")
    if recompute not in (None, "layers"):
        raise InputError(f"{WHO}: recompute={recompute!r} is not known; pass 'layers' or None")
