"""Sharpness of a model whose parameters are spread over the ranks by FSDP2: all ranks do every backward pass together.

The gradient of a rank's micro-batch alone is nowhere: the reduce-scatter of a backward pass averages over the ranks. So a
micro-batch is the union of what the ranks hold at the same step, as in a training step, and each rank's seed is scaled such
that the average is the gradient of the mean over the union. A rank with fewer steps goes through one sequence of another
rank's, with the seed zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from hessiankit.diagnostics.distributed.unwrapping import reshard
from hessiankit.diagnostics.sharpness.batches import MicroBatch, check_devices, evaluating, forward
from hessiankit.diagnostics.sharpness.cotangents import Seeds, seeds
from hessiankit.diagnostics.sharpness.probe import probe, watch_lookups
from hessiankit.diagnostics.sharpness.replicate import Replicates, chosen_parts
from hessiankit.diagnostics.sharpness.squares import PER_DECADE, Histogram, histogram, row_sums
from hessiankit.engine.problem.calling import map_tensors
from hessiankit.partition import Part
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a parameter.

    Attributes:
        shape: Of the piece.
        offset: The piece's first entry in the whole parameter, along each axis.
        copies: How many ranks hold the same piece.
        first: Whether this rank is the one among them that counts entries.
        sharded: Whether it is a piece, and not the whole parameter, on every rank by itself.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: int = 1
    first: bool = True
    sharded: bool = True

    def of(self, part: Part, local: Tensor) -> tuple[Tensor, ...]:
        """Return the views of a piece that belong to a part.

        Args:
            part: The part.
            local: A tensor of the piece's shape.

        Rows 2 to 4 of a parameter lie here, the part consists of its rows 1 to 2 and 4 to 7:

        >>> part = Part("w", "QK", "query", 0, "an example", 12, 0, ((1, 3), (4, 8)))
        >>> [view.tolist() for view in Piece((3, 1), (2, 0)).of(part, torch.tensor([[2], [3], [4]]))]
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
        return (
            torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=local.device)
        ) / self.copies


def piece(who: str, name: str, parameter: Tensor, size: int, rank: int) -> Piece:
    """Return where this rank's piece of a parameter lies.

    Args:
        who: What an error message starts with.
        name: The parameter's name.
        parameter: A DTensor, or a tensor that every rank holds whole.
        size: Number of ranks.
        rank: This rank.

    Raises:
        InputError: If it is laid out in another way than FSDP2 does on all ranks, alone or with replicas.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Piece(shape, (0,) * len(shape), size, rank == 0, sharded=False)
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
    return Piece(tuple(local), tuple(offset), math.prod(mesh.size(k) for k in replicas), first)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Tally:
    """This rank's share of what is added up: squares of its pieces of the gradients."""

    def __init__(
        self,
        ranks: Ranks,
        parts: tuple[Part, ...],
        parameters: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        draws: int,
        histograms: bool,
    ) -> None:
        self.ranks, self.parts, self.parameters, self.pieces, self.draws = ranks, parts, parameters, pieces, draws
        self.values: list[Tensor] = []
        self.terms: list[int] = []
        self.rows: dict[str, Tensor] = {}
        self.unused = set(parameters)
        self.entries: dict[str, Tensor] = {}
        if histograms:
            for name, p in parameters.items():
                wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype
                self.entries[name] = torch.zeros_like(local(p.detach()), dtype=wide)

    def begin(self, terms: int) -> None:
        """Begin a micro-batch."""
        self.values.append(torch.zeros(self.draws, len(self.parts), dtype=torch.float64))
        self.terms.append(terms)

    def add(self, draw: int, seen: dict[str, Tensor]) -> None:
        """Add the gradients of a draw, which the parameters hold."""
        gradients = {n: self._gradient(n, p) for n, p in self.parameters.items()}
        arrived = {n: g for n, g in gradients.items() if g is not None}
        self.unused -= set(arrived)
        for k, part in enumerate(self.parts):
            if part.parameter in arrived:
                self.values[-1][draw, k] = self.pieces[part.parameter].squared_norm(part, arrived[part.parameter]).cpu()
        for name in seen:
            self._add_rows(name, draw, arrived.get(name))
        for name, total in self.entries.items():
            if name in arrived:
                wide = arrived[name].to(total.dtype)
                total.addcmul_(wide, wide, value=float(self.terms[-1]))

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by type over all ranks' pieces; a piece that several ranks hold is counted by the first."""
        divisor = float(sum(self.terms)) * self.draws

        def views(kind: str) -> Iterator[Tensor]:
            for part in self.parts:
                own = self.pieces[part.parameter]
                if part.type == kind and own.first:
                    yield from (view / divisor for view in own.of(part, self.entries[part.parameter]))

        own = {kind: histogram(views(kind)) for kind in dict.fromkeys(part.type for part in self.parts)}
        everywhere = self.ranks.gather(own)
        return {kind: merged([its[kind] for its in everywhere]) for kind in own}

    def _gradient(self, name: str, p: nn.Parameter) -> Tensor | None:
        if self.pieces[name].sharded:
            return None if p.grad is None else local(p.grad)
        own = torch.zeros_like(p) if p.grad is None else p.grad  # FSDP2 leaves alone what it does not shard
        return self.ranks.sum(own.detach().clone()) / self.ranks.size

    def _add_rows(self, name: str, draw: int, gradient: Tensor | None) -> None:
        rows = self.rows.setdefault(name, torch.zeros(self.draws, self.parameters[name].shape[0], dtype=torch.float64))
        if gradient is not None:
            own = self.pieces[name]
            sums = row_sums(gradient) * (self.terms[-1] / own.copies)
            rows[draw, own.offset[0] : own.offset[0] + own.shape[0]] += sums


