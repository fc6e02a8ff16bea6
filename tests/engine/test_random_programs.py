"""Programs drawn at random from everything that has a closed form: rows mix, split, repeat and meet in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, draw, reverse_over_reverse
from readings import assert_readings
from torch import Tensor

Step = Callable[..., Tensor]
SHARED = 0.35
"""How often a parameter is used again where one of the right shape exists."""


class Program(random.Random):
    """Steps that each take a value, another value and parameters to a new value."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.steps: list[tuple[int, int, list[str], Step]] = []

    def parameter(self, shape: tuple[int, ...]) -> str:
        known = [name for name, seen in self.shapes.items() if seen == shape]
        if known and self.random() < SHARED:
            return self.choice(known)
        name = f"p{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def step(self, shape: tuple[int, ...]) -> tuple[list[tuple[int, ...]], Step]:
        """Draw one step for a value of some shape: the shapes of its parameters, and what it does with them."""
        d, axis, k = shape[-1], self.randrange(len(shape)), self.choice([2, 3, 4])
        kinds: list[tuple[list[tuple[int, ...]], Step]] = [
            ([(d, k)], lambda y, _, W: y @ W),
            ([(k, d), (k,)], lambda y, _, W, b: F.linear(y, W, b)),
            ([(d, 2), (2, k)], lambda y, _, A, B: torch.tanh(y) @ torch.tanh(A @ B)),
            ([(d,)], lambda y, _, b: y + b),
            ([(d,)], lambda y, _, g: y * g),
            ([(d,), (d,)], lambda y, _, g, b: F.layer_norm(y, (d,), g, b, 0.1)),
            ([(d,)], lambda y, _, g: F.rms_norm(y, (d,), g, 0.1)),
            ([shape[-2:]], lambda y, _, G: F.layer_norm(y, shape[-2:], G, None, 0.1)),
            ([], lambda y, _: torch.softmax(y, axis)),
            ([], lambda y, _: F.gelu(y)),
            ([], lambda y, _: y.transpose(axis, -1)),
            ([], lambda y, _: y.unflatten(-1, (2, -1))),
            ([], lambda y, _: y.flatten(0, 1)),
            ([], lambda y, _: y.mean(axis, keepdim=True)),
            ([], lambda y, _: y.sum(axis)),
            ([], lambda y, _: y.select(axis, 0)),
            ([], lambda y, _: y.expand(shape[0], *shape)),
            ([], lambda y, _: y.narrow(axis, 0, max(1, shape[axis] - 1))),
            ([], lambda y, _: y.flip(axis)),
            ([], lambda y, _: torch.sigmoid(y)),
            ([], lambda y, _: torch.log_softmax(y, axis)),
            ([], lambda y, _: torch.where(y > 0, y, 0.3)),
            ([], lambda y, _: torch.einsum("...i,...j->...ij", y, y)),
            ([(d, k), (k,)], lambda y, _, W, b: torch.addmm(b, y.flatten(0, -2), W)),
            ([], lambda y, other: torch.cat([y, other], axis)),
            ([], lambda y, other: torch.stack([y, other], axis)),
            ([], lambda y, other: y / (1.5 + torch.tanh(other))),
            ([], lambda y, other: y * other),
            ([], lambda y, other: other + y),
            ([], lambda y, other: y @ other.mT),
        ]
        return self.choice(kinds)

    def grow(self, length: int, shape: tuple[int, ...]) -> Program:
        """Draw steps until there are enough; those that do not fit are thrown away."""
        self.steps.append((0, 0, [self.parameter((shape[-1], 4))], lambda y, _, W: y @ W))
        values = [torch.zeros(shape), torch.zeros(*shape[:-1], 4)]
        while len(self.steps) < length:
            at, other = self.randrange(max(0, len(values) - 4), len(values)), self.randrange(len(values))
            kept = dict(self.shapes)
            needed, step = self.step(tuple(values[at].shape))
            names = [self.parameter(needed_shape) for needed_shape in needed]
            try:
                value = step(values[at], values[other], *(torch.zeros(self.shapes[name]) for name in names))
            except (RuntimeError, IndexError):
                value = torch.zeros(())
            if 0 < value.ndim <= 5 and value.numel() <= 200 and sum(torch.Size(s).numel() for s in self.shapes.values()) <= 90:
                values.append(value)
                self.steps.append((at, other, names, step))
            else:
                self.shapes = kept
        return self

    def module(self) -> Formula:
        """Return a module whose output is a scalar of the last two values, and of every parameter."""

        def forward(s: Formula, x: Tensor) -> Tensor:
            values = [x]
            for at, other, names, step in self.steps:
                values.append(step(values[at], values[other], *(getattr(s, name) for name in names)))
            ends = [torch.tanh(v.flatten()) @ torch.linspace(0.3, 1.0, v.numel(), dtype=x.dtype) for v in values[-2:]]
            return sum(ends, sum((p**3).sum() for p in s.parameters()))

        return Formula(forward, **self.shapes)


@cache
def program(seed: int) -> tuple[Formula, Tensor, Tensor]:
    """A module drawn at random, an input, and the Hessian of the output."""
    drawn = Program(seed)
    shape = drawn.choice([(2, 3, 4), (1, 3, 4), (3, 3, 3), (2, 2, 4)])
    module, x = drawn.grow(drawn.randint(4, 10), shape).module(), draw(*shape)
    return module, x, reverse_over_reverse(module, x, None, None)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=() if k < 215 else pytest.mark.slow) for k in range(180, 270)])
def test_every_reading_equals_reverse_over_reverse(seed: int) -> None:
    module, x, expected = program(seed)
    assert_readings(expected, module, x, loss=None, tolerance=1e-11, floor=1e-11)
