"""Calls that are noted where Python makes them: the same operations as by way of the dispatcher, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import draw
from torch import Tensor
from torch.nn import functional as F

from hessiankit.tracing import recording
from hessiankit.tracing.decompositions import DECOMPOSITIONS
from hessiankit.tracing.recording import DIRECT, operation_of, record

A, B, ROW = draw(3, 3), draw(3, 3, seed=2), draw(3, seed=3)
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "operators": lambda a, b, v: (a @ b + v) * 2 - b / 3.5 * a,
    "from the right": lambda a, b, v: 2 - a + 3 * b,
    "with alpha": lambda a, b, v: torch.add(a, b, alpha=2) - torch.sub(a, b, alpha=0.5),
    "by keyword": lambda a, b, v: torch.mul(input=a, other=b),
    "rounded": lambda a, b, v: torch.div(a, b, rounding_mode="floor"),
    "products with a vector": lambda a, b, v: (a @ v + v @ b) * (v @ v),
    "linear": lambda a, b, v: F.linear(F.linear(a, b), b, v),
    "linear to a number": lambda a, b, v: F.linear(a, v),
    "functions": lambda a, b, v: torch.exp(a).tanh().sigmoid().sin() + torch.relu(b),
    "transposed": lambda a, b, v: torch.transpose(a, 0, 1) @ b.transpose(-1, -2),
    "gradients off": lambda a, b, v: a * torch.no_grad()(torch.matmul)(a, b),
    "into a tensor": lambda a, b, v: torch.add(a, b, out=torch.empty(3, 3, dtype=a.dtype)),
    "under vmap": lambda a, b, v: a @ torch.vmap(lambda row: row * 2 + 1)(b),
}


def graph(f: Callable[..., Tensor], moving: int) -> list[Any]:
    given = [x.detach().requires_grad_(k < moving) for k, x in enumerate((A, B, ROW))]
    nodes = record(lambda: f(*given), given, DECOMPOSITIONS).graph.nodes
    return [(str(node.target), str(node.args), str(node.kwargs)) for node in nodes]


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_is_that_of_the_dispatcher(name, monkeypatch):
    moving = 0 if name in ("into a tensor",) else 1
    seen = graph(CALLS[name], moving)
    monkeypatch.setattr(recording, "operation_of", lambda function, args: None)
    assert seen == graph(CALLS[name], moving)


@pytest.mark.parametrize(("function", "count"), DIRECT, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_function_runs_its_operation(function, count):
    last = (0, 1) if count == 3 and "transpose" in str(function) else (B, ROW)
    args = (A, *last)[:count]
    operation = operation_of(function, args)
    assert torch.equal(operation(*args), function(*args))


def test_other_arguments_are_left_to_the_dispatcher():
    assert operation_of(torch.add, (A, B)) is torch.ops.aten.add.Tensor
    assert operation_of(torch.add, (A, 2, B)) is None
    assert operation_of(torch.transpose, (A, "rows", "columns")) is None
    assert operation_of(torch.matmul, (A, [B])) is None
    assert operation_of(torch.cat, ([A, B], 0)) is None
