"""The training loss on fixed batches: what a monitor evaluates, and what its eigenvalue is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.errors import InputError
from hessiankit.estimation.batches import micro_batches
from hessiankit.estimation.calling import call, output_of
from hessiankit.request.calling import map_tensors, named_tensors
from hessiankit.request.losses import IGNORE_INDEX
from hessiankit.request.validation import check_dense

WHO = "monitor"
Batch: TypeAlias = "tuple[Any, Tensor]"
"""What the model is called with, and a label for each row of its logits (-100: does not count)."""


def batches_of(data: Any, target: Tensor | None = None) -> list[Batch]:
    """Return the batches that ``data`` stand for, in a list that can be gone through again and again.

    Args:
        data: Inputs with ``target=``; a pair (inputs, target); a Hugging Face batch, whose labels are moved one place to the
            left where they belong to tokens (logits t against label t + 1); or several of these, e.g. a ``DataLoader``.
        target: Labels, if ``data`` are inputs only.

    Raises:
        InputError: If it is none of these, or no label counts.

    >>> inputs, target = batches_of({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})[0]
    >>> list(inputs), target.tolist()
    (['input_ids'], [[6, 7, -100]])
    """
    found: list[Batch] = []
    for batch in micro_batches(WHO, data, target):
        for name, x in (*named_tensors(batch.inputs), ("target", batch.target)):
            check_dense(WHO, name, x)
            if x.is_meta:
                raise InputError(f"{WHO}: {name} is on the meta device, which holds no values; load the data first")
        labels = batch.target
        if batch.shifted if batch.shifted is not None else labels.ndim > 1:
            labels = torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORE_INDEX)], dim=-1)
        found.append((batch.inputs, labels))
    if not any(map(count, (labels for _, labels in found))):
        raise InputError(f"{WHO}: the data hold no label that counts; pass labels other than {IGNORE_INDEX}")
    return found


def on_device(batch: Batch, model: nn.Module) -> Batch:
    """Return a batch with its tensors where the model's parameters are."""
    device = next(model.parameters()).device
    inputs, target = map_tensors(
        lambda x: x.to(device), (dict(batch[0]) if isinstance(batch[0], Mapping) else batch[0], batch[1])
    )
    return inputs, target


def count(target: Tensor) -> int:
    """Return how many labels count."""
    return int((target != IGNORE_INDEX).sum())


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy, in nats, over the labels of a batch that count, as a tensor ()."""
    logits = output_of(WHO, call(WHO, model, batch[0]))
    if logits.shape[:-1] != batch[1].shape:
        raise InputError(
            f"{WHO}: logits {tuple(logits.shape)} do not fit labels {tuple(batch[1].shape)}; expected a label for each row"
        )
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1), ignore_index=IGNORE_INDEX)


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean cross entropy over all labels that count, however they are cut into batches."""
    total, terms = 0.0, 0
    for batch in batches:
        here = on_device(batch, model)
        if n := count(here[1]):
            total += n * float(batch_loss(model, here).double())
            terms += n
    return total / terms
