"""What a result is taken of: the Hessian or its Gauss-Newton part, of one batch or many, checked before any work."""

from __future__ import annotations

from typing import Any

from torch import nn

from hessiankit.errors import InputError
from hessiankit.request.batches import Weights, requests, shares
from hessiankit.request.selection import Params
from hessiankit.request.task import Loss, Task

KINDS = ("hessian", "ggn")


def gather(
    who: str,
    module: nn.Module,
    inputs: Any,
    target: Any,
    loss: Loss,
    params: Params,
    *,
    kind: str,
    batch_size: int | None,
    weights: Weights,
    reduction: str | None,
    handshake: bool,
) -> tuple[list[Task], list[float]]:
    """Return one request a batch, for the same parameters, and what each batch's loss is multiplied by.

    Args:
        who: What an error message starts with.
        module: As in :func:`hessiankit.hessian`, like all arguments that are not explained here.
        inputs: The inputs, or several batches.
        target: What the loss compares with.
        loss: The loss.
        params: Which parameters.
        kind: ``"hessian"``, or ``"ggn"`` for the outer-product part J^T L'' J, which needs to know the output layer.
        batch_size: Samples treated at once, or None.
        weights: The number of terms of each batch.
        reduction: ``"mean"`` or ``"sum"`` over all terms.
        handshake: Whether the result is compared with the module's own loss and gradient.

    Raises:
        InputError: If an argument cannot be used.
    """
    if kind not in KINDS:
        raise InputError(f"{who}: kind={kind!r} is not known; pass one of {', '.join(map(repr, KINDS))}")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"{who}: batch_size={batch_size} leaves no sample to treat; pass 1 or more, or None")
    tasks: list[Task] = []
    counts: list[float] = []
    made = requests(who, module, inputs, target, loss, params, weights=weights, reduction=reduction, handshake=handshake)
    for task, count in made:
        if kind == "ggn" and (task.loss is None or task.whole):
            raise InputError(f"{who}: kind='ggn' needs the module's output as one tensor; pass loss=... that compares one tensor")
        tasks.append(task)
        counts.append(count)
    return tasks, shares(counts, loss, reduction)
