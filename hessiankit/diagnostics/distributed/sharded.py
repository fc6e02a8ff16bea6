"""Sharpness of a model whose parameters are spread over the ranks by FSDP2: all ranks do every backward pass together.

The reduce-scatter of a backward pass averages over the ranks, so the gradient of one rank's micro-batch alone does not exist. A
micro-batch is therefore the union of the ranks' micro-batches at the same step, as in a training step, and each rank's cotangent
is scaled such that the average is the gradient of the mean over the union. A rank with fewer steps runs one sequence of another
rank with the cotangent zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hessiankit.diagnostics.distributed.ranks import Ranks
from hessiankit.diagnostics.distributed.same_function import check_same_function, forward_of
from hessiankit.diagnostics.distributed.unwrapping import reshard
from hessiankit.diagnostics.sharpness.batches import MicroBatch, check_devices, evaluating, forward
from hessiankit.diagnostics.sharpness.cotangents import Cotangents, cotangents
from hessiankit.diagnostics.sharpness.options import MeasuredParts, SharpnessOptions, measured_parts
from hessiankit.diagnostics.sharpness.probe import probe, watch_lookups
from hessiankit.diagnostics.sharpness.replicate import Replicates
from hessiankit.diagnostics.sharpness.squares import Histogram, SquaredGradients, histogram, merged, row_sums
from hessiankit.partition import Part
from hessiankit.support.errors import InputError


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a parameter."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]  # of its first entry in the whole parameter, along each axis
    copies: int = 1  # how many ranks hold the same shard
    first: bool = True  # whether this rank is the first among them, which counts the entries
    sharded: bool = True  # False where every rank holds a plain tensor

    def of(self, part: Part, local: Tensor) -> tuple[Tensor, ...]:
        """Return the views of a shard, or of a tensor of its shape, that belong to a part.

        The shard holds rows 2 to 4 of a parameter, the part consists of its rows 1 to 2 and 4 to 7:

        >>> part = Part("w", "QK", "query", 0, "an example", 12, 0, ((1, 3), (4, 8)))
        >>> [view.tolist() for view in LocalShard((3, 1), (2, 0)).of(part, torch.tensor([[2], [3], [4]]))]
        [[[2]], [[4]]]
        """
        if part.axis is None:
            return (local,)
        start, length = self.offset[part.axis], self.shape[part.axis]
        cut = ((max(first - start, 0), min(after - start, length)) for first, after in part.segments)
        return tuple(local.narrow(part.axis, first, after - first) for first, after in cut if first < after)

    def squared_norm(self, part: Part, local: Tensor) -> Tensor:
        """Return this rank's share of the sum of the part's squared entries, in double precision; the ranks' shares add up."""
        squares = [view.double().square().sum() for view in self.of(part, local)]
        none = torch.zeros((), dtype=torch.float64, device=local.device)
        return (torch.stack(squares).sum() if squares else none) / self.copies


