"""What the diagnostics run on: micro-batches, the model's output on them, their loss, and which tokens count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.depth.blocks import WHO
from hessiankit.errors import InputError
from hessiankit.estimation.batches import FORMS, MicroBatch, aligned, check_devices, micro_batches
from hessiankit.estimation.calling import forward
from hessiankit.request.calling import arguments
from hessiankit.request.losses import IGNORE_INDEX, known_count
from hessiankit.request.validation import check_module
from hessiankit.torch_state import ordinary_path
from hessiankit.untouched import untouched

LOSSES = ("cross_entropy", "mse")


@dataclass(frozen=True, eq=False)
class Data:
    """The micro-batches of a measurement and the loss on them.

    The loss of all of them is ``sum_b count_b loss_b / sum_b count_b``, with the counted labels (or entries) as counts.

    Attributes:
        model: The model.
        batches: Its micro-batches.
        loss: ``"cross_entropy"`` or ``"mse"``.
    """

    model: nn.Module
    batches: tuple[MicroBatch, ...]
    loss: str

    def output(self, batch: MicroBatch) -> Tensor:
        """Return the model's output: the logits, or what squared error compares."""
        return forward(self.model, batch, WHO)

    def target(self, batch: MicroBatch, out: Tensor) -> Tensor:
        """Return the target laid beside the output."""
        return aligned(WHO, batch, out.shape, self.loss)

    def summed_loss(self, out: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over what counts, a scalar."""
        if self.loss == "mse":
            return F.mse_loss(out, target, reduction="sum")
        flat = out.flatten(0, -2)
        return F.cross_entropy(flat, target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def count(self, target: Tensor) -> float:
        """Return the number of terms of a target: labels that count, or entries."""
        return known_count(self.loss, target) or 0.0

    def counts(self) -> list[float]:
        """Return the number of terms of each micro-batch, from one forward pass each.

        Raises:
            InputError: If no term counts.
        """
        with torch.no_grad():
            found = [self.count(self.target(batch, self.output(batch))) for batch in self.batches]
        if not sum(found):
            raise InputError(f"{WHO}: every label is {IGNORE_INDEX} (not counted), so there is no loss; keep at least one")
        return found


def read_data(model: nn.Module, data: Any, target: Any, loss: str, *, micro_batch: int | None, labelled: bool) -> Data:
    """Return the data as micro-batches.

    Args:
        model: The model.
        data: As in :func:`hessiankit.estimation.sharpness`; without labels where they are not needed.
        target: The target of one batch.
        loss: ``"cross_entropy"`` or ``"mse"``.
        micro_batch: Sequences in a micro-batch, None for each batch as it is.
        labelled: Whether a target is needed.

    Raises:
        InputError: If the data are none of these forms, or lie on another device than the model.
    """
    if loss not in LOSSES:
        raise InputError(f"{WHO}: loss={loss!r} is not known; pass 'cross_entropy' or 'mse'")
    if target is None and not labelled:
        if isinstance(data, Tensor):
            target = _no_labels(data)
        elif isinstance(data, Mapping) and data.get("labels") is None:
            first = next((x for x in data.values() if isinstance(x, Tensor) and x.ndim), None)
            if first is None:
                raise InputError(f"{WHO}: the mapping holds no tensor; pass {FORMS}")
            target = _no_labels(first)
    elif target is None and isinstance(data, Tensor):
        raise InputError(
            f"{WHO}: data is a tensor {tuple(data.shape)} and target is missing; pass target=..., or leave the loss out"
        )
    batches = tuple(micro_batches(WHO, data, target, micro_batch=micro_batch))
    for batch in batches:
        check_devices(WHO, batch, model)
    return Data(model, batches, loss)


def _no_labels(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), IGNORE_INDEX, device=x.device)


def counted_tokens(batch: MicroBatch, state: Tensor) -> Tensor:
    """Return booleans of the shape of a hidden state without its features: True where a token is not padding.

    Read from ``attention_mask`` (1: a token) or ``key_padding_mask`` (True: padding) among the inputs, if it has that shape.
    """
    shape = state.shape[:-1]
    kwargs = arguments(batch.inputs)[1]
    for name, flip in (("attention_mask", False), ("key_padding_mask", True)):
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == shape:
            return ~mask.bool() if flip else mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=state.device)


def last_tokens(counted: Tensor) -> Tensor:
    """Return booleans: True at the last counted token of each sequence; tokens are the last axis.

    >>> last_tokens(torch.tensor([[True, True, False], [True, True, True]]))
    tensor([[False,  True, False],
            [False, False,  True]])
    """
    return counted & (counted.flip(-1).cumsum(-1).flip(-1) == 1)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, attention that has second derivatives, and afterwards everything of the model as it was.

    Raises:
        InputError: If the model is no ``nn.Module``, or compiled or quantised.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{WHO}: expected a torch.nn.Module, got {type(model).__name__}")
    with untouched(model), ordinary_path(), sdpa_kernel(SDPBackend.MATH):
        check_module(WHO, model)
        yield
