"""Programs drawn at random from everything that has a closed form: rows mix, split, repeat and meet in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, draw, gradient_twice, reverse_over_reverse
from readings import assert_readings
from torch import Tensor, nn

import hessiankit as hk

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


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


class World(nn.Module):
    """A small network, and terms that read a number, a list, a dict, a buffer, a closure or an attribute, some without effect yet."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.rng, seed = rng, rng.randrange(10**6)
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)]).to(dtype)
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(draw(*p.shape, seed=seed + k))
        self.anchor = [p.detach().clone() for p in self.parameters()]
        self.register_buffer("scale", torch.ones(4, dtype=dtype))
        self.settings = SimpleNamespace(strength=0.0, power=2, slope=1.0)
        self.table, self.held = {"weight": 0.0, "shift": 0.1}, [torch.zeros(2, dtype=dtype), 1.0]
        self.bound = {"temperature": 1.0}
        self.kinds = rng.sample(sorted(TERMS), rng.randint(2, 4))
        temperature = self.bound
        self.closure = lambda y: y / temperature["temperature"]
        self.activation: Callable[[Tensor], Tensor] = rng.choice([torch.tanh, torch.sigmoid, nn.functional.gelu])

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.layers[0](x))
        y = (
            self.closure(self.layers[1](y * self.scale)).sin()
            if "closure" in self.kinds
            else self.layers[1](y * self.scale).sin()
        )
        return self.layers[2](y)

    def loss(self, z: Tensor, t: Tensor) -> Tensor:
        return sum((TERMS[kind](self, z, t) for kind in self.kinds), ((z - t).abs().square()).mean())


TERMS: dict[str, Callable[[World, Tensor, Tensor], Any]] = {
    "anchor": lambda w, z, t: (
        w.settings.strength * sum((p - a).square().sum() for p, a in zip(w.parameters(), w.anchor, strict=True))
    ),
    "power": lambda w, z, t: 0.1 * (1.5 + torch.tanh(z)).pow(w.settings.power).mean(),
    "dict": lambda w, z, t: w.table["weight"] * sum(p.pow(4).sum() for p in w.parameters()) + (z * w.table["shift"]).exp().mean(),
    "list": lambda w, z, t: (w.held[0] * z).square().sum() * w.held[1],
    "closure": lambda w, z, t: w.settings.slope * torch.sigmoid(z).mean(),
    "later data": lambda w, z, t: torch.where(t > 5, w.settings.slope * z**2, z * 0).sum(),
    "branch": lambda w, z, t: z.cos().mean() if w.settings.power == 2 else z.sin().square().mean(),
}


def change(w: World, t: Tensor) -> None:
    """Change one or two things that the program may read; some have no effect on loss and gradient at this moment."""
    rng = w.rng
    changes: list[Callable[[], Any]] = [
        lambda: setattr(w.settings, "strength", rng.choice([0.0, 0.5, 2.0])),
        lambda: setattr(w.settings, "power", rng.choice([2, 3, 4])),
        lambda: setattr(w.settings, "slope", rng.choice([0.3, 1.0, 3.0])),
        lambda: w.table.update(weight=rng.choice([0.0, 0.2])),
        lambda: w.held[0].fill_(rng.choice([0.0, 0.7])),
        lambda: w.held.__setitem__(0, torch.full_like(w.held[0], 0.4)),
        lambda: w.held.__setitem__(1, rng.choice([1.0, 2.0])),
        lambda: w.bound.update(temperature=rng.choice([1.0, 2.0])),
        lambda: w.scale.mul_(rng.choice([1.0, 1.5])),
        lambda: setattr(w, "activation", rng.choice([torch.tanh, torch.sigmoid])),
        lambda: t.fill_(rng.choice([0.0, 6.0])),
        lambda: w.layers[0].weight.data.add_(0.1),
        lambda: [p.data.zero_() for p in w.layers[2].parameters()],
    ]
    for one in rng.sample(changes, rng.randint(1, 2)):
        one()


def reference(w: World, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Reverse over reverse of the sum of the losses."""
    return gradient_twice(sum(w.loss(w(x), t) for x, t in batches), list(w.parameters()))


def run(seed: int) -> Counter[str]:
    """Return how many answers of one program are right, and how many are refused; a wrong one fails."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    w, answers = World(rng, dtype), Counter[str]()
    batches = [(draw(n, 3, seed=seed + n).to(dtype), draw(n, 2, seed=seed + 5 + n).to(dtype)) for n in rng.sample([1, 2, 3], 2)]
    x, t = batches[0]
    loss = w.loss
    f = hk.hessian_function(w, x, t, loss=loss)

    def compare(what: str, matrix: Callable[[], Tensor], expected: Tensor) -> None:
        try:
            seen = matrix()
        except hk.HessiankitError:
            answers["refused"] += 1
            return
        allowed = TOLERANCE[dtype] * float(expected.abs().max())
        assert float((seen - expected).abs().max()) <= allowed, (seed, what, w.kinds)
        answers["right"] += 1

    for _ in range(3):
        change(w, t)
        expected = reference(w, [(x, t)])
        point = hk.hessian_operator(w, x, t, loss=loss)
        lazy = hk.hessian(w, x, t, loss=loss, lazy=True)
        compare("function", lambda: f().matrix, expected)
        compare("function, other data", lambda: f(*batches[1]).matrix, reference(w, [batches[1]]))
        f(x, t)
        compare("hessian", lambda: hk.hessian(w, x, t, loss=loss).matrix, expected)
        both = reference(w, batches)
        compare("batches", lambda: hk.hessian(w, batches, loss=loss, reduction="sum").matrix, both)
        compare("diagonal", lambda: hk.hessian_diagonal(w, x, t, loss=loss).flat, expected.diagonal())
        change(w, t)
        compare("operator of before", point.to_matrix, expected)
        compare("lazy result of before", partial(getattr, lazy, "matrix"), expected)
    return answers


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))])
def test_each_result_is_that_of_its_moment(seed: int) -> None:
    answers = run(seed)
    assert answers["right"] >= answers["refused"]
