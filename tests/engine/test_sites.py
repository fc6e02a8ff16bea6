"""Sites: where parameters enter, and through which jacobians."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine.jacobians import find_sites

X = draw(2, 3, 4)


def found(module: nn.Module, *inputs: Tensor) -> list[tuple[str, ...]]:
    """The parameters of each site that a module has, in order."""
    trace = hk.trace_module(lambda p, *g: torch.func.functional_call(module, p, g), dict(module.named_parameters()), inputs)
    return [tuple(jacobian.parameter for jacobian in s.jacobians) for s in find_sites(trace).values() if s.jacobians]


SITES: dict[str, tuple[Callable[..., Tensor], list[tuple[str, ...]]]] = {
    "product": (lambda s, x: x @ s.W, [("W",)]),
    "product and bias": (lambda s, x: x @ s.W + s.b, [("W", "b")]),
    "bias in front": (lambda s, x: s.b + x @ s.W, [("W", "b")]),
    "bias with a factor": (lambda s, x: torch.add(x @ s.W, s.b, alpha=2), [("W",)]),
    "product used before its bias": (lambda s, x: (lambda z: z * (z + s.b))(x @ s.W), [("W",), ("b",)]),
    "bias of something else": (lambda s, x: torch.tanh(x @ s.W) + s.b, [("W",), ("b",)]),
    "bias twice": (lambda s, x: x @ s.W + s.b + s.b, [("W", "b"), ("b",)]),
    "weight twice": (lambda s, x: torch.tanh(x @ s.W) @ s.W, [("W",), ("W",)]),
    "weight from the left": (lambda s, x: s.W @ x.mT, []),
    "weight of a weight": (lambda s, x: x @ (s.W @ s.W), []),
    "weight moved": (lambda s, x: x @ (2 * s.W), []),
    "linear": (lambda s, x: torch.nn.functional.linear(x, s.W, s.b), [("W", "b")]),
    "linear with the bias alone": (lambda s, x: torch.nn.functional.linear(x, s.W * s.W, s.b), [("b",)]),
    "layer norm": (lambda s, x: torch.nn.functional.layer_norm(x @ s.W, (4,), s.g, s.b), [("W",), ("g", "b")]),
    "rms norm": (lambda s, x: torch.nn.functional.rms_norm(x @ s.W, (4,), s.g), [("W",), ("g",)]),
    "norm over two axes": (lambda s, x: torch.nn.functional.layer_norm(x @ s.W, (3, 4), s.G), [("W",)]),
    "gain and shift by one": (lambda s, x: torch.nn.functional.layer_norm(x @ s.W, (4,), s.g, s.g), [("W",), ("g", "g")]),
    "transposed weight": (lambda s, x: x @ s.W.T, [("W",)]),
    "part of a weight": (lambda s, x: x @ s.H[:, 1:5], [("H",)]),
    "part of a bias": (lambda s, x: x @ s.W + s.H[1, :4], [("W", "H")]),
    "a table of positions": (lambda s, x: x @ s.W + s.G, [("W",), ("G",)]),
    "part of a table": (lambda s, x: x @ s.W + s.W[1:], [("W",), ("W",)]),
    "one number for all columns": (lambda s, x: x @ s.W + s.b[:1], [("W",), ("b",)]),
    "gain as a product": (lambda s, x: torch.tanh(x @ s.W) * s.g, [("W",)]),
    "vector": (lambda s, x: (x @ s.W)[0, 0] + s.b, [("W",)]),
    "heads": (lambda s, x: (torch.tanh(x @ s.H).unflatten(-1, (2, 3)) + s.c) @ s.V, [("H",), ("c",), ("V",)]),
    "norm of a head": (
        lambda s, x: torch.nn.functional.layer_norm(torch.tanh(x @ s.H).unflatten(-1, (2, 3)), (3,), s.c, s.d),
        [("H",), ("c", "d")],
    ),
}


@pytest.mark.parametrize("name", SITES)
def test_which_parameters_make_a_site(name):
    f, expected = SITES[name]
    module = Formula(lambda s, x: torch.tanh(f(s, x)), W=(4, 4), H=(4, 6), V=(3, 2), b=(4,), g=(4,), c=(3,), d=(3,), G=(3, 4))
    assert found(module, X) == expected
    assert_exact(module, X)


def test_sites_of_the_papers_block():
    names = found(hk.TransformerBlock(4, 5, bias=True, attention_bias=True).double(), X)
    attention = [(f"attention.W_{c}", f"attention.b_{c}") for c in "QKV"]
    net = [(f"feedforward.W_{i}", f"feedforward.b_{i}") for i in (1, 2)]
    assert names == [*attention, ("norm_1.weight", "norm_1.bias"), *net, ("norm_2.weight", "norm_2.bias")]
