"""Micro-batches: inputs, labels and logits in evaluation mode, and the mean loss over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.request.checks import IGNORE_INDEX, check_labels, check_layers, check_place, check_same_shape
from hessiankit.request.data import FORMS, call, read_data, with_decoder_inputs
from hessiankit.request.loss import member, read_loss
from hessiankit.support.containers import map_tensors, named_tensors, samples
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import evaluation_mode, ordinary_path


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Inputs and target of one forward pass, with the number of each sequence, a row of axis 0, in the whole data.

    ``uncut`` is the batch that it was cut from, if any.
    """

    inputs: Any
    target: Tensor
    numbers: tuple[int, ...]
    uncut: MicroBatch | None = None

    def part(self, rows: slice) -> MicroBatch:
        """Return some of the sequences: every tensor of that length is cut, others are passed to all parts."""
        return MicroBatch(samples(self.inputs, rows, len(self.numbers)), self.target[rows], self.numbers[rows], self)

    def on(self, device: torch.device) -> MicroBatch:
        """Return the batch on a device."""
        inputs, target = map_tensors(lambda x: x.to(device), (self.inputs, self.target))
        return MicroBatch(inputs, target, self.numbers)


def micro_batches(
    caller: str,
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: str = "cross_entropy",
    micro_batch: int | None = None,
    numbers: Iterable[int] | None = None,
    shift: bool | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of data in the forms of :func:`hessiankit.sharpness`, which explains the arguments.

    ``who`` begins the messages of errors. The model is called to see where the labels of a mapping belong.

    >>> cut = micro_batches("example", nn.Linear(3, 2), torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64), micro_batch=2)
    >>> [batch.numbers for batch in cut]
    [(0, 1), (2, 3), (4,)]
    """
    if micro_batch is not None and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1):
        raise InputError(f"{caller}: micro_batch={micro_batch!r}; pass 1 or more sequences, or None for whole batches")
    row_numbers = None if numbers is None else [int(number) for number in numbers]
    if row_numbers is not None and (any(number < 0 for number in row_numbers) or len(set(row_numbers)) < len(row_numbers)):
        raise InputError(
            f"{caller}: numbers holds a negative or a repeated number; pass another one, 0 or more, for each sequence"
        )
    has_batches, pairs, _ = read_data(data, target, loss, model, is_shifted=shift, trial=micro_batch)
    batches: list[MicroBatch] = []
    total = 0
    for k, (inputs, labels) in enumerate(pairs):
        _check_target(caller, f"batch {k}" if has_batches else "the batch", inputs, labels)
        size = len(labels)
        rows = range(total, total + size) if row_numbers is None else row_numbers[total : total + size]
        total += size
        batch = MicroBatch(with_decoder_inputs(model, inputs, labels), labels, tuple(rows))
        step = min(micro_batch or size, size)
        batches += [batch] if step == size else [batch.part(slice(i, min(i + step, size))) for i in range(0, size, step)]
    if row_numbers is not None and total != len(row_numbers):
        raise InputError(
            f"{caller}: numbers has {len(row_numbers)} entries and the data have {total} sequences; pass one for each"
        )
    if not batches:
        raise InputError(f"{caller}: the data hold no batch; pass {FORMS}")
    return batches


def _check_target(caller: str, name: str, inputs: Any, target: Any) -> None:
    """Refuse a target that is missing, no tensor, or without a sequence."""
    if target is None and isinstance(inputs, Tensor):
        raise InputError(
            f"{caller}: data is a tensor {tuple(inputs.shape)} and target is missing; pass target=... (with sampled labels only "
            "its shape and its -100 count)"
        )
    if target is None and isinstance(inputs, Mapping):
        if inputs.get("labels") is None:
            keys = ", ".join(map(repr, inputs)) or "none"
            raise InputError(
                f"{caller}: {name} is a mapping without 'labels' (keys: {keys}); add them, e.g. batch['labels'] = "
                "batch['input_ids'] with -100 at padding, or pass a pair (mapping, target)"
            )
        target = inputs["labels"]
    if not isinstance(target, Tensor):
        raise InputError(f"{caller}: the target of {name} is {type(target).__name__}; expected a tensor")
    if target.ndim == 0 or target.numel() == 0:
        raise InputError(
            f"{caller}: the target of {name} has shape {tuple(target.shape)}; expected at least one sequence along axis 0 (add"
            " the axis with target.unsqueeze(0), and to the inputs too)"
        )


def check_devices(caller: str, batch: MicroBatch, model: nn.Module) -> None:
    """Raise an error for sparse data, and for data elsewhere than a model whose parameters are all on one device."""
    devices = {p.device for p in model.parameters()}
    if len(devices) == 1:
        (device,) = devices
        for name, x in (*named_tensors(batch.inputs), ("target", batch.target)):
            check_place(name, x, device)


def aligned(caller: str, batch: MicroBatch, shape: Sequence[int], loss: str) -> Tensor:
    """Return the target of an output of some shape, labels as int64; refuse one that does not fit."""
    if loss == "mse":
        check_same_shape(batch.target, shape)
        return batch.target
    check_labels(batch.target, shape)
    return batch.target.long()


@dataclass(frozen=True, eq=False)
class BatchedLoss:
    """The mean loss over micro-batches: ``sum_b count_b loss_b / sum_b count_b``, with the counted labels or entries as counts.

    ``who`` begins the messages of errors; ``loss`` is ``"cross_entropy"`` or ``"mse"``.
    """

    caller: str
    model: nn.Module
    batches: tuple[MicroBatch, ...]
    loss: str = "cross_entropy"

    def run(self, batch: MicroBatch) -> Any:
        """Call the model, and return all that it does."""
        return call(self.model, batch.inputs)

    def output(self, batch: MicroBatch) -> Tensor:
        """Return the logits, or what squared error compares."""
        return forward(self.model, batch, self.caller)

    def target(self, batch: MicroBatch, out: Tensor) -> Tensor:
        """Return the target laid beside the output."""
        return aligned(self.caller, batch, out.shape, self.loss)

    def summed(self, out: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over the terms that count, a scalar."""
        if self.loss == "mse":
            return F.mse_loss(out, target, reduction="sum")
        return F.cross_entropy(out.flatten(0, -2), target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def count(self, target: Tensor) -> float:
        """Return the number of terms of a target: labels that count, or entries."""
        return read_loss(self.loss).count(target) or 0.0

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float | None]:
        """Return the mean loss, in double precision, and the accuracy: the share of counted labels with the largest logit."""
        loss = hits = terms = 0.0
        for _, out, target in self._runs():
            loss += float(self.summed(out.double() if out.device.type != "mps" else out, target))
            terms += self.count(target)
            if self.loss == "cross_entropy":
                hits += float((out.argmax(-1) == target)[target != IGNORE_INDEX].sum())
        self._check_terms(terms)
        return loss / terms, hits / terms if self.loss == "cross_entropy" else None

    def gradient(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradient of the mean loss with respect to each parameter; zeros where it does not depend on one."""
        sums, terms = [torch.zeros_like(p) for p in parameters], 0.0
        for _, out, target in self._runs():
            terms += self.count(target)
            slopes = torch.autograd.grad(self.summed(out, target), parameters, allow_unused=True) if parameters else ()
            for total, slope in zip(sums, slopes, strict=True):
                if slope is not None:
                    total += slope
        self._check_terms(terms)
        return [total / terms for total in sums]

    @torch.no_grad()
    def pairs(self) -> list[tuple[Any, Tensor]]:
        """Return (inputs, target laid beside the output) of each micro-batch, from one forward pass each."""
        pairs = [(batch.inputs, target) for batch, _, target in self._runs()]
        self._check_terms(sum(self.count(target) for _, target in pairs))
        return pairs

    def _runs(self) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
        for batch in self.batches:
            out = self.output(batch)
            yield batch, out, self.target(batch, out)

    def _check_terms(self, terms: float) -> None:
        if not terms:
            raise InputError(
                f"{self.caller}: every label is {IGNORE_INDEX} (not counted), so there is no loss; keep at least one"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode as in :func:`evaluation_mode`, off the fused inference path."""
    with evaluation_mode(model), ordinary_path():
        check_layers(model)
        yield


def forward(model: nn.Module, batch: MicroBatch, caller: str = "sharpness") -> Tensor:
    """Return the model's logits for a micro-batch, with their graph."""
    outputs = call(model, batch.inputs)
    if isinstance(outputs, (tuple, list)) and outputs and not hasattr(outputs, "logits"):
        logits = outputs[0]
    else:
        logits = outputs if isinstance(outputs, Tensor) else member(outputs, "logits")
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"{caller}: the model returned {type(outputs).__name__}; expected a tensor of logits, an object with .logits, or a tuple"
        " that begins with them"
    )
