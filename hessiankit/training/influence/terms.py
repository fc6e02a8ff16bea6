"""Inner products of vectors with the gradients of single samples, and the output with an axis of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessiankit.curvature.jacobian import JacobianOperator
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import losses_of_logits

WHO = "influence"


def output(batch: BatchLoss) -> tuple[Any, Tensor]:
    """Return the result of a batch, within ``at()``, and the output z in it that the loss reads.

    Raises:
        InputError: The loss does not read one tensor whose first axis is that of the samples.
    """
    result = batch.result()
    z = batch.loss.output(result)
    if z is None or not z.ndim or len(z) != batch.n_samples:
        seen = "no such output" if z is None else f"an output of shape {tuple(z.shape)} of {batch.n_samples} samples"
        raise InputError(
            f"{WHO}: scores of samples need a loss that reads one tensor, or 'logits', with samples along the first axis; "
            f"the model has {seen}"
        )
    return result, z


def weight_axes(z: Tensor, *, per_token: bool) -> int:
    """Return the number of leading axes of an output that index weights: of samples, or of samples and tokens.

    Raises:
        InputError: There are no tokens.
    """
    if per_token and z.ndim < 3:
        raise InputError(f"{WHO}: per_token=True needs outputs (samples, tokens, classes), the model has {tuple(z.shape)}")
    return 1 + per_token


def inner_products(batch: BatchLoss, V: Tensor, *, per_token: bool) -> Tensor:
    """Return <grad l_i, v> of every sample for vectors (S, P): (samples, S), or (samples, tokens, S).

    By forward mode: sum over the outputs of a sample of the slope times J v, one sweep for all samples.
    """
    with batch.at():
        result, z = output(batch)
        with losses_of_logits():
            (slope,) = torch.autograd.grad(batch.loss.value(result, batch.target), z)
    tangents = JacobianOperator(batch) @ V.T
    terms = tangents.reshape(*z.shape, len(V)) * slope.unsqueeze(-1).to(tangents)
    axes = weight_axes(z, per_token=per_token)
    return terms.flatten(axes, -2).sum(axes) if z.ndim > axes else terms
