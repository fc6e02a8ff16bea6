"""What autograd takes for constant, and parameters that are frozen, not registered, or of another class.

Where a value of a parameter enters as a constant, the reference has a tensor of the same entries in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import Case, Net, case, draw, generic, refused, way


def _taken(constant: bool, read: Callable[[Any], Tensor]) -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * m.v * (m.fixed if constant else read(m)))
    net.fixed = net.v.detach().clone().square()
    return net


@way("copy.deepcopy of a submodule in forward", refused="deepcopy|copied|copy of")
def _deepcopy(constant: bool) -> nn.Module:
    net = Net(lambda m, x: m.l(F.linear(x, m.fixed) if constant else copy.deepcopy(m.l)(x) - m.l.bias.detach()).tanh() * m.v)
    net.fixed = net.l.weight.detach().clone()
    return net


@way("requires_grad off for a part of forward", refused="requires_grad")
def _toggled(constant: bool) -> nn.Module:
    def read(m: Any) -> Tensor:
        m.v.requires_grad_(False)
        value = m.v.square()
        m.v.requires_grad_(True)
        return value

    return _taken(constant, read)


@way("straight-through estimator by detach")
def _straight_through(constant: bool) -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x) * 3
        return (h + (m.fixed if constant else (h.round() - h).detach())).tanh() * m.v

    net = Net(f)
    with torch.no_grad():
        h = net.l(draw(4, 2)) * 3
        net.fixed = h.round() - h
    return net


@way("frozen parameters")
def _frozen() -> nn.Module:
    net = Net()
    net.l.weight.requires_grad_(False)
    return net


@refused("a frozen parameter asked for", "'l.weight' does not require grad")
def _frozen_asked() -> Case:
    net = Net()
    net.l.weight.requires_grad_(False)
    return case(net, params=["l.weight"])


@way("one of several parameters asked for, all reached through a list")
def _chosen() -> Case:
    net = Net(lambda m, x: (x @ m.held[0] + m.held[1]).tanh() * m.held[2])
    net.held = [net.l.weight, net.l.bias, net.v]
    return case(net, params=["l.bias"])


@way("parameters that are views of one tensor")
def _flat() -> nn.Module:
    net = Net()
    flat = draw(8, seed=6)
    net.l.weight, net.l.bias, net.v = (nn.Parameter(flat[a:b].view(s)) for a, b, s in ((0, 4, (2, 2)), (4, 6, 2), (6, 8, 2)))
    return net


@way("p.grad read in forward")
def _gradient_read() -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * (m.v.exp() if m.v.grad is None else m.v * m.v.grad))
    net.v.grad = draw(2, seed=7)
    return net


@way("a cast weight kept from construction")
def _stale() -> nn.Module:
    net = Net(lambda m, x: F.linear(m.l(x).tanh(), m.cast))
    net.cast = net.l.weight.detach().clone()
    return net


@way("a table from lru_cache")
def _cached_table() -> nn.Module:
    @lru_cache
    def table(n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float64)

    return Net(lambda m, x: (m.l(x) + table(2)).tanh() * m.v)


@way("a tensor subclass as parameter")
def _tensor_subclass() -> nn.Module:
    class Named(Tensor):
        pass

    return Net(v=nn.Parameter(draw(2, seed=8).as_subclass(Named)))


@way("a tensor subclass as input")
def _subclass_input() -> Case:
    class Named(Tensor):
        pass

    return case(Net(), inputs=draw(4, 2).as_subclass(Named))


way("w.data", lambda constant: _taken(constant, lambda m: m.v.data.square()))
way("w.detach()", lambda constant: _taken(constant, lambda m: m.v.detach().square()))
way("a part under torch.no_grad()", lambda constant: _taken(constant, torch.no_grad()(lambda m: m.v.square())))
way("self.state_dict(), whose tensors are detached", lambda constant: _taken(constant, lambda m: m.state_dict()["v"].square()))
way(
    "nn.Parameter(w) made in forward",
    lambda constant: _taken(constant, lambda m: nn.Parameter(m.v.square())),
    refused="Parameter",
)
way(
    "a new constant nn.Parameter made in forward",
    lambda: Net(lambda m, x: m.l(x).tanh() * m.v * nn.Parameter(torch.full((2,), 2.0, dtype=x.dtype))),
)
refused(
    "requires_grad turned off in forward, for good",
    "requires_grad",
    lambda: Net(lambda m, x: m.l(x).tanh() * m.v.requires_grad_(False)),
)
way(
    "a tensor that requires grad but is no parameter",
    lambda: Net(lambda m, x: m.l(x).tanh() * m.v * m.extra, extra=draw(2, seed=5).requires_grad_(True)),
)
way(
    "a module in a list, with parameters of its own",
    lambda: Net(lambda m, x: m.held[0](m.l(x).tanh()), held=[generic(nn.Linear(2, 2))]),
)
refused("parameters on the meta device", "meta", lambda: Net().to("meta"))
