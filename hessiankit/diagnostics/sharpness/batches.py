"""Micro-batches: inputs, labels and logits in evaluation mode, and the mean loss over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.engine.problem.calling import (
    IGNORE_INDEX,
    arguments,
    check_dense,
    check_module,
    known_count,
    map_tensors,
    named_tensors,
)
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.torch_state import evaluation_mode, ordinary_path

FORMS = (
    "inputs and target=..., a pair (inputs, target), a mapping of keyword arguments with 'labels' (a Hugging Face batch), "
    "or an iterable of such pairs or mappings"
)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Inputs and labels of one forward pass.

    Attributes:
        inputs: The model's arguments; a mapping holds keyword arguments, a tuple or list positional ones.
        target: Labels, one for each row of the logits (-100: not counted), or for squared error a tensor of the output's shape.
        numbers: The number of each sequence, a row of axis 0, in the whole data.
        shifted: The labels are the tokens themselves: row i of the logits belongs to label i + 1. None: not known yet.
        uncut: The batch that it was cut from, if any.
    """

    inputs: Any
    target: Tensor
    numbers: tuple[int, ...]
    shifted: bool | None = False
    uncut: MicroBatch | None = None

    @property
    def labels(self) -> Tensor:
        """The label of each row of the logits: the target, one place later where it holds the tokens themselves."""
        if not (self.shifted if self.shifted is not None else self.target.ndim > 1):
            return self.target
        return torch.cat([self.target[..., 1:], self.target.new_full((*self.target.shape[:-1], 1), IGNORE_INDEX)], -1)

    def part(self, rows: slice) -> MicroBatch:
        """Return some of the sequences: every tensor of that length is cut, others are passed to all parts."""
        whole = len(self.numbers)

        def cut(x: Tensor) -> Tensor:
            return x[rows] if x.ndim and x.shape[0] == whole else x

        inputs = dict(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs
        return MicroBatch(map_tensors(cut, inputs), self.target[rows], self.numbers[rows], self.shifted, self)


def micro_batches(
    who: str,
    data: Any,
    target: Any = None,
    *,
    micro_batch: int | None = None,
    numbers: Iterable[int] | None = None,
    shift: bool | None = None,
    model: nn.Module | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of some data.

    Args:
        who: Prefix of error messages.
        data: One batch or an iterable of batches, see :data:`FORMS`.
        target: The target of one batch.
        micro_batch: Sequences in a micro-batch; None for each batch as it is.
        numbers: The numbers of the sequences in the whole data; 0, 1, 2, ... by default.
        shift: Whether 'labels' of a mapping are the tokens themselves, to be compared with the logits one place before.
        model: A model with a decoder whose inputs it makes of the labels itself.

    Raises:
        InputError: If the data are none of these forms.

    >>> found = micro_batches("example", torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64), micro_batch=2)
    >>> [batch.numbers for batch in found]
    [(0, 1), (2, 3), (4,)]
    """
    if micro_batch is not None and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1):
        raise InputError(f"{who}: micro_batch={micro_batch!r}; pass 1 or more sequences, or None for whole batches")
    found: list[MicroBatch] = []
    left = None if numbers is None else [int(number) for number in numbers]
    if left is not None and (any(number < 0 for number in left) or len(set(left)) < len(left)):
        raise InputError(f"{who}: numbers holds a negative or a repeated number; pass another one, 0 or more, for each sequence")
    total = 0
    for inputs, labels, shifted in _read(who, data, target, shift):
        size = int(labels.shape[0])
        own = range(total, total + size) if left is None else left[total : total + size]
        total += size
        if len(own) < size:
            raise InputError(f"{who}: numbers has {len(left or ())} entries and the data have more sequences; pass one for each")
        whole = MicroBatch(_with_decoder_inputs(model, inputs, labels), labels, tuple(own), shifted)
        step = min(micro_batch or size, size)
        found += [whole] if step == size else [whole.part(slice(i, min(i + step, size))) for i in range(0, size, step)]
    if left is not None and total < len(left):
        raise InputError(f"{who}: numbers has {len(left)} entries and the data have {total} sequences; pass one for each")
    if not found:
        raise InputError(f"{who}: the data hold no batch; pass {FORMS}")
    return found


def _read(who: str, data: Any, target: Any, shift: bool | None) -> list[tuple[Any, Tensor, bool | None]]:
    """Return (inputs, target, shifted) of each batch."""
    if target is not None:
        return [_pair(who, "the batch", data, target, shift)]
    if isinstance(data, Tensor):
        raise InputError(
            f"{who}: data is a tensor {tuple(data.shape)} and target is missing; pass target=... (with sampled labels only its "
            "shape and its -100 count)"
        )
    if isinstance(data, Mapping) or _is_pair(data):
        return [_batch(who, "the batch", data, shift)]
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InputError(f"{who}: data is {type(data).__name__}; expected {FORMS}")
    return [_batch(who, f"batch {k}", batch, shift) for k, batch in enumerate(data)]


def _with_decoder_inputs(model: nn.Module | None, inputs: Any, labels: Tensor) -> Any:
    """Return the inputs, with those of the decoder where a Hugging Face model makes them of the labels."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if (
        make is None
        or labels.ndim < 2
        or not isinstance(inputs, Mapping)
        or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    ):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor)


