"""Runs of entrywise operations on one value as one: f'(x), and the adjoint times f''(x), in place of all that made them.

An activation or a norm that a module writes out in single operations costs a product as much as one that is a single operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.activation import Activation
from derivations.elementwise import Divide, Elementwise
from derivations.linear import Add, Multiply, Scale, Shift
from derivations.linearised import Entrywise, Linearised

ENTRYWISE = (Activation, Elementwise, Scale, Shift, Add, Multiply, Divide)
"""Primitives that treat entries one by one where no moving input is broadcast."""


@dataclass(frozen=True)
class Step:
    """One application on the way to the loss.

    Attributes:
        primitive: What it applies, linearised.
        inputs: Ids of the inputs that move; None for the others.
        output: Id of the output.
    """

    primitive: Linearised
    inputs: tuple[int | None, ...]
    output: int


def condensed(steps: Sequence[Step]) -> list[Step]:
    """Return steps in which a run of entrywise ones that begins at one value and ends at one is a single step."""
    roots: dict[int, int] = {}  # what a value is an entrywise function of, made by such a step
    readers: dict[int, list[int]] = {}
    for step in steps:
        for at in _moving(step):
            readers.setdefault(at, []).append(step.output)
        found = {roots.get(at, at) for at in _moving(step)}
        if len(found) == 1 and _is_entrywise(step):
            roots[step.output] = found.pop()
    runs: dict[int, list[Step]] = {}
    for step in steps:
        if step.output in roots:
            runs.setdefault(roots[step.output], []).append(step)
    replaced: dict[int, Step | None] = {}
    for root, run in runs.items():
        made = {step.output for step in run}
        ends = [step for step in run if not made.intersection(readers.get(step.output, ()))]
        leave = [step for step in run if any(at not in made for at in readers.get(step.output, ()))]
        if len(run) > 1 and len(ends) == 1 and leave in ([], ends):
            replaced |= dict.fromkeys(made) | {ends[0].output: _one(root, run)}
    return [new for step in steps if (new := replaced.get(step.output, step)) is not None]


def _moving(step: Step) -> set[int]:
    return {at for at in step.inputs if at is not None}


def _is_entrywise(step: Step) -> bool:
    if type(step.primitive.primitive) not in ENTRYWISE:
        return False
    shapes = [x.shape for x in step.primitive.inputs if x is not None]
    whole = torch.broadcast_shapes(*shapes)
    return all(shape == whole for shape, at in zip(shapes, step.inputs, strict=True) if at is not None)


def _one(root: int, run: Sequence[Step]) -> Step:
    """Return a run as one step: its derivatives are what it makes of a tangent of ones."""
    first = run[0].primitive.inputs[next(k for k, at in enumerate(run[0].inputs) if at == root)]
    tangents: dict[int | None, Tensor] = {root: torch.ones(1, *first.shape, dtype=first.dtype, device=first.device)}
    for step in run:
        tangents[step.output] = step.primitive.push([tangents.get(at) for at in step.inputs])
    bars: dict[int, Tensor] = {}
    for step in reversed(run):
        bar, moved = bars.pop(step.output, None), [tangents.get(at) for at in step.inputs] if step.primitive.bends else None
        if bar is None and moved is None:
            continue
        for at, covector in zip(step.inputs, step.primitive.pull(bar, moved), strict=True):
            if at is not None and covector is not None:
                bars[at] = bars[at] + covector if at in bars else covector
    end = run[-1]
    bent = bars.get(root)
    one = Entrywise(end.primitive.primitive, (first,), tangents[end.output][0].contiguous(), None if bent is None else bent[0])
    one.forget()
    return Step(one, (root,), end.output)
