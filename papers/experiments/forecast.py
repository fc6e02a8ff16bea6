"""The dry run of an experiment: its numbers with their places of print, parameters, tokens, memory and hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hessiankit.support.tables import as_text, table
from papers.experiments.catalogue import Experiment, Model, numbers_of
from papers.experiments.experts import Experts
from papers.experiments.spec import Spec, counted

BYTES = {"adamw": 16, "muon": 16, "adam_mini": 16, "lion": 12}
"""Bytes a parameter: float32 of weight, gradient and moments. Muon's matrices need 12; Adam-mini's v is stored whole."""
UNITS = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class Forecast:
    """What a run needs.

    Attributes:
        parameters: Entries of all parameters.
        active: Entries that a token passes through.
        tokens: Tokens of all updates.
        flops: Floating-point operations, 6 a parameter and token, and 12 L T d a token for the attention's products
            (Chowdhery et al. 2022, App. B); what is recomputed in the backward pass is not counted.
        memory: Bytes of parameters, gradients and optimizer.
        activations: Bytes of one sequence's activations, with the recomputation of blocks: each block's input and one block's
            (Korthikanti et al. 2022, Eq. 2), in the run's precision.
    """

    parameters: int
    active: int
    tokens: int
    flops: float
    memory: int
    activations: float

    def hours(self, rate: float) -> float:
        """Return the hours of one device at a rate in operations a second."""
        return self.flops / rate / 3600


def forecast(spec: Spec) -> Forecast:
    """Return what a run needs.

    >>> found = forecast(Spec("x", layers=1, d_model=8, heads=2, length=16, steps=30))
    >>> found.parameters, found.tokens
    (2992, 7680)
    """
    model = counted(spec)
    count = sum(p.numel() for p in model.parameters())
    idle = 0
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        one = sum(p.numel() for p in experts.experts[0].parameters())
        idle += one * (len(experts.experts) - experts.active)
    length, width = spec.length, spec.d_model
    operations = 6 * (count - idle) + 12 * spec.layers * length * width
    number = 2 if spec.precision == "bfloat16" else 4
    one_block = length * width * 17 * number + 2.5 * number * spec.heads * length**2
    activations = spec.layers * length * width * number + one_block + 2 * length * spec.vocabulary * 4
    return Forecast(count, count - idle, spec.tokens, float(operations) * spec.tokens, BYTES[spec.optimizer] * count, activations)


def agreement(model: Model, count: int) -> str:
    """Return how a count compares with the print."""
    if model.parameters is None:
        return "no count in print"
    value, place = model.parameters
    printed = float(value[:-1]) * UNITS[value[-1]]
    if abs(count / printed - 1) <= model.within:
        return f"{value} in print ({place})"
    return f"{value} in print ({place}); {model.why}"


def dry_run(name: str, experiment: Experiment, preset: str, runs: dict[tuple[str, str], list[Spec]], rate: float) -> str:
    """Return the tables of a dry run."""
    rows, total = [], 0.0
    for (size, arm), own in runs.items():
        found = forecast(own[0])
        total += found.hours(rate) * len(own)
        printed = agreement(experiment.models[size], found.parameters) if preset == "paper" else ""
        active = "" if found.active == found.parameters else f"{found.active:,}"
        cells = [size, arm, str(len(own)), f"{found.parameters:,}", active, printed, f"{found.tokens:,}", f"{found.flops:.2g}"]
        rows.append([*cells, _bytes(found.memory), _bytes(found.activations), f"{found.hours(rate):.3g}"])
    headers = ["model", "method", "runs", "parameters", "active", "parameters in print", "tokens", "operations", "memory",
               "a sequence's activations", "hours"]  # fmt: skip
    shown = [k for k in range(len(headers)) if any(row[k] for row in rows)]
    title = f"{name}, {preset}: {experiment.shows}; data: {experiment.recipe.data}"
    text = [as_text(table([headers[k] for k in shown], [[row[k] for k in shown] for row in rows], title=title))]
    if preset == "paper":
        first = next(iter(runs))
        numbers = numbers_of(experiment, *first)
        pairs = [[key, _value(number.value), number.place] for key, number in sorted(numbers.items())]
        text.append(as_text(table(["number", "value", "printed at"], pairs, title=f"{first[0]}, {first[1]}")))
    text.append(f"all runs: {total:.3g} hours of one device at {rate:.3g} operations a second")
    return "\n\n".join(text)


def _bytes(number: float) -> str:
    return f"{number / 2**30:.3g} GiB" if number >= 2**30 else f"{number / 2**20:.3g} MiB"


def _value(value: Any) -> str:
    return (
        ", ".join(f"{key} {one}" for key, one in value)
        if value and isinstance(value, tuple) and isinstance(value[0], tuple)
        else str(value)
    )