def local_shard(who: str, name: str, parameter: Tensor, size: int, rank: int) -> LocalShard:
    """Return the place of this rank's shard in a DTensor, or in a tensor that every rank holds whole."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return LocalShard(shape, (0,) * len(shape), size, rank == 0, sharded=False)
    mesh, placements = parameter.device_mesh, parameter.placements
    known = all(type(p) in (Shard, Replicate) for p in placements) and sum(type(p) is Shard for p in placements) == 1
    if not known or mesh.size() != size:
        raise InputError(
            f"{who}: {name!r} is laid out as {placements} over {mesh.size()} of {size} ranks; expected fully_shard over all "
            "ranks of the group, with or without replicas; tensor, pipeline and expert parallelism are not supported"
        )
    local, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    replicas = [k for k, p in enumerate(placements) if type(p) is Replicate]
    coordinate = mesh.get_coordinate()
    first = coordinate is not None and all(coordinate[k] == 0 for k in replicas)
    return LocalShard(tuple(local), tuple(offset), math.prod(mesh.size(k) for k in replicas), first)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedSquares(SquaredGradients):
    """Squares of this rank's shards of the gradients; the ranks' sums add up to those of the whole gradients.
    ``embeddings``, the parameters that are looked up by rows, are the same on every rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        measured: MeasuredParts,
        shards: dict[str, LocalShard],
        draws: int,
        histograms: bool,
        embeddings: Iterable[str],
    ) -> None:
        super().__init__(ranks.who, measured.parts, measured.parameters, draws, histograms)
        self.ranks, self.shards = ranks, shards
        for name in embeddings:
            self._rows_of(name)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards of the gradients of the backward pass before."""
        found = {}
        for name, p in self.parameters.items():
            if not self.shards[name].sharded:  # FSDP2 does not reduce what it does not shard
                own = torch.zeros_like(p) if p.grad is None else p.grad
                found[name] = self.ranks.sum(own.detach().clone()) / self.ranks.size
            elif p.grad is not None:
                found[name] = local(p.grad)
        return found

    def part_squares(self, gradients: Mapping[str, Tensor]) -> Tensor:
        squares = torch.zeros(len(self.parts), dtype=torch.float64)
        for k, part in enumerate(self.parts):
            if (gradient := gradients.get(part.parameter)) is not None:
                squares[k] = self.shards[part.parameter].squared_norm(part, gradient)
        return squares

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by type over all ranks; of several copies of a shard the first one counts."""
        divisor = float(sum(self.terms)) * self.draws

        def views(kind: str) -> Iterator[Tensor]:
            for part in self.parts:
                shard = self.shards[part.parameter]
                if part.type == kind and shard.first:
                    yield from (view / divisor for view in shard.of(part, self.entries[part.parameter]))

        own = {kind: histogram(views(kind)) for kind in dict.fromkeys(part.type for part in self.parts)}
        everywhere = self.ranks.gather(own)
        return {kind: merged([of_rank[kind] for of_rank in everywhere]) for kind in own}

    def _add_rows(self, name: str, draw: int, gradient: Tensor) -> None:
        shard = self.shards[name]
        sums = row_sums(gradient) * (self.terms[-1] / shard.copies)
        self.rows[name][draw, shard.offset[0] : shard.offset[0] + shard.shape[0]] += sums

    def _zeros(self, p: Tensor) -> Tensor:
        return super()._zeros(local(p))


