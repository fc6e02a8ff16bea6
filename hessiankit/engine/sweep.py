"""The sweep that every second derivative takes: directions pushed forward, and pulled back with the curvature of each step.

With t_v the tangents of a value along some directions, and lambda_v its adjoint,

    t(v)              =   D phi_v t(inputs of v)
    bar(inputs of v) +=   D phi_v^T bar(v)  +  [lambda_v . D^2 phi_v] t(inputs of v),

so that a covector bar that arrives at a value is how the gradient of the loss in it moves along each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.primitives.primitive import CovectorSum, PartOfCovectors
from hessiankit.tracing.trace import accumulate, last_readers

WORK_SPACE, ON_AN_ACCELERATOR = 2**23, 2**26
"""Numbers that the values of one sweep may take, all directions together."""
TAIL_SIZE = 2**25
"""Numbers that may be kept of what follows a cut."""


def work_space(device: torch.device) -> int:
    """Return the numbers that the values of one sweep may take."""
    return WORK_SPACE if device.type == "cpu" else ON_AN_ACCELERATOR


@dataclass(frozen=True)
class UnitColumns:
    """Tangents of a value along its columns ``start`` to ``stop``, each of which changes only its own column of every row.

    Attributes:
        scale: Distance by which each column moves, of the value's shape.
        start: The first column.
        stop: End of the columns, one after the last.
    """

    scale: Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def diagonal(self) -> Tensor:
        """The entries that move, (*rows, stop - start)."""
        return self.scale[..., self.start : self.stop]

    def dense(self) -> Tensor:
        """Return the tangents, (stop - start, *shape)."""
        tangents = self.scale.new_zeros(len(self), *self.scale.shape)
        self.add_to(tangents, self.scale)
        return tangents

    def add_to(self, covectors: Tensor, numbers: Tensor) -> None:
        """Add numbers, of the value's shape, to the entries of covectors (stop - start, *shape) at which the directions move."""
        diagonal = covectors[..., self.start : self.stop].diagonal(dim1=0, dim2=-1)  # (*rows, stop - start)
        diagonal += numbers[..., self.start : self.stop]


Tangents: TypeAlias = "Tensor | UnitColumns"


@dataclass(frozen=True)
class RecomputedTangents:
    """Tangents recomputed at each use from a step's input tangents, which are kept anyway."""

    step: Step
    inputs: Sequence[StoredTangents | None]

    def dense(self) -> Tensor:
        """Return the tangents, (S, *shape)."""
        return self.step.primitive.push(all_dense(self.inputs))


StoredTangents: TypeAlias = "Tangents | RecomputedTangents"
InputTangents: TypeAlias = "dict[int, list[StoredTangents | None]]"
"""Tangents of the inputs of the steps that have a second derivative, by the step's output."""


@overload
def dense(t: StoredTangents) -> Tensor: ...
@overload
def dense(t: StoredTangents | None) -> Tensor | None: ...
def dense(t: StoredTangents | None) -> Tensor | None:
    """Return tangents as a tensor (S, *shape)."""
    return t if t is None or isinstance(t, Tensor) else t.dense()


def all_dense(tangents: Sequence[StoredTangents | None]) -> list[Tensor | None]:
    """Return tangents of several values as tensors (S, *shape)."""
    return [dense(t) for t in tangents]


def reads(steps: Sequence[Any], ends: Collection[int] = ()) -> tuple[set[int], dict[int, list[int]]]:
    """Return the values whose tangents the steps read or keep, and by last reader those that can then be released."""
    last = last_readers(steps)
    releases: dict[int, list[int]] = {}
    for at, output in last.items():
        if at not in ends:
            releases.setdefault(output, []).append(at)
    return last.keys() | set(ends), releases