def _batch(who: str, name: str, batch: Any, shift: bool | None) -> tuple[Any, Tensor, bool | None]:
    if isinstance(batch, Mapping):
        if batch.get("labels") is None:
            keys = ", ".join(map(repr, batch)) or "none"
            raise InputError(
                f"{who}: {name} is a mapping without 'labels' (keys: {keys}); add them, e.g. batch['labels'] = batch['input_ids']"
                " with -100 at padding, or pass a pair (mapping, target)"
            )
        labels = batch["labels"]
        inputs, target, _ = _pair(who, name, {key: value for key, value in batch.items() if key != "labels"}, labels, None)
        return inputs, target, shift
    if _is_pair(batch):
        return _pair(who, name, batch[0], batch[1], shift)
    seen = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise InputError(f"{who}: {name} is a {seen}; expected a pair (inputs, target), or a mapping with 'labels'")


def _pair(who: str, name: str, inputs: Any, target: Any, shift: bool | None) -> tuple[Any, Tensor, bool | None]:
    if not isinstance(target, Tensor):
        raise InputError(f"{who}: the target of {name} is {type(target).__name__}; expected a tensor")
    if target.ndim == 0 or target.numel() == 0:
        raise InputError(
            f"{who}: the target of {name} has shape {tuple(target.shape)}; expected at least one sequence along axis 0 (add the"
            " axis with target.unsqueeze(0), and to the inputs too)"
        )
    return inputs, target, bool(shift)