def sharded_replicates(
    ranks: Ranks, model: nn.Module, batches: Sequence[MicroBatch], options: SharpnessOptions
) -> tuple[Replicates, dict[str, Histogram]]:
    """Return the replicates of the ranks' joint micro-batches, and the histograms by type, to every rank.

    Memory on each rank: that of a training step with its own micro-batch, and with histograms one number for each entry
    of its shards. Communication beside FSDP2's own: a few numbers a step, and at the end one number a part, draw and step.
    """
    began = time.perf_counter()
    draws = options.label_draws
    measured = ranks.together(lambda: measured_parts(model, options.parts))
    chosen, parameters = measured.parts, measured.parameters
    named = {f"part {k}": (part.name, part.type, part.layer) for k, part in enumerate(chosen)}
    ranks.agree(**{"the number of parts": len(chosen)}, **named)
    shards = ranks.together(lambda: {n: local_shard(ranks.who, n, p, ranks.size, ranks.rank) for n, p in parameters.items()})
    ranks.together(lambda: _check_reduction(ranks.who, model))
    steps, spare = _steps(ranks, batches)
    sequences, unlikely = 0, 0.0

    def draw(batch: MicroBatch, output: Tensor) -> Cotangents | None:
        check_devices(ranks.who, batch, model)
        return cotangents(ranks.who, output, batch, options)

    with gradients_aside(model) as clear, evaluating(model), watch_lookups(model, chosen) as seen, torch.enable_grad():
        sums = ShardedSquares(ranks, measured, shards, draws, options.histograms, seen)
        spare = spare.on(next(model.parameters()).device)
        with ranks.exchange():  # the same sequence on every rank, so that all of them find the same
            (spare,) = probe(ranks.who, model, [spare], backward=False, copies=0)
        if ranks.size > 1:
            check_same_function(ranks, *forward_of(model, spare), sharded=True)
        for k in range(steps):
            batch = batches[k] if k < len(batches) else None
            batch = replace(batch, shifted=spare.shifted) if batch is not None and not _is_settled(batch) else batch
            with ranks.exchange():
                output = forward(model, batch or spare)
            drawn = ranks.together(partial(draw, batch, output) if batch is not None else lambda: None)
            held = ranks.gather((drawn.terms, drawn.sequences, drawn.unlikely) if drawn else (0, 0, 0.0))
            terms, more, other = (sum(column) for column in zip(*held, strict=True))
            sequences, unlikely = sequences + more, unlikely + other
            if not terms:
                continue
            scale = ranks.size * math.sqrt(drawn.terms / terms) if drawn else 0.0
            sums.begin(terms)
            for d, gradient in enumerate(drawn or repeat(torch.zeros_like(output), draws)):
                clear()
                with ranks.exchange():
                    output.backward(gradient * scale, retain_graph=d + 1 < draws)
                sums.add(d, sums.gradients(), seen)
                if options.progress is not None:
                    options.progress("sharpness: draws", k * draws + d + 1, steps * draws)
    if not sums.values:
        raise InputError(f"{ranks.who}: no rank holds a label that counts; pass data on one of them at least")
    norms = torch.stack([shards[x.parameter].squared_norm(x, local(parameters[x.parameter].detach())).cpu() for x in chosen])
    found = Replicates(
        chosen,
        sums.check_finite(ranks.sum(torch.stack(sums.values))),
        torch.tensor(sums.terms),
        ranks.sum(norms),
        {name: ranks.sum(rows) for name, rows in sums.rows.items()},
        {name: ranks.sum(mask.cpu().double()) > 0 for name, mask in seen.items()},
        {},
        sequences,
        options.per,
        options.loss,
        options.kind,
        options.seed,
        measured.frozen,
        tuple(name for name in parameters if name in set.intersection(*ranks.gather(sums.unused))),
        max(ranks.gather(time.perf_counter() - began)),
        unlikely,
    )
    return found, sums.histograms() if options.histograms else {}


def _steps(ranks: Ranks, batches: Sequence[MicroBatch]) -> tuple[int, MicroBatch]:
    """Return the number of steps, and a sequence for ranks that have fewer: one whose label shift is not known yet, if any."""
    own = sorted(batches, key=_is_settled)[:1]
    sent = [one.part(slice(0, 1)).on(torch.device("cpu")) for one in own]
    held = ranks.gather((len(batches), sent))
    found = sorted((one for _, of_rank in held for one in of_rank), key=_is_settled)
    if not found:
        raise InputError(f"{ranks.who}: no rank holds data; pass data on one of them at least")
    return max(number for number, _ in held), found[0]


def _is_settled(batch: MicroBatch) -> bool:
    return batch.shifted is not None


def _check_reduction(who: str, model: nn.Module) -> None:
    """Refuse settings of FSDP2 with which a backward pass does not average over the ranks."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            if not group.reduce_grads or group.gradient_divide_factor is not None:
                what = "set_gradient_divide_factor" if group.reduce_grads else "set_requires_gradient_sync(False)"
                raise InputError(
                    f"{who}: {what} is in force on {name or 'the model'!r}, so a backward pass does not average the gradients "
                    "over the ranks; call sharpness on a model as fully_shard leaves it"
                )


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put the caller's gradients aside, and back afterwards; yield a function that clears those of a backward pass.

    ``model.zero_grad()`` would not: after a forward pass the outermost module's parameters are the gathered ones.
    """
    before = [(p, p.grad) for p in model.parameters()]

    def clear() -> None:
        for p, _ in before:
            p.grad = None

    try:
        clear()
        yield clear
    finally:
        reshard(model)
        for p, gradient in before:
            p.grad = gradient
