"""``sharpness`` over several processes: of whole models, each with its own data, and of models that ``fully_shard`` has spread.

Of a sharded model all ranks do every backward pass together. The reduce-scatter of a backward pass averages over the ranks, so
the gradient of one rank's micro-batch alone does not exist. A micro-batch is therefore the union of the ranks' micro-batches at
the same step, as in a training step, and each rank's cotangent is scaled such that the average is the gradient of the mean over
the union. A rank with fewer steps runs one sequence of another rank with the cotangent zero. Gradients are gathered one
parameter at a time, and every rank squares them alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.data import compared_labels, on_device_of, read_data, with_a_label
from hessiankit.support.arguments import is_sharded
from hessiankit.support.containers import map_tensors, named_tensors, samples
from hessiankit.support.errors import InputError
from hessiankit.training.fsdp import check_layout, gradients_aside, reshard, unwrapped
from hessiankit.training.ranks import Ranks, check_same_function, check_same_tensors, check_versions, common
from hessiankit.training.sharpness.batches import BatchedLoss, MicroBatch, check_devices, evaluating, forward
from hessiankit.training.sharpness.options import WHO, MeasuredParts, SharpnessOptions, measured_parts
from hessiankit.training.sharpness.probe import probe
from hessiankit.training.sharpness.replicate import (
    Drawn,
    Passes,
    Replicates,
    SquaredGradients,
    drawn_for,
    joined,
    measured,
    read,
    replicates_of,
)

AGREED = ("loss", "draws", "seed", "per", "kind", "histograms", "shift")


def replicates_of_ranks(
    model: nn.Module,
    data: Any,
    target: Any,
    options: Callable[[], SharpnessOptions],
    group: dist.ProcessGroup | None,
    **agreed: Any,
) -> Replicates:
    """Return the replicates of h on the data of all ranks, to every rank.

    Args:
        model: Model, the same on every rank: a plain module, DistributedDataParallel, or sharded by ``fully_shard``.
        data: This rank's data; ``[]`` or None where it has none.
        target: Labels of one batch.
        options: Function that returns this rank's options.
        group: The process group; None: all processes.
        **agreed: Other options of the call, the same on every rank.
    """
    ranks = Ranks(WHO, group)
    check_versions(ranks)

    def checked_options() -> SharpnessOptions:
        local = options()
        if local.preconditioner is not None:
            raise InputError(f"{WHO}: preconditioner= is read by one process; leave it out over several ranks")
        return local

    settings = ranks.together(checked_options)
    ranks.agree(**{name: getattr(settings, name) for name in AGREED}, **agreed)
    module = ranks.together(lambda: unwrapped(WHO, model))
    ranks.agree(**{"whether fully_shard has spread the parameters": is_sharded(module)})
    batches = local_batches(ranks, module, data, target, settings)
    check_same_tensors(ranks, dict(module.named_buffers()), "buffer")
    if is_sharded(module):
        return measured(ShardedPasses(ranks, module, batches, settings))
    check_same_tensors(ranks, dict(module.named_parameters()), "parameter")
    if ranks.size > 1:
        first = [one.part(slice(0, 1)).on(torch.device("cpu")) for one in batches[:1]]
        check_same_forward(ranks, module, common(ranks, first))
    return replicated(ranks, module, batches, settings)


def local_batches(ranks: Ranks, module: nn.Module, data: Any, target: Any, options: SharpnessOptions) -> list[MicroBatch]:
    """Return this rank's micro-batches, none without data; sequences are numbered rank by rank, or as ``numbers`` says."""
    numbers = None if options.numbers is None else list(options.numbers)
    options = replace(options, numbers=numbers)
    has_none = data is None or (isinstance(data, (list, tuple)) and not data)
    if is_sharded(module):  # which one rank cannot call by itself
        data = ranks.together(lambda: [] if has_none else list(read_data(data, target, options.loss).pairs))
        target = None
        if options.shift is None:
            options = replace(options, shift=labels_are_later(ranks, module, data))
    batches = ranks.together(lambda: [] if has_none else read(module, data, target, options))
    ranks.agree(**{"numbers=": "not given" if numbers is None else "given"})
    numbers_by_rank = ranks.gather([number for batch in batches for number in batch.numbers])
    if numbers is None:
        first = sum(map(len, numbers_by_rank[: ranks.rank]))
        return [replace(batch, numbers=tuple(first + number for number in batch.numbers)) for batch in batches]
    counts = Counter(number for of_rank in numbers_by_rank for number in of_rank)
    duplicate = next((number for number, times in counts.items() if times > 1), None)
    if duplicate is not None:
        raise InputError(f"{WHO}: two ranks hold a sequence of number {duplicate}; give each sequence of all data its own")
    return batches


