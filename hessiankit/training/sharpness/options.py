"""Options of a measurement of sharpness, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.structures import Structure
from hessiankit.landscape.preconditioner import preconditioner_of
from hessiankit.support.containers import samples
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.progress import Tell, silent
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.partition.types import parts_on
from hessiankit.training.sharpness.batches import MicroBatch

WHO = "sharpness"
LOSSES = ("cross_entropy", "mse")
PER = ("token", "sequence")
SAMPLED, EXACT = ("fisher-mc", "fisher-empirical"), ("ggn", "fisher", "hessian")
"""Kinds of :func:`hessiankit.hessian_operator` whose gradients are squared, and those whose diagonal is exact."""


@dataclass(frozen=True)
class SharpnessOptions:
    """Options of :func:`hessiankit.sharpness`, which explains them."""

    loss: str = "cross_entropy"
    draws: int = 8
    seed: int = 0
    per: str = "token"
    kind: str = "fisher-mc"
    micro_batch: int | None = None
    parts: Iterable[Part] | None = None
    histograms: bool = False
    numbers: Iterable[int] | None = None
    shift: bool | None = None
    progress: Tell | None = None
    preconditioner: Any = None

    def __post_init__(self) -> None:
        check_name(WHO, "loss", self.loss, LOSSES)
        check_name(WHO, "per", self.per, PER)
        check_name(WHO, "kind", self.kind, SAMPLED)
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1:
            raise InputError(f"{WHO}: draws={self.draws!r} draws no labels; pass 1 or more (2 or more for a standard error)")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InputError(f"{WHO}: seed={self.seed!r}; pass a whole number from 0 to 2^64 - 1")

    @property
    def label_draws(self) -> int:
        """Label vectors of a micro-batch: one where the labels are those of the data."""
        return self.draws if self.kind == "fisher-mc" else 1

    def tell(self, step: int, draw: int, steps: int) -> None:
        """Report a draw of a micro-batch as done."""
        (self.progress or silent)("sharpness: draws", step * self.label_draws + draw + 1, steps * self.label_draws)


@dataclass(frozen=True, eq=False)
class MeasuredParts:
    """The parts of a model that have a gradient, and the metric in which it is measured."""

    parts: tuple[Part, ...]
    parameters: dict[str, nn.Parameter]  # that they are parts of, by name
    frozen: tuple[str, ...]  # names of those that do not require a gradient
    metric: str = ""  # the name of the preconditioner P
    roots: Mapping[str, Tensor] = field(default_factory=dict)  # P^(-1/2) of each parameter, in its shape; empty without P

    def squared_norms(self, gather: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Return ||theta||^2 of each part in the metric, float64 (parts,) on the CPU; ``gather`` as in
        :class:`~hessiankit.training.sharpness.replicate.SquaredGradients`.
        """
        values = {n: gather(p.detach()) for n, p in self.parameters.items()}
        metric_values = {n: x / self.roots[n] if self.roots else x for n, x in values.items()}
        return torch.stack([part.squared_norm(metric_values[part.parameter]).cpu() for part in self.parts])

    def in_metric(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients times P^(-1/2)."""
        return {n: g * self.roots[n] for n, g in gradients.items()} if self.roots else gradients


def parts_by_flow(model: nn.Module, inputs: Any, size: int) -> tuple[Part, ...]:
    """Return the parts of a model; the flow of a batch's first sequences shows types that modules and names do not."""
    return parts_on(model, samples(inputs, slice(0, 2), size))


def measured_parts(
    model: nn.Module, parts: Iterable[Part] | None, preconditioner: Any = None, batch: MicroBatch | None = None
) -> MeasuredParts:
    """Return those of the given parts, or of all of a model, that have a gradient; a ``batch`` may show their types."""
    if parts is None:
        parts = model_parts(model) if batch is None else parts_by_flow(model, batch.inputs, len(batch.numbers))
    all_parts = tuple(getattr(parts, "parts", parts))
    model_parameters, names = dict(model.named_parameters()), set()
    for part in all_parts:
        if not isinstance(part, Part):
            raise InputError(
                f"{WHO}: parts holds a {type(part).__name__}; pass Parts, e.g. hessiankit.training.partition.model_parts(model)"
            )
        if part.parameter not in model_parameters:
            raise InputError(f"{WHO}: the model has no parameter {part.parameter!r}; make the parts from this model")
        if part.name in names:
            raise InputError(f"{WHO}: the part {part.name!r} is given twice; pass each once")
        names.add(part.name)
    parameter_names = {part.parameter for part in all_parts}
    parameters = {name: p for name, p in model_parameters.items() if name in parameter_names and p.requires_grad}
    if not parameters:
        raise InputError(f"{WHO}: no parameter requires a gradient; unfreeze some with requires_grad_(True)")
    frozen = tuple(name for name, p in model_parameters.items() if name in parameter_names and not p.requires_grad)
    selection = MeasuredParts(tuple(part for part in all_parts if part.parameter in parameters), parameters, frozen)
    return selection if preconditioner is None else replace(selection, **_metric(model, parameters, preconditioner))


def _metric(model: nn.Module, parameters: Mapping[str, nn.Parameter], preconditioner: Any) -> dict[str, Any]:
    """Return the name of a diagonal preconditioner, and its P^(-1/2) by parameter."""
    first, sizes = next(iter(parameters.values())), [p.numel() for p in parameters.values()]
    like = SimpleNamespace(
        shape=(sum(sizes),) * 2,
        slices=dict.fromkeys(parameters),
        shapes={name: tuple(p.shape) for name, p in parameters.items()},
        torch_dtype=first.dtype,
        device=first.device,
    )
    metric = preconditioner_of(WHO, preconditioner, like, model)
    (diagonal, *factors) = metric.root.structures
    if factors or type(diagonal) is not Structure:
        raise InputError(f"{WHO}: preconditioner is no diagonal; pass a torch optimizer, or tensors by parameter name")
    roots = zip(parameters.items(), diagonal.values.split(sizes), strict=True)
    return {"metric": metric.name, "roots": {name: root.view_as(p) for (name, p), root in roots}}