def push(
    steps: Iterable[Step],
    tangents: dict[int, Tangents],
    live_values: Container[int],
    releases: Mapping[int, Sequence[int]],
    *,
    recomputes: bool = False,
) -> InputTangents:
    """Push directions along some steps.

    Args:
        steps: Steps in order.
        tangents: (S, *shape) by value, where directions begin; those of the steps' outputs are added.
        live_values: Values whose tangents are read; see :func:`reads`.
        releases: Values whose tangents nothing reads after a step, by the step's output.
        recomputes: Whether tangents that cost a few passes are recomputed in :func:`pull`: less memory, more time.

    Returns:
        The tangents of inputs of the steps that bend, for :func:`pull`.
    """
    input_tangents: InputTangents = {}
    recipes: dict[int | None, RecomputedTangents] = {}
    for step in steps:
        step_tangents = [None if at is None else tangents.get(at) for at in step.inputs]
        if any(t is not None for t in step_tangents):
            sources = [recipes.get(at, t) for at, t in zip(step.inputs, step_tangents, strict=True)]
            if step.bends:
                input_tangents[step.output] = sources
            if step.output in live_values:
                t, seed = _push(step, step_tangents), tangents.get(step.output)
                tangents[step.output] = t if seed is None else dense(t) + dense(seed)  # where other directions begin
                if recomputes and seed is None and _is_recomputed(step, sources):
                    recipes[step.output] = RecomputedTangents(step, sources)
        for at in releases.get(step.output, ()):
            tangents.pop(at, None)
    return input_tangents


def _is_recomputed(step: Step, step_tangents: Sequence[StoredTangents | None]) -> bool:
    """Tell whether a step is quick and its input tangents are kept anyway."""
    is_quick = step.primitive.primitive.is_quick or step.primitive.primitive.selects
    return is_quick and (step.bends or not any(isinstance(t, Tensor) for t in step_tangents))


def _push(step: Step, step_tangents: Sequence[Tangents | None]) -> Tangents:
    """Push tangents through one step; unit columns stay unit columns through entrywise steps."""
    point, (t, *remaining) = step.primitive, [t for t in step_tangents if t is not None]
    if not remaining and isinstance(t, UnitColumns):
        if point.factor is not None:
            return replace(t, scale=t.scale * point.factor)
        if point.matrix is not None and step_tangents[0] is t:
            rows = point.matrix[t.start : t.stop]
            return t.diagonal.movedim(-1, 0).unsqueeze(-1) * rows.reshape(len(rows), *(1,) * (t.scale.ndim - 1), -1)
    return point.push(all_dense(step_tangents))


def sums_of(sums: Mapping[int, CovectorSum], inputs: Sequence[int | None]) -> list[CovectorSum | None]:
    """Return the sum of each input's covectors, where it has one."""
    return [None if at is None else sums.get(at) for at in inputs]


def _pull(
    step: Step, bar: Tensor | None, step_tangents: Sequence[StoredTangents | None] | None, sums: Mapping[int, CovectorSum]
) -> Sequence[Tensor | PartOfCovectors | None]:
    """Pull a covector back through one step, with its curvature along tangents."""
    point = step.primitive
    t = step_tangents[0] if step_tangents is not None and len(step_tangents) == 1 else None
    if bar is not None and isinstance(t, UnitColumns) and point.factor is not None and point.bend is not None:
        (covector,) = point.pull(bar)
        assert covector is not None
        t.add_to(covector, t.scale * point.bend)
        return (covector,)
    tangents = None if step_tangents is None else all_dense(step_tangents)
    return point.pull_parts(bar, tangents, sums_of(sums, step.inputs))


def pull(
    steps: Sequence[Step],
    bars: dict[int, Tensor],
    input_tangents: InputTangents,
    sums: Mapping[int, CovectorSum],
    stops: Container[int] = (),
    arrive: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Pull covectors back along some steps, adding the curvature of nonlinear steps.

    Args:
        steps: Steps in order.
        bars: Covectors (S, *shape) of values at the end; at the end those of values that no step computes.
        input_tangents: Result of :func:`push`; used up.
        sums: Sums of the covectors of some values, as parameters, in place of ``bars``.
        stops: Values at which covectors are read.
        arrive: Called with such a value and its covector, from the last to the first.
    """
    for step in reversed(steps):
        bar, tangents = dense(bars.pop(step.output, None)), input_tangents.pop(step.output, None)
        if bar is not None and arrive is not None and step.output in stops:
            arrive(step.output, bar)
        if bar is not None or tangents is not None:
            accumulate(bars, step.inputs, _pull(step, bar, tangents, sums))
    bars.update({at: dense(bar) for at, bar in bars.items()})
    if arrive is not None:
        for at in [at for at in bars if at in stops]:
            arrive(at, bars.pop(at))