def replicated(ranks: Ranks, model: nn.Module, batches: list[MicroBatch], options: SharpnessOptions) -> Replicates:
    """Return the replicates of all ranks' micro-batches, rank by rank, to every rank.

    Communication: for each micro-batch and draw one number a part, for each embedding one number a draw and row, and with
    histograms one number an entry of the model.
    """
    counts = any(options.loss == "mse" or bool((batch.target != IGNORE_INDEX).any()) for batch in batches)
    local = ranks.together(lambda: replicates_of(model, batches, options) if counts else None)
    runs = [one for one in ranks.gather(local and replace(local, entries={})) if one is not None]
    if not runs:
        raise InputError(f"{WHO}: no rank holds a label that counts; pass data on one of them at least")
    dtypes = ranks.gather(None if local is None else {name: total.dtype for name, total in local.entries.items()})
    entries = {}
    for name, dtype in next(one for one in dtypes if one is not None).items():
        zeros = torch.zeros_like(model.get_parameter(name), dtype=dtype, requires_grad=False)
        entries[name] = ranks.sum(zeros if local is None else local.entries[name])
    return replace(joined(runs), entries=entries)


class ShardedPasses(Passes):
    """Passes of a model that ``fully_shard`` has spread, which all ranks do together."""

    def __init__(self, ranks: Ranks, model: nn.Module, batches: Sequence[MicroBatch], options: SharpnessOptions) -> None:
        self.ranks, self.model, self.batches, self.options = ranks, model, batches, options
        self.parts = ranks.together(lambda: measured_parts(model, options.parts))
        descriptions = {f"part {k}": (part.name, part.type, part.layer) for k, part in enumerate(self.parts.parts)}
        ranks.agree(**{"the number of parts": len(descriptions)}, **descriptions)
        ranks.together(lambda: _check_sharding(ranks, model, self.parts))
        self.steps, self._spare = _steps(ranks, model, batches)
        self._clear: Callable[[], None] = lambda: None

    def whole(self, x: Tensor) -> Tensor:
        return self.ranks.whole(x)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with gradients_aside(self.model) as self._clear, super().prepared():
            yield

    def probe(self) -> None:
        with self.ranks.exchange():  # the same sequence on every rank, so that all of them find the same
            probe(self.model, [self._spare], backward=False, copies=0)
        check_same_forward(self.ranks, self.model, self._spare, sharded=True)

    def forward(self, k: int) -> tuple[Tensor, Drawn | None]:
        batch = self.batches[k] if k < len(self.batches) else None
        with self.ranks.exchange():
            output = forward(self.model, batch or self._spare)

        def draw() -> Drawn | None:
            if batch is None:
                return None
            check_devices(WHO, batch, self.model)
            return drawn_for(output, batch, self.options)

        sample = self.ranks.together(draw)
        counts = self.ranks.gather((sample.terms, sample.sequences, sample.unlikely) if sample else (0, 0, 0.0))
        terms, sequences, unlikely = (sum(column) for column in zip(*counts, strict=True))
        if not terms:
            return output, None
        scale = self.ranks.size * math.sqrt(sample.terms / terms) if sample else 0.0
        gradients = sample.gradients if sample else repeat(torch.zeros_like(output), self.options.label_draws)
        return output, Drawn((gradient * scale for gradient in gradients), terms, sequences, unlikely)

    def slopes(self, output: Tensor, gradient: Tensor, retain: bool) -> dict[str, Tensor]:
        self._clear()
        with self.ranks.exchange():
            output.backward(gradient, retain_graph=retain)
        slopes = {}
        for name, p in self.parts.parameters.items():
            if not isinstance(p, DTensor):  # FSDP2 does not reduce what it does not shard
                slope = torch.zeros_like(p) if p.grad is None else p.grad
                slopes[name] = self.ranks.sum(slope.detach().clone()) / self.ranks.size
            elif p.grad is not None:
                slopes[name] = p.grad
        return slopes

    def result(self, sums: SquaredGradients, row_masks: Mapping[str, Tensor], start: float) -> Replicates:
        masks = {name: self.ranks.sum(mask.cpu().double()) > 0 for name, mask in row_masks.items()}
        replicates = super().result(sums, masks, start)
        entries = _Gathered(self.ranks, sums.entries)  # which are gathered when they are read
        return replace(replicates, entries=entries, seconds=max(self.ranks.gather(replicates.seconds)))


