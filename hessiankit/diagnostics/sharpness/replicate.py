"""Replicates of h: one forward pass for each micro-batch, one backward pass for each draw of labels."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.diagnostics.sharpness.batches import MicroBatch, check_devices, evaluating, forward, micro_batches
from hessiankit.diagnostics.sharpness.cotangents import cotangents
from hessiankit.diagnostics.sharpness.options import WHO, MeasuredParts, SharpnessOptions, measured_parts
from hessiankit.diagnostics.sharpness.probe import probe, watch_lookups
from hessiankit.diagnostics.sharpness.squares import SquaredGradients
from hessiankit.partition import Part
from hessiankit.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Replicates:
    """The sum of h over the entries of each part, for each micro-batch and draw, before any statistics.

    Attributes that are not named here are those of :class:`SharpnessReport`.

    Attributes:
        parts: The parts, in the order of the last axis of ``values``.
        values: Float64 (micro-batches, draws, parts) on the CPU.
        terms: How many terms each micro-batch's loss is the mean of, (micro-batches,).
        squared_norms: ||theta||^2 of each part, (parts,).
        rows: For each embedding that is looked up by rows, the sum over micro-batches of terms x h, summed along each row:
            (draws, rows).
        seen: Which of its rows the data looked up, (rows,).
        entries: For each parameter, the sum over micro-batches and draws of terms x h, in its shape; empty without histograms.
        unlikely: How many labels of one draw of all are expected not to be the likeliest one; infinite for squared error.
    """

    parts: tuple[Part, ...]
    values: Tensor
    terms: Tensor
    squared_norms: Tensor
    rows: dict[str, Tensor]
    seen: dict[str, Tensor]
    entries: Mapping[str, Tensor]
    sequences: int
    per: str
    loss: str
    kind: str
    seed: int
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    seconds: float = 0.0
    unlikely: float = math.inf
    metric: str = ""

    @property
    def draws(self) -> int:
        """Number of draws of the labels."""
        return int(self.values.shape[1])


def joined(runs: Sequence[Replicates]) -> Replicates:
    """Return the replicates of several runs, of one model at one point on sequences of different numbers, as those of one
    run on all.
    """
    if not runs:
        raise InputError(f"{WHO}: joined() was given nothing; pass at least one Replicates")
    first = runs[0]
    for other in runs[1:]:
        for name in ("parts", "draws", "per", "loss", "kind", "seed", "metric"):
            if getattr(first, name) != getattr(other, name):
                raise InputError(f"{WHO}: joined() was given Replicates whose {name} differ; repeat the measurements alike")
        if not torch.allclose(first.squared_norms, other.squared_norms, rtol=1e-6, atol=0.0):
            raise InputError(f"{WHO}: joined() was given Replicates of different parameters; measure all of them at one point")
    return replace(
        first,
        values=torch.cat([one.values for one in runs]),
        terms=torch.cat([one.terms for one in runs]),
        rows=_summed([one.rows for one in runs]),
        seen={k: v > 0 for k, v in _summed([{k: v.long() for k, v in one.seen.items()} for one in runs]).items()},
        entries=_summed([one.entries for one in runs]),
        sequences=sum(one.sequences for one in runs),
        unused=tuple(name for name in first.unused if all(name in one.unused for one in runs)),
        seconds=max(one.seconds for one in runs),
        unlikely=sum(one.unlikely for one in runs),
    )


def _summed(dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for one in dicts for name in one)
    return {name: torch.stack([one[name] for one in dicts if name in one]).sum(0) for name in names}


def replicates(
    model: nn.Module,
    data: Any,
    target: Any = None,
    own: SharpnessOptions | None = None,
    **options: Any,
) -> Replicates:
    """Return h on some data by micro-batch, draw and part; the options are those of :class:`SharpnessOptions`."""
    own = own or SharpnessOptions(**options)
    return replicates_of(model, read(model, data, target, own), own)


def read(model: nn.Module, data: Any, target: Any, own: SharpnessOptions) -> list[MicroBatch]:
    """Return the micro-batches of data by the options of a measurement."""
    step, numbers = own.micro_batch, own.numbers
    return micro_batches(WHO, model, data, target, loss=own.loss, micro_batch=step, numbers=numbers, shift=own.shift)


def replicates_of(model: nn.Module, batches: Sequence[MicroBatch], own: SharpnessOptions) -> Replicates:
    """Return h on some micro-batches; as :func:`replicates`."""
    start = time.perf_counter()
    parts, draws = measured_parts(model, own.parts, own.preconditioner), own.label_draws
    weights = list(parts.parameters.values())
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), watch_lookups(model, parts.parts) as seen:
        sums = SquaredGradients(WHO, parts, draws, own.histograms)
        for batch in batches:
            check_devices(WHO, batch, model)
        probe(WHO, model, batches, backward=True, copies=1 + own.histograms)
        for k, batch in enumerate(batches):
            output = forward(model, batch)
            drawn = cotangents(WHO, output, batch, own)
            if drawn is None:
                continue
            sums.begin(drawn.terms, drawn.sequences, drawn.unlikely)
            for d, gradient in enumerate(drawn):
                slopes = torch.autograd.grad(output, weights, gradient, retain_graph=d + 1 < draws, allow_unused=True)
                gradients = {n: g for n, g in zip(parts.parameters, slopes, strict=True) if g is not None}
                sums.add(d, parts.in_metric(gradients), seen)
                del slopes, gradients  # the next draw's take their place in memory
                if own.progress is not None:
                    own.progress("sharpness: draws", k * draws + d + 1, len(batches) * draws)
    if not sums.values:
        raise InputError(f"{WHO}: every label is -100 (not counted); keep at least one")
    return collected(sums, parts, own, seen, start)


def collected(
    sums: SquaredGradients, parts: MeasuredParts, own: SharpnessOptions, seen: Mapping[str, Tensor], start: float
) -> Replicates:
    """Return sums of squared gradients, and what is known of them, as replicates."""
    return Replicates(
        parts=parts.parts,
        values=torch.stack(sums.values),
        terms=torch.tensor(sums.terms, device="cpu"),
        squared_norms=parts.squared_norms(sums.whole),
        rows=sums.rows,
        seen={name: mask.cpu() for name, mask in seen.items() if name in sums.rows},
        entries=sums.entries,
        sequences=sums.sequences,
        per=own.per,
        loss=own.loss,
        kind=own.kind,
        seed=own.seed,
        frozen=parts.frozen,
        unused=tuple(name for name in parts.parameters if name in sums.unused),
        seconds=time.perf_counter() - start,
        unlikely=sums.unlikely,
        metric=parts.metric,
    )
