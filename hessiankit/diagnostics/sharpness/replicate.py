"""Replicates of h: one forward pass for each micro-batch, one backward pass for each draw of labels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.diagnostics.sharpness.batches import check_devices, evaluating, forward, micro_batches
from hessiankit.diagnostics.sharpness.cotangents import Sampler, seeds
from hessiankit.diagnostics.sharpness.probe import probe, watch_lookups
from hessiankit.diagnostics.sharpness.squares import part_squares, row_sums
from hessiankit.partition import Part, model_parts
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell

WHO = "sharpness"
LOSSES = ("cross_entropy", "mse")
PER = ("token", "sequence")
ESTIMATORS = ("fisher", "empirical_fisher")


@dataclass(frozen=True, eq=False)
class Replicates:
    """What was measured, before any statistics: for each micro-batch, draw and part, the sum of h over the part's entries.

    Attributes:
        parts: The parts, in the order of the last axis of ``values``.
        values: Float64 (micro-batches, draws, parts) on the CPU.
        terms: How many terms each micro-batch's loss is the mean of, (micro-batches,).
        squared_norms: ||theta||^2 of each part, (parts,).
        rows: For each embedding that is looked up by rows, the sum over micro-batches of terms x h, summed along each row:
            (draws, rows).
        seen: Which of its rows the data looked up, (rows,).
        entries: For each parameter, the sum over micro-batches and draws of terms x h, in its shape; empty without histograms.
        sequences: Number of sequences, of which at least one position counts.
        per: ``"token"`` or ``"sequence"``: what a term is.
        loss: ``"cross_entropy"`` or ``"mse"``.
        estimator: ``"fisher"``, ``"empirical_fisher"``, or ``"ggn"`` and ``"hessian"`` for exact values.
        seed: Of the labels.
        frozen: Parameters that were left out because they do not require a gradient.
        unused: Parameters that no output depended on; their h is 0.
        seconds: Time taken.
    """

    parts: tuple[Part, ...]
    values: Tensor
    terms: Tensor
    squared_norms: Tensor
    rows: dict[str, Tensor]
    seen: dict[str, Tensor]
    entries: dict[str, Tensor]
    sequences: int
    per: str
    loss: str
    estimator: str
    seed: int
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def draws(self) -> int:
        """Number of draws of the labels."""
        return int(self.values.shape[1])


def joined(found: Sequence[Replicates]) -> Replicates:
    """Return the replicates of several runs on different sequences as those of one run on all of them.

    Args:
        found: Replicates of the same model at the same point, parts, draws and seed, whose sequences have different numbers.

    Raises:
        InputError: If they do not go together.
    """
    if not found:
        raise InputError(f"{WHO}: joined() was given nothing; pass at least one Replicates")
    first = found[0]
    for other in found[1:]:
        for name in ("parts", "draws", "per", "loss", "estimator", "seed"):
            if getattr(first, name) != getattr(other, name):
                raise InputError(f"{WHO}: joined() was given Replicates whose {name} differ; repeat the measurements alike")
        if not torch.allclose(first.squared_norms, other.squared_norms, rtol=1e-6, atol=0.0):
            raise InputError(f"{WHO}: joined() was given Replicates of different parameters; measure all of them at one point")
    return Replicates(
        first.parts,
        torch.cat([one.values for one in found]),
        torch.cat([one.terms for one in found]),
        first.squared_norms,
        _summed([one.rows for one in found]),
        {k: v > 0 for k, v in _summed([{k: v.long() for k, v in one.seen.items()} for one in found]).items()},
        _summed([one.entries for one in found]),
        sum(one.sequences for one in found),
        first.per,
        first.loss,
        first.estimator,
        first.seed,
        first.frozen,
        tuple(name for name in first.unused if all(name in one.unused for one in found)),
        max(one.seconds for one in found),
    )


def _summed(dicts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for one in dicts for name in one)
    return {name: torch.stack([one[name] for one in dicts if name in one]).sum(0) for name in names}


def replicates(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: str = "cross_entropy",
    draws: int = 8,
    seed: int = 0,
    per: str = "token",
    estimator: str = "fisher",
    micro_batch: int | None = None,
    parts: Iterable[Part] | None = None,
    histograms: bool = False,
    numbers: Iterable[int] | None = None,
    shift: bool | None = None,
    sampler: Sampler | None = None,
    progress: Tell | None = None,
) -> Replicates:
    """Measure h on some data, and return it by micro-batch, draw and part; :func:`hessiankit.sharpness` explains the arguments.

    Args:
        model: The model.
        data: One batch or several.
        target: The target of one batch.
        loss: ``"cross_entropy"`` or ``"mse"``.
        draws: Draws of the labels.
        seed: Of the labels.
        per: ``"token"`` or ``"sequence"``.
        estimator: ``"fisher"`` or ``"empirical_fisher"``.
        micro_batch: Sequences in a micro-batch.
        parts: What is told apart; :func:`hessiankit.partition.model_parts` by default.
        histograms: Whether to add up h entry by entry, which takes as much memory as the parameters.
        numbers: Numbers of the sequences in the whole data, where these are a part of it.
        shift: Whether the labels of a mapping are the tokens themselves.
        sampler: Draws the labels instead; for tests of the estimator.
        progress: Called with (what, done, total).

    Raises:
        InputError: If an argument cannot be used, or something is not finite.
    """
    start = time.perf_counter()
    check_options(loss, draws, seed, per, estimator)
    batches = micro_batches(WHO, data, target, micro_batch=micro_batch, numbers=numbers, shift=shift)
    draws = draws if estimator == "fisher" else 1
    chosen, parameters, frozen = chosen_parts(model, parts)
    weights = list(parameters.values())
    values, terms, unused = [], [], set(parameters)
    rows: dict[str, Tensor] = {}
    sequences = 0
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), watch_lookups(model, chosen) as seen:
        entries = {name: _accumulator(p) for name, p in parameters.items()} if histograms else {}
        for batch in batches:
            check_devices(WHO, batch, model)
        batches = probe(WHO, model, batches, backward=True, copies=1 + histograms)
        for k, batch in enumerate(batches):
            output = forward(model, batch)
            drawn = seeds(WHO, output, batch, loss=loss, per=per, estimator=estimator, draws=draws, seed=seed, sampler=sampler)
            if drawn is None:
                continue
            if not output.requires_grad:
                raise InputError(f"{WHO}: the model's output does not depend on its parameters; do not detach it in forward")
            terms.append(drawn.terms)
            sequences += drawn.sequences
            found = torch.empty(draws, len(chosen), dtype=torch.float64)
            for d, gradient in enumerate(drawn):
                arrived = torch.autograd.grad(output, weights, gradient, retain_graph=d + 1 < draws, allow_unused=True)
                gradients = {n: g for n, g in zip(parameters, arrived, strict=True) if g is not None}
                unused -= set(gradients)
                found[d] = part_squares(WHO, chosen, gradients)
                for name in seen:
                    if name in gradients:
                        sums = row_sums(gradients[name])
                        rows.setdefault(name, torch.zeros(draws, len(sums), dtype=torch.float64))[d] += drawn.terms * sums
                for name, total in entries.items():
                    if name in gradients:
                        wide = gradients[name].to(total.dtype)
                        total.addcmul_(wide, wide, value=float(drawn.terms))
                del arrived, gradients  # the next draw's take their place in memory
                if progress is not None:
                    progress("sharpness: draws", k * draws + d + 1, len(batches) * draws)
            values.append(found)
        looked_up = {name: mask.cpu() for name, mask in seen.items() if name in rows}
    if not values:
        raise InputError(f"{WHO}: every label is -100 (not counted); keep at least one")
    return Replicates(
        chosen,
        torch.stack(values),
        torch.tensor(terms),
        torch.stack([part.squared_norm(parameters[part.parameter].detach()).cpu() for part in chosen]),
        rows,
        looked_up,
        entries,
        sequences,
        per,
        loss,
        estimator,
        seed,
        frozen,
        tuple(name for name in parameters if name in unused),
        time.perf_counter() - start,
    )


def check_options(loss: str, draws: int, seed: int, per: str, estimator: str) -> None:
    """Check the options of a measurement that are names and numbers.

    Raises:
        InputError: If one of them cannot be used.
    """
    for name, value, known in (("loss", loss, LOSSES), ("per", per, PER), ("estimator", estimator, ESTIMATORS)):
        if value not in known:
            raise InputError(f"{WHO}: {name}={value!r} is not known; pass one of {', '.join(map(repr, known))}")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise InputError(f"{WHO}: draws={draws!r} draws no labels; pass 1 or more (2 or more for a standard error)")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InputError(f"{WHO}: seed={seed!r}; pass a whole number from 0 to 2^64 - 1")


def chosen_parts(
    model: nn.Module, parts: Iterable[Part] | None
) -> tuple[tuple[Part, ...], dict[str, nn.Parameter], tuple[str, ...]]:
    """Return the parts that can be measured, their parameters, and the names of those that are frozen."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{WHO}: expected a torch.nn.Module, got {type(model).__name__}")
    listed = tuple(model_parts(model) if parts is None else getattr(parts, "parts", parts))
    wrong = next((part for part in listed if not isinstance(part, Part)), None)
    if wrong is not None:
        raise InputError(f"{WHO}: parts holds a {type(wrong).__name__}; pass Parts, e.g. hessiankit.partition.model_parts(model)")
    known = dict(model.named_parameters())
    missing = next((part.parameter for part in listed if part.parameter not in known), None)
    if missing is not None:
        raise InputError(f"{WHO}: the model has no parameter {missing!r}; make the parts from this model")
    names = [part.name for part in listed]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise InputError(f"{WHO}: the part {twice!r} is given twice; pass each once")
    wanted = {part.parameter for part in listed}
    frozen = tuple(name for name, p in known.items() if name in wanted and not p.requires_grad)
    chosen = tuple(part for part in listed if part.parameter not in frozen)
    if not chosen:
        raise InputError(f"{WHO}: no parameter requires a gradient; unfreeze some with requires_grad_(True)")
    return chosen, {name: p for name, p in known.items() if name in wanted and p.requires_grad}, frozen


def _accumulator(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float32 if p.dtype.itemsize < 4 else p.dtype, requires_grad=False)