def _steps(ranks: Ranks, model: nn.Module, batches: Sequence[MicroBatch]) -> tuple[int, MicroBatch]:
    """Return the number of steps, and a sequence for ranks that have fewer."""
    spare = common(ranks, [one.part(slice(0, 1)).on(torch.device("cpu")) for one in batches[:1]])
    if spare is None:
        raise InputError(f"{ranks.who}: no rank holds data; pass data on one of them at least")
    return max(ranks.gather(len(batches))), spare.on(next(model.parameters()).device)


@torch.no_grad()
def loss_of_ranks(ranks: Ranks, model: nn.Module, batches: Sequence[MicroBatch]) -> float:
    """Return the mean cross entropy of a model that ``fully_shard`` has spread, over the labels of all ranks that count."""
    steps, spare = _steps(ranks, model, batches)
    local, sums = BatchedLoss(ranks.who, model, ()), torch.zeros(2, dtype=torch.float64, device="cpu")
    with evaluating(model):
        for k in range(steps):
            with ranks.exchange():
                out = forward(model, batches[k] if k < len(batches) else spare, ranks.who)
            if k < len(batches):
                target = local.target(batches[k], out)
                of_batch = [float(local.summed(out.double(), target)), local.count(target)]
                sums += torch.tensor(of_batch, dtype=torch.float64, device="cpu")
    reshard(model)
    total, terms = ranks.sum(sums).tolist()
    return total / terms


class _Gathered(Mapping[str, Tensor]):
    """Tensors that are spread over the ranks, by name; all ranks read them in the same order, and each whole."""

    def __init__(self, ranks: Ranks, shards: Mapping[str, Tensor]) -> None:
        self.ranks, self.shards = ranks, shards

    def __getitem__(self, name: str) -> Tensor:
        return self.ranks.whole(self.shards[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def labels_are_later(ranks: Ranks, model: nn.Module, pairs: Iterable[tuple[Any, Any]]) -> bool | None:
    """Tell whether the model's own loss compares logits with the label one place later, by a sequence that all ranks call it
    with; None where no labels of the data are sequences.
    """

    def first() -> list[Any]:
        mappings = (dict(inputs) for inputs, target in pairs if target is None and isinstance(inputs, Mapping))
        examples = (x for x in mappings if isinstance(x.get("labels"), Tensor) and x["labels"].ndim > 1)
        rows = ((x, with_a_label(x["labels"])[:1]) for x in examples)
        return [samples(x, row, len(x["labels"])) for x, row in islice((pair for pair in rows if len(pair[1])), 1)]

    one = common(ranks, map_tensors(torch.Tensor.cpu, ranks.together(first)))
    if one is None:
        return None
    inputs = dict(on_device_of(model, one))
    labels = inputs.pop("labels")
    with ranks.exchange(), evaluating(model), torch.no_grad():
        comparison = compared_labels(model, inputs, labels)
    reshard(model)
    return comparison != "here"


def _check_sharding(ranks: Ranks, model: nn.Module, selection: MeasuredParts) -> None:
    """Refuse layouts, and settings of FSDP2, with which a backward pass does not average over the ranks."""
    for name, p in selection.parameters.items():
        if isinstance(p, DTensor):
            check_layout(ranks, name, p)
    for name, module in model.named_modules():
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()) if isinstance(module, FSDPModule) else ()
        for group in groups:
            if not group.reduce_grads or group.gradient_divide_factor is not None:
                setting = "set_gradient_divide_factor" if group.reduce_grads else "set_requires_gradient_sync(False)"
                raise InputError(
                    f"{ranks.who}: {setting} is in force on {name or 'the model'!r}, so a backward pass does not average the "
                    "gradients over the ranks; call sharpness on a model as fully_shard leaves it"
                )


def check_same_forward(ranks: Ranks, model: nn.Module, one: MicroBatch | None, *, sharded: bool = False) -> None:
    """Compare what the ranks' modules do with a micro-batch that all of them hold; nothing where there is none."""
    if ranks.size == 1 or one is None:
        return
    one = one.on(next(model.parameters()).device)

    def run(recorder: AbstractContextManager[Any]) -> None:
        with evaluating(model), torch.no_grad(), recorder:
            forward(model, one)

    state = [] if sharded else [*model.named_parameters(), *model.named_buffers()]
    check_same_function(ranks, run, [*state, *named_tensors(one.inputs)], sharded=sharded)
