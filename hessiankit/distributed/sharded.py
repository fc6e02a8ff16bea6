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
from dataclasses import replace
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hessiankit.distributed.pieces import local, piece
from hessiankit.distributed.ranks import Ranks
from hessiankit.distributed.tally import Tally
from hessiankit.distributed.unwrapping import reshard
from hessiankit.errors import InputError
from hessiankit.estimation.batches import MicroBatch, check_devices
from hessiankit.estimation.calling import evaluating, forward
from hessiankit.estimation.histogram import Histogram
from hessiankit.estimation.lookups import watch_lookups
from hessiankit.estimation.probe import probe
from hessiankit.estimation.replicate import Replicates, chosen_parts
from hessiankit.estimation.seeds import Seeds, seeds
from hessiankit.parts import Part
from hessiankit.progress import Tell
from hessiankit.request.calling import map_tensors


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