def merged(found: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all entries that several histograms count.

    >>> one, other = histogram([torch.tensor([0.0, 1.0])]), histogram([torch.tensor([1.0, 100.0])])
    >>> both = histogram([torch.tensor([0.0, 1.0, 1.0, 100.0])])
    >>> merged([one, other]) == both
    True
    """
    bins: dict[int, int] = {}
    for one in found:
        for k, count in enumerate(one.counts, round(one.first * PER_DECADE)):
            bins[k] = bins.get(k, 0) + count
    low, high = (min(bins), max(bins)) if bins else (0, -1)
    counts = tuple(bins.get(k, 0) for k in range(low, high + 1))
    return Histogram(
        low / PER_DECADE, counts, sum(x.zeros for x in found), sum(x.negative for x in found), sum(x.entries for x in found)
    )


def sharded(
    ranks: Ranks,
    model: nn.Module,
    batches: Sequence[MicroBatch],
    *,
    loss: str,
    draws: int,
    seed: int,
    per: str,
    estimator: str,
    parts: Iterable[Part] | None,
    histograms: bool,
    progress: Tell | None,
) -> tuple[Replicates, dict[str, Histogram]]:
    """Return the replicates of the ranks' joint micro-batches, and the histograms by type, to every rank.

    Memory on each rank: that of a training step with its own micro-batch, and with histograms one number for each entry
    of its pieces. What is sent beside FSDP2's own traffic: a few numbers a step, and at the end one number a part, draw and step.

    Args:
        ranks: The ranks.
        model: Sharded by ``fully_shard``.
        batches: This rank's micro-batches; there may be none.
        loss: As in :func:`hessiankit.sharpness`, like the options that follow.
        draws: Draws of the labels.
        seed: Of the labels.
        per: ``"token"`` or ``"sequence"``.
        estimator: ``"fisher"`` or ``"empirical_fisher"``.
        parts: What is told apart.
        histograms: Whether to make histograms.
        progress: Called with (what, done, total).

    Raises:
        InputError: On every rank, if one cannot use its data, or the model is set up in a way that changes its gradients.
    """
    began = time.perf_counter()
    draws = draws if estimator == "fisher" else 1
    chosen, parameters, frozen = ranks.together(lambda: chosen_parts(model, parts))
    _agree_on_parts(ranks, chosen)
    pieces = ranks.together(lambda: {n: piece(ranks.who, n, p, ranks.size, ranks.rank) for n, p in parameters.items()})
    ranks.together(lambda: _check_reduction(ranks.who, model))
    steps, spare = _steps(ranks, batches)
    tally = Tally(ranks, chosen, parameters, pieces, draws, histograms)
    sequences = 0

    def draw(batch: MicroBatch, output: Tensor) -> Seeds | None:
        check_devices(ranks.who, batch, model)
        if not output.requires_grad:
            raise InputError(f"{ranks.who}: the model's output does not depend on its parameters; do not detach it in forward")
        return seeds(ranks.who, output, batch, loss=loss, per=per, estimator=estimator, draws=draws, seed=seed)

    with gradients_aside(model) as clear, evaluating(model), watch_lookups(model, chosen) as seen, torch.enable_grad():
        spare = _on(spare, model)
        with ranks.exchange():  # the same sequence on every rank, so that all of them find the same
            (spare,) = probe(ranks.who, model, [spare], backward=False, copies=0)
        for k in range(steps):
            batch = _settled(batches[k], spare) if k < len(batches) else None
            with ranks.exchange():
                output = forward(model, batch or spare)
            drawn = ranks.together(partial(draw, batch, output) if batch is not None else lambda: None)
            held = ranks.gather((drawn.terms, drawn.sequences) if drawn else (0, 0))
            terms, sequences = sum(n for n, _ in held), sequences + sum(n for _, n in held)
            if not terms:
                continue
            scale = ranks.size * math.sqrt(drawn.terms / terms) if drawn else 0.0
            tally.begin(terms)
            for d, gradient in enumerate(drawn or repeat(torch.zeros_like(output), draws)):
                clear()
                with ranks.exchange():
                    output.backward(gradient * scale, retain_graph=d + 1 < draws)
                tally.add(d, seen)
                if progress is not None:
                    progress("sharpness: draws", k * draws + d + 1, steps * draws)
    if not tally.values:
        raise InputError(f"{ranks.who}: no rank holds a label that counts; pass data on one of them at least")
    values = _finite(ranks, chosen, ranks.sum(torch.stack(tally.values)))
    norms = torch.stack([pieces[x.parameter].squared_norm(x, local(parameters[x.parameter].detach())).cpu() for x in chosen])
    looked_up = {name: mask.cpu() for name, mask in seen.items() if name in tally.rows}
    found = Replicates(
        chosen,
        values,
        torch.tensor(tally.terms),
        ranks.sum(norms),
        {name: ranks.sum(rows) for name, rows in tally.rows.items()},
        {name: ranks.sum(mask.double()) > 0 for name, mask in looked_up.items()},
        {},
        sequences,
        per,
        loss,
        estimator,
        seed,
        frozen,
        tuple(name for name in parameters if name in set.intersection(*ranks.gather(tally.unused))),
        max(ranks.gather(time.perf_counter() - began)),
    )
    return found, tally.histograms() if histograms else {}


def _steps(ranks: Ranks, batches: Sequence[MicroBatch]) -> tuple[int, MicroBatch]:
    """Return how many steps there are, and a sequence for ranks that have fewer; one whose labels' place is open, if any is."""
    own = sorted(batches, key=_is_settled)[:1]
    cut = [one.part(slice(0, 1)) for one in own]
    sent = [replace(one, inputs=map_tensors(Tensor.cpu, one.inputs), target=one.target.cpu()) for one in cut]
    held = ranks.gather((len(batches), sent))
    found = sorted((one for _, its in held for one in its), key=_is_settled)
    if not found:
        raise InputError(f"{ranks.who}: no rank holds data; pass data on one of them at least")
    return max(number for number, _ in held), found[0]


def _is_settled(batch: MicroBatch) -> bool:
    return batch.shifted is not None


def _settled(batch: MicroBatch, probed: MicroBatch) -> MicroBatch:
    return batch if _is_settled(batch) else replace(batch, shifted=probed.shifted)


def _on(batch: MicroBatch, model: nn.Module) -> MicroBatch:
    device = next(model.parameters()).device
    return replace(batch, inputs=map_tensors(lambda x: x.to(device), batch.inputs), target=batch.target.to(device))


def _agree_on_parts(ranks: Ranks, parts: Sequence[Part]) -> None:
    own = [(part.name, part.type, part.layer) for part in parts]
    ranks.agree(**{"the number of parts": len(own)}, **{f"part {k}": each for k, each in enumerate(own)})


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


def _finite(ranks: Ranks, parts: Sequence[Part], values: Tensor) -> Tensor:
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        part = parts[int(bad.nonzero()[0, 2])]
        raise InputError(
            f"{ranks.who}: the gradient of {part.name!r} is NaN or infinite, though the outputs are finite; use a wider "
            "dtype or an eps > 0"
        )
    return values


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
