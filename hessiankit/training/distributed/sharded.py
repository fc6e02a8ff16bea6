"""Models in DistributedDataParallel, and models whose parameters are spread over the ranks by FSDP2.

Of a sharded model all ranks do every backward pass together. The reduce-scatter of a backward pass averages over the ranks, so
the gradient of one rank's micro-batch alone does not exist. A micro-batch is therefore the union of the ranks' micro-batches at
the same step, as in a training step, and each rank's cotangent is scaled such that the average is the gradient of the mean over
the union. A rank with fewer steps runs one sequence of another rank with the cotangent zero. Gradients are gathered one
parameter at a time, and every rank squares them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.data import compared_labels, on_device_of, with_a_label
from hessiankit.support.containers import map_tensors, samples
from hessiankit.support.errors import InputError
from hessiankit.training.distributed.ranks import Ranks, check_same_forward, common
from hessiankit.training.distributed.shards import check_layout
from hessiankit.training.sharpness.batches import MicroBatch, check_devices, evaluating, forward
from hessiankit.training.sharpness.options import MeasuredParts, SharpnessOptions, measured_parts
from hessiankit.training.sharpness.probe import probe, watch_lookups
from hessiankit.training.sharpness.replicate import Drawn, Replicates, SquaredGradients, drawn_for


def unwrapped(who: str, model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the model itself; refuse FSDP's first generation."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise InputError(
            f"{who}: the model is FullyShardedDataParallel, which flattens parameters; shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    reshard(model)
    return model


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass, so that ``parameters()`` are the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has parameters that are spread over the ranks (FSDP2's ``fully_shard``)."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(isinstance(p, DTensor) for p in model.parameters())


def own_gradient(ranks: Ranks, model: nn.Module, batches: Sequence[BatchLoss]) -> tuple[dict[str, Tensor], float]:
    """Return the gradient of the loss over all ranks' batches by the model's own calls, this rank's pieces, and the loss."""
    loss = 0.0
    with gradients_aside(model), torch.enable_grad(), ranks.exchange():
        for batch in batches:
            value = batch.value() * batch.share
            loss += float(value.detach())
            (value * ranks.size).backward()  # FSDP averages over the ranks
        reshard(model)
        slopes = {name: p.grad for name, p in model.named_parameters() if name in batches[0].parameters}
    pieces = {name: x.to_local() if isinstance(x, DTensor) else batches[0].parameters[name] * 0 for name, x in slopes.items()}
    return pieces, math.fsum(ranks.gather(loss))


def sharded_replicates(ranks: Ranks, model: nn.Module, batches: Sequence[MicroBatch], options: SharpnessOptions) -> Replicates:
    """Return the replicates of the ranks' joint micro-batches, to every rank; their entries are gathered when they are read."""
    began = time.perf_counter()
    draws = options.label_draws
    parts = ranks.together(lambda: measured_parts(model, options.parts))
    descriptions = {f"part {k}": (part.name, part.type, part.layer) for k, part in enumerate(parts.parts)}
    ranks.agree(**{"the number of parts": len(descriptions)}, **descriptions)
    ranks.together(lambda: _check_sharding(ranks, model, parts))
    steps, spare = _steps(ranks, batches)

    def draw(batch: MicroBatch, output: Tensor) -> Drawn | None:
        check_devices(ranks.who, batch, model)
        return drawn_for(output, batch, options)

    with gradients_aside(model) as clear, evaluating(model), watch_lookups(model, parts.parts) as lookups, torch.enable_grad():
        sums = SquaredGradients(parts, options, ranks.whole)
        spare = spare.on(next(model.parameters()).device)
        with ranks.exchange():  # the same sequence on every rank, so that all of them find the same
            probe(model, [spare], backward=False, copies=0)
        check_same_forward(ranks, model, spare, sharded=True)
        for k in range(steps):
            batch = batches[k] if k < len(batches) else None
            with ranks.exchange():
                output = forward(model, batch or spare)
            sample = ranks.together(partial(draw, batch, output) if batch is not None else lambda: None)
            counts = ranks.gather((sample.terms, sample.sequences, sample.unlikely) if sample else (0, 0, 0.0))
            terms, sequences, unlikely = (sum(column) for column in zip(*counts, strict=True))
            if not terms:
                continue
            scale = ranks.size * math.sqrt(sample.terms / terms) if sample else 0.0
            sums.begin(terms, sequences, unlikely)
            for d, gradient in enumerate(sample.gradients if sample else repeat(torch.zeros_like(output), draws)):
                clear()
                with ranks.exchange():
                    output.backward(gradient * scale, retain_graph=d + 1 < draws)
                sums.add(d, _gradients(ranks, parts), lookups)
                options.tell(k, d, steps)
    if not sums.values:
        raise InputError(f"{ranks.who}: no rank holds a label that counts; pass data on one of them at least")
    row_masks = {name: ranks.sum(mask.cpu().double()) > 0 for name, mask in lookups.items()}
    replicates = sums.replicates(row_masks, began)
    return replace(replicates, entries=_Gathered(ranks, sums.entries), seconds=max(ranks.gather(replicates.seconds)))


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


def _gradients(ranks: Ranks, selection: MeasuredParts) -> dict[str, Tensor]:
    """Return the gradients of the backward pass before, of the mean over all ranks."""
    gradients = {}
    for name, p in selection.parameters.items():
        if not isinstance(p, DTensor):  # FSDP2 does not reduce what it does not shard
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            gradients[name] = ranks.sum(gradient.detach().clone()) / ranks.size
        elif p.grad is not None:
            gradients[name] = p.grad
    return gradients


def _steps(ranks: Ranks, batches: Sequence[MicroBatch]) -> tuple[int, MicroBatch]:
    """Return the number of steps, and a sequence for ranks that have fewer."""
    spare = common(ranks, [one.part(slice(0, 1)).on(torch.device("cpu")) for one in batches[:1]])
    if spare is None:
        raise InputError(f"{ranks.who}: no rank holds data; pass data on one of them at least")
    return max(ranks.gather(len(batches))), spare


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


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Save the caller's gradients and restore them afterwards; yield a function that clears those of a backward pass.

    ``model.zero_grad()`` would not: after a forward pass the outermost module's parameters are the gathered ones.
    """
    gradients = [(p, p.grad) for p in model.parameters()]

    def clear() -> None:
        for p, _ in gradients:
            p.grad = None

    try:
        clear()
        yield clear
    finally:
        reshard(model)
        for p, gradient in gradients:
            p.grad = gradient
