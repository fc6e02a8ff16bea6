"""The worst ratio of an inequality: the largest of a sample, and what an ascent from there reaches.

A ratio is the left over the right side. The ascent changes one array of the point at a time, its entries or its size, and keeps
what raises the ratio; entries that are zero stay zero, so that points made of such (uniform attention) stay what they are.

>>> import torch
>>> print(worst(lambda x: float(x.sum() / (len(x) ** 0.5 * x.norm())), [torch.tensor([3.0, 1.0, 2.0])], steps=200))
attained
>>> print(worst(lambda x: float(x.sum() / (3 * x.norm())), [torch.tensor([1.0, 2.0])], steps=50))
sampled: worst ratio 0.471, by ascent from 0.447
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from papers.drawing import Draw

Point = TypeVar("Point")

ATTAINED = 0.99
"""The ratio from which an inequality is called attained."""


class WorstRatio(NamedTuple):
    """The largest ratio of a sample, and the one that an ascent from there reaches."""

    sampled: float
    climbed: float
    sample: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.climbed >= ATTAINED:
            return "attained"
        return f"sampled: worst ratio {self.climbed:.3g}, by ascent from {self.sampled:.3g}"


def worst(ratio: Callable[[Point], float], points: Iterable[Point], *, seed: int = 0, steps: int = 80) -> WorstRatio:
    """Return the worst ratio: of the points, and after an ascent from the worst of them.

    Args:
        ratio: Left over right side at a point: a tensor, or a dataclass whose arrays are moved.
        points: The sample.
        seed: Of the directions.
        steps: Ratios computed on the way up.
    """
    found = [(ratio(point), point) for point in points]
    if any(math.isnan(value) for value, _ in found):
        return WorstRatio(math.inf, math.inf, ())
    best, point = max(found, key=lambda pair: pair[0])
    draw, sampled = Draw(seed), best
    names = [name for name, _ in _arrays(point)]
    sizes = dict.fromkeys(names, 0.5)
    for step in range(steps):
        name = names[step % len(names)]
        old = dict(_arrays(point))[name]
        if (step // len(names)) % 3 == 2:  # its size
            new = old * math.exp(sizes[name] * (1 if float(draw.uniform(1)) > 0.5 else -1))
        else:
            new = old + sizes[name] * old.square().mean().sqrt() * draw.normal(*old.shape).to(old.dtype) * (old != 0)
        moved = _replaced(point, name, new)
        value = ratio(moved)
        if math.isfinite(value) and value > best:
            best, point, sizes[name] = value, moved, 1.5 * sizes[name]
        else:
            sizes[name] = max(0.8 * sizes[name], 1e-3)
    return WorstRatio(sampled, best, tuple(value for value, _ in found))


def _arrays(point: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the arrays of a point by name; those of a dictionary as "field.key"."""
    if isinstance(point, Tensor):
        yield "", point
        return
    for field in fields(point):
        value = getattr(point, field.name)
        if isinstance(value, dict):
            yield from ((f"{field.name}.{key}", array) for key, array in value.items())
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield field.name, value


def _replaced(point: Any, name: str, new: Tensor) -> Any:
    if isinstance(point, Tensor):
        return new
    field, dot, key = name.partition(".")
    return replace(point, **{field: {**getattr(point, field), key: new} if dot else new})
