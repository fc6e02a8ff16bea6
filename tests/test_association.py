"""Re-bracketed products: the same values, the same Hessian, and rows that stay apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor

import hessiankit as hk
from hessiankit.engine.reassociation import reassociate

X = draw(2, 3, 4)
KEYS = draw(5, 3, seed=3)


def scores(s: Formula, x: Tensor) -> Tensor:
    return (x @ s.Q) @ (x @ s.K).mT


CASES: dict[str, tuple[Callable[[Formula, Tensor], Tensor], bool]] = {
    "keys": (lambda s, x: torch.tanh(scores(s, x)), True),
    "keys of a linear layer": (lambda s, x: torch.tanh((x @ s.Q) @ torch.nn.functional.linear(x, s.K.T).mT), True),
    "keys with a bias": (lambda s, x: torch.tanh((x @ s.Q) @ torch.nn.functional.linear(x, s.K.T, s.b[:5]).mT), False),
    "keys used twice": (lambda s, x: (lambda k: torch.tanh((x @ s.Q) @ k.mT) @ k)(x @ s.K), False),
    "values": (lambda s, x: torch.softmax(x @ s.Q @ x.new_ones(5, 3), -1) @ (x @ s.V), True),
    "values with a bias": (
        lambda s, x: torch.softmax(x @ s.Q @ KEYS, -1) @ torch.nn.functional.linear(x, s.V.T, s.b),
        True,
    ),
    "weights that do not sum to one": (
        lambda s, x: torch.tanh(x @ s.Q @ KEYS) @ torch.nn.functional.linear(x, s.V.T, s.b),
        False,
    ),
    "attention": (lambda s, x: torch.softmax(scores(s, x), -1) @ (x @ s.V), True),
    "tokens that move": (lambda s, x: (lambda z: torch.softmax(scores(s, z), -1) @ (z @ s.V))(torch.tanh(x @ s.E)), False),
    "one sequence": (lambda s, x: torch.softmax(scores(s, x[0]), -1) @ (x[0] @ s.V), False),
    "tokens of another sample": (lambda s, x: torch.softmax((x @ s.Q) @ (x[:1] @ s.K).mT, -1) @ (x[1:] @ s.V), False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_hessian_stays_what_it_is(name):
    f, expected = CASES[name]
    module = Formula(lambda s, x: torch.tanh(f(s, x)), Q=(4, 5), K=(4, 5), V=(4, 6), b=(6,), E=(4, 4))
    assert_exact(module, X)
    trace = hk.trace_module(lambda p, x: torch.func.functional_call(module, p, (x,)), dict(module.named_parameters()), (X,))
    value, before = trace.values[trace.output], [a.name for a in trace.applications]
    reassociate(trace)
    assert ([a.name for a in trace.applications] != before) == expected
    again = dict(enumerate(trace.values))
    for a in trace.applications:
        again[a.output] = a.primitive.value(*(None if at is None else again[at] for at in a.inputs))
    assert torch.allclose(again[trace.output], value, rtol=0, atol=1e-14)
