"""Sites: what a lift does row by row is what the whole Jacobian of the site would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.sites import Lift, Site, find_site, pair

X, D_OUT = draw(2, 3, 4), 5
ROWS = X.reshape(-1, 4)
HAT = draw(2, 3, D_OUT, seed=2)
ONES = torch.ones((), dtype=torch.float64).expand(6, D_OUT)
LIFTS: dict[str, tuple[Lift, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "X W": (Lift("W", ROWS, "io"), lambda W: X @ W, (4, D_OUT)),
    "X W^T": (Lift("W", ROWS, "oi"), lambda W: X @ W.T, (D_OUT, 4)),
    "gain": (Lift("g", HAT.reshape(-1, D_OUT), "o"), lambda g: HAT * g, (D_OUT,)),
    "bias": (Lift("b", ONES, "o"), lambda b: HAT + b, (D_OUT,)),
}


def site(*names: str) -> Site:
    return Site(0, 2, D_OUT, [LIFTS[name][0] for name in names])


def jacobian(*names: str) -> Tensor:
    """The Jacobian of the site with respect to the parameters, (rows, d_out, columns), by autograd."""
    parts = []
    for name in names:
        _, f, shape = LIFTS[name]
        J = torch.autograd.functional.jacobian(f, torch.zeros(shape, dtype=torch.float64))
        parts.append(J.reshape(6, D_OUT, -1))
    return torch.cat(parts, 2)


@pytest.mark.parametrize(
    "names", [("X W",), ("X W^T",), ("gain",), ("bias",), ("X W", "bias"), ("X W^T", "bias"), ("gain", "bias")]
)
def test_expand_and_reduce(names):
    J, at = jacobian(*names), site(*names)
    for rest in ((7,), (2, 3), ()):
        t = draw(D_OUT, 2, 3, *rest, seed=3)
        expected = torch.einsum("nop,onf->pnf", J, t.reshape(D_OUT, 6, -1)).reshape(-1, 2, 3, *rest)
        assert torch.allclose(at.expand(t), expected, rtol=0, atol=1e-14)
    w = draw(6, D_OUT, 7, seed=4)
    assert torch.allclose(at.reduce(w), torch.einsum("nop,noc->pc", J, w), rtol=0, atol=1e-13)


@pytest.mark.parametrize("left", [("X W",), ("X W^T", "bias"), ("gain", "bias"), ("X W", "gain", "X W^T")])
@pytest.mark.parametrize("right", [("X W",), ("X W^T",), ("X W", "bias"), ("gain",)])
def test_pair(left, right):
    K = draw(6, D_OUT, D_OUT, seed=5)
    expected = torch.einsum("nop,noq,nqr->pr", jacobian(*left), K, jacobian(*right))
    assert torch.allclose(pair(site(*left), site(*right), K), expected, rtol=0, atol=1e-13)


def test_expand_keeps_the_dtype_of_the_tangent():
    t = draw(D_OUT, 2, 3, 7, seed=3)
    single = site("X W", "bias").expand(t.float())
    assert single.dtype == torch.float32
    assert (single - site("X W", "bias").expand(t)).abs().max() < 1e-5


def found(module: nn.Module, *inputs: Tensor) -> list[tuple[str, ...]]:
    """The parameters of each site that a module has, in order."""
    trace = hk.trace(lambda p, *g: torch.func.functional_call(module, p, g), dict(module.named_parameters()), inputs)
    names = {at: name for name, at in trace.parameters.items()}
    uses = Counter(at for a in trace.applications for at in a.inputs if at is not None)
    sites: dict[int, Site] = {}
    for a in trace.applications:
        find_site(trace, a, names, sites, uses)
    assert all(at == s.value and s.axes == trace.values[at].ndim - 1 for at, s in sites.items())
    return [tuple(lift.parameter for lift in s.lifts) for s in sites.values()]


SITES: dict[str, tuple[Callable[..., Tensor], list[tuple[str, ...]]]] = {
    "product": (lambda s, x: x @ s.W, [("W",)]),
    "product and bias": (lambda s, x: x @ s.W + s.b, [("W", "b")]),
    "bias in front": (lambda s, x: s.b + x @ s.W, [("W",)]),
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