def check_devices(who: str, batch: MicroBatch, model: nn.Module) -> None:
    """Refuse sparse data, and data that lie elsewhere than a model whose parameters are all on one device."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        return
    (device,) = devices
    for name, x in (*named_tensors(batch.inputs), ("target", batch.target)):
        if x.device != device:
            raise InputError(f"{who}: {name} is on {x.device}, the parameters are on {device}; move one of them")
        check_dense(who, name, x)


def aligned(who: str, batch: MicroBatch, shape: Sequence[int], loss: str) -> Tensor:
    """Return the target laid beside the model's output, -100 where a row of logits has no label.

    >>> tokens = torch.tensor([[5, 6, 7]])
    >>> aligned("example", MicroBatch(tokens, tokens, (0,), True), (1, 3, 9), "cross_entropy").tolist()
    [[6, 7, -100]]
    """
    target, shape = batch.target, tuple(shape)
    if loss == "mse":
        if tuple(target.shape) != shape:
            raise InputError(
                f"{who}: target has shape {tuple(target.shape)}, the model's output {shape}; squared error needs equal shapes "
                "(nothing is broadcast)"
            )
        return target
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise InputError(f"{who}: target is {target.dtype}; cross entropy needs integer class labels")
    if tuple(target.shape) != shape[:-1]:
        raise InputError(
            f"{who}: the labels have shape {tuple(target.shape)}, expected {shape[:-1]}: one for each row of the logits {shape},"
            " whose last axis holds the classes"
        )
    counted = target[target != IGNORE_INDEX]
    low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
    if counted.numel() and not (low >= 0 and high < shape[-1]):
        raise InputError(
            f"{who}: labels lie in [{low}, {high}], expected 0 to {shape[-1] - 1} for {shape[-1]} classes "
            f"(or {IGNORE_INDEX} to leave a position out)"
        )
    return batch.labels.long()


@dataclass(frozen=True, eq=False)
class BatchedLoss:
    """The mean loss over micro-batches: ``sum_b count_b loss_b / sum_b count_b``, with the counted labels or entries as counts.

    Attributes:
        who: Prefix of error messages.
        model: The model.
        batches: Its micro-batches.
        loss: ``"cross_entropy"`` or ``"mse"``.
    """

    who: str
    model: nn.Module
    batches: tuple[MicroBatch, ...]
    loss: str = "cross_entropy"

    def output(self, batch: MicroBatch) -> Tensor:
        """Return the model's output: the logits, or what squared error compares."""
        return forward(self.model, batch, self.who)

    def target(self, batch: MicroBatch, out: Tensor) -> Tensor:
        """Return the target laid beside the output."""
        return aligned(self.who, batch, out.shape, self.loss)

    def summed(self, out: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over the terms that count, a scalar."""
        if self.loss == "mse":
            return F.mse_loss(out, target, reduction="sum")
        return F.cross_entropy(out.flatten(0, -2), target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def count(self, target: Tensor) -> float:
        """Return the number of terms of a target: labels that count, or entries."""
        return known_count(self.loss, target) or 0.0

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float | None]:
        """Return the mean loss, in double precision, and the accuracy: the share of counted labels with the largest logit."""
        loss = right = terms = 0.0
        for batch in self.batches:
            out = self.output(batch)
            target = self.target(batch, out)
            loss += float(self.summed(out.double() if out.device.type != "mps" else out, target))
            terms += self.count(target)
            if self.loss == "cross_entropy":
                right += float((out.argmax(-1) == target)[target != IGNORE_INDEX].sum())
        self.check_terms(terms)
        return loss / terms, right / terms if self.loss == "cross_entropy" else None

    @torch.no_grad()
    def pairs(self) -> list[tuple[Any, Tensor]]:
        """Return (inputs, target laid beside the output) of each micro-batch, from one forward pass each."""
        found = [(batch.inputs, self.target(batch, self.output(batch))) for batch in self.batches]
        self.check_terms(sum(self.count(target) for _, target in found))
        return found

    def check_terms(self, terms: float) -> None:
        """Raise an InputError if no term counts."""
        if not terms:
            raise InputError(f"{self.who}: every label is {IGNORE_INDEX} (not counted), so there is no loss; keep at least one")


@contextmanager
def evaluating(model: nn.Module, who: str = "sharpness") -> Iterator[None]:
    """As :func:`evaluation_mode`, off the fused inference path."""
    with evaluation_mode(model), ordinary_path():
        check_module(who, model)
        yield


def forward(model: nn.Module, batch: MicroBatch, who: str = "sharpness") -> Tensor:
    """Return the model's logits for a micro-batch, with their graph."""
    return output_of(who, call(who, model, batch.inputs))


def alike(x: Tensor, y: Tensor, slack: float) -> bool:
    """Tell whether two outputs differ by no more than ``slack`` of the largest entry, and hold NaN at the same places."""
    largest = float(x.abs().nan_to_num().max()) if x.numel() else 0.0
    return x.shape == y.shape and torch.allclose(x, y, 0.0, slack * largest, equal_nan=True)


@torch.no_grad()
def check_cut(who: str, model: nn.Module, batches: Sequence[MicroBatch]) -> None:
    """Compare the output of two sequences with those of each alone, where a batch was cut.

    Raises:
        InputError: They differ, or the model does not accept them.
    """
    whole = next((batch.uncut for batch in batches if batch.uncut is not None), None)
    if whole is None:
        return
    reason = ""
    try:
        both, *alone = (forward(model, whole.part(rows), who).detach() for rows in (slice(0, 2), slice(0, 1), slice(1, 2)))
        if alike(both, torch.cat(alone), torch.finfo(both.dtype).eps ** 0.5):
            return
    except InputError as error:
        reason = f" ({error})"
    raise InputError(
        f"{who}: two sequences and each of them alone give other outputs, so that micro_batch= changes the result: sequences "
        f"depend on each other, or an input with a row for each of them does not go by sequences{reason}; leave micro_batch out"
    )


def call(who: str, model: nn.Module, inputs: Any) -> Any:
    """Return what a model returns for some inputs."""
    tree = dict(inputs) if isinstance(inputs, Mapping) else inputs
    positional, keywords = arguments(map_tensors(lambda x: x.clone() if x.is_inference() else x, tree))
    try:
        return model(*positional, **keywords)
    except (HessiankitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named_tensors(inputs)) or "these inputs"
        raise InputError(f"{who}: the model does not accept {shown}: {first}") from error


def output_of(who: str, outputs: Any) -> Tensor:
    """Return the tensor of logits that a model returned: itself, ``.logits``, entry ``"logits"``, or the first of a tuple.

    >>> output_of("example", (torch.ones(1), "cache"))
    tensor([1.])
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor) and not hasattr(outputs, "logits"):
        return outputs[0]
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise InputError(
        f"{who}: the model returned {type(outputs).__name__}; expected a tensor of logits, an object with .logits, or a tuple"
        " that begins with them"
    )
