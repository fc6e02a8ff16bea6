"""Fusion of entrywise steps on one value x: f'(x) and adjoint o f''(x) in place of the single steps of f.

An activation or a norm written out in single operations then costs a product as much as one operation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.primitives.directions import joint_shape
from hessiankit.primitives.primitive import Linearised, LinearisedEntrywise
from hessiankit.tracing.trace import accumulate

Tensors: TypeAlias = "Sequence[Tensor | None]"


@dataclass(frozen=True)
class Step:
    """One application on the way to the loss.

    Attributes:
        primitive: Primitive that it applies, linearised.
        inputs: Ids of the inputs that move; None for the others.
        output: Id of the output.
    """

    primitive: Linearised
    inputs: tuple[int | None, ...]
    output: int

    @cached_property
    def bends(self) -> bool:
        """Whether the step can have a second derivative; a product with one moving factor has none."""
        is_constant_product = self.primitive.primitive.is_product and sum(at is not None for at in self.inputs) < 2
        return self.primitive.is_nonlinear and not is_constant_product


def fuse_entrywise(steps: Sequence[Step], live_values: Container[int | None]) -> list[Step]:
    """Return steps in which runs of entrywise steps from one value are fused: one step for each value that others read.

    Args:
        steps: Some that follow each other.
        live_values: The values that steps after them read.
    """
    roots: dict[int, int] = {}  # what a value is an entrywise function of, made by such a step
    readers: dict[int, list[int]] = {}
    for step in steps:
        for at in _moving(step):
            readers.setdefault(at, []).append(step.output)
        sources = {roots.get(at, at) for at in _moving(step)}
        if len(sources) == 1 and _is_entrywise(step):
            roots[step.output] = sources.pop()
    runs: dict[int, list[Step]] = {}
    for step in steps:
        if step.output in roots:
            runs.setdefault(roots[step.output], []).append(step)
    replacements: dict[int, Step | None] = {}
    for root, run in runs.items():
        outputs = [step.output for step in run]
        exits = [at for at in outputs if at in live_values or not set(outputs).issuperset(readers.get(at, (-1,)))]
        if len(exits) < len(run):
            replacements |= dict.fromkeys(outputs) | {step.output: step for step in _in_place_of(root, run, exits)}
    return [new for step in steps if (new := replacements.get(step.output, step)) is not None]


def _moving(step: Step) -> set[int]:
    return {at for at in step.inputs if at is not None}


def _is_entrywise(step: Step) -> bool:
    if not step.primitive.primitive.is_entrywise:
        return False
    shapes = [x.shape for x in step.primitive.inputs if x is not None]
    common_shape = joint_shape(*shapes)
    return all(shape == common_shape for shape, at in zip(shapes, step.inputs, strict=True) if at is not None)


def _in_place_of(root: int, run: Sequence[Step], exits: Sequence[int]) -> list[Step]:
    """Return one step for each value of a run that is read outside; the last one carries the second derivative of all.

    Slopes are the run's tangents of ones.
    """
    first = run[0].primitive.inputs[next(k for k, at in enumerate(run[0].inputs) if at == root)]
    tangents: dict[int | None, Tensor] = {root: torch.ones(1, *first.shape, dtype=first.dtype, device=first.device)}
    for step in run:
        tangents[step.output] = step.primitive.push([tangents.get(at) for at in step.inputs])
    bars: dict[int, Tensor] = {}
    for step in reversed(run):
        bar = bars.pop(step.output, None)
        input_tangents = [tangents.get(at) for at in step.inputs] if step.primitive.is_nonlinear else None
        if bar is None and input_tangents is None:
            continue
        accumulate(bars, step.inputs, step.primitive.pull(bar, input_tangents))
    steps = []
    for step in run:
        if step.output in exits:
            curvature = bars.get(root) if step.output == exits[-1] else None
            slope = tangents[step.output][0].contiguous()
            one = LinearisedEntrywise(step.primitive.primitive, (first,), slope, None if curvature is None else curvature[0])
            one.forget()
            steps.append(Step(one, (root,), step.output))
    return steps


def asymmetry(step: Step) -> Tensor:
    """Return how far <u, J t> is from <J^T u, t>, and <s, C t> from <t, C s>, for random vectors, relative to their sizes: ()."""
    inputs = [None if at is None else x for x, at in zip(step.primitive.inputs, step.inputs, strict=True)]
    rng = torch.Generator(next(x.device for x in inputs if x is not None)).manual_seed(0)

    def draw(shapes: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if x is None else _random_direction(x, rng) for x in shapes]

    t, s = draw(inputs), draw(inputs)
    jvp = step.primitive.push(t)
    u = draw([jvp[0]])
    gaps = [_gap(u, [jvp], t, step.primitive.pull(u[0]))]
    if step.primitive.is_nonlinear:
        gaps.append(_gap(s, step.primitive.pull(None, t), t, step.primitive.pull(None, s)))
    return torch.stack(gaps).amax()  # NaN where there is one


PERIOD = 4099
"""Random numbers that are drawn for a direction, which repeats them: to draw a number takes as long as twenty operations on it.
It is prime, so that entries with equal numbers lie in different rows and columns."""


def _random_direction(x: Tensor, rng: torch.Generator) -> Tensor:
    """Return a random direction (1, *shape)."""
    count = max(1, x.numel())
    numbers = torch.randn(min(count, PERIOD), generator=rng, dtype=x.dtype, device=x.device)
    return numbers.repeat(-(-count // PERIOD))[: x.numel()].reshape(1, *x.shape)


def _gap(s: Tensors, a: Tensors, t: Tensors, b: Tensors) -> Tensor:
    """Return |<s, a> - <t, b>|, relative to |s| |a|."""
    zero = next(x for x in (*s, *t) if x is not None).new_zeros(())
    pairs = ([(x, y) for x, y in zip(*sides, strict=True) if x is not None and y is not None] for sides in ((s, a), (t, b)))
    product_sa, product_tb = (
        torch.stack([zero, *(torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in terms)]).sum() for terms in pairs
    )
    norm_s, norm_a = (torch.stack([zero, *(x.norm() for x in xs if x is not None)]).norm() for xs in (s, a))
    size, gap = norm_s * norm_a, (product_sa - product_tb).abs()
    return torch.where(size == 0, gap, gap / size)
