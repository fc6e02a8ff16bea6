"""Ways to reach, hide, tie or freeze a parameter, and what autograd takes for constant.

Where a value of a parameter enters as a constant, the reference has a tensor of the same entries in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from ways import Case, Net, case, draw, generic, mse, refused, way

GLOBAL: dict[str, Tensor] = {}


def _global(layer: nn.Linear) -> str:
    GLOBAL["weight"] = layer.weight
    return "weight"


HOLDERS: dict[str, tuple[Callable[[nn.Linear], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda layer: [layer.weight], lambda held: held[0]),
    "dict": (lambda layer: {"w": layer.weight}, lambda held: held["w"]),
    "closure or lambda": (lambda layer: lambda: layer.weight, lambda held: held()),
    "global variable": (_global, lambda held: GLOBAL[held]),
    "view made before": (lambda layer: [layer.weight.T], lambda held: held[0].T),
}


def _held(keep: Callable[[nn.Linear], Any], read: Callable[[Any], Tensor]) -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() @ read(m.held))
    net.__dict__["held"] = keep(net.l)
    return net


for _name, (_keep, _read) in HOLDERS.items():
    way(f"a parameter in a {_name}", partial(_held, _keep, _read))


def _sum_of_squares(parameters: Any) -> Tensor:
    return sum((p.square().sum() for p in parameters), torch.zeros((), dtype=torch.float64))


@way("quartic penalty in the loss, of all parameters as a vector")
def _vector_penalty() -> Case:
    net = Net()
    return case(net, loss=lambda z, t: mse(z, t) + nn.utils.parameters_to_vector(net.parameters()).square().sum().square())


@way("the loss is a method of the model that reads its parameters")
def _method() -> Case:
    class Model(Net):
        def objective(self, z: Tensor, t: Tensor) -> Tensor:
            return mse(z, t) + self.v.square().sum() * self.l.weight.square().sum()

    net = Model()
    return case(net, loss=net.objective)


@way("the module returns its loss, penalty included")
def _own_loss() -> Case:
    net = Net(lambda m, x, y: mse(m.l(x).tanh() * m.v, y) + _sum_of_squares(m.parameters()).square())
    return Case(net, (draw(4, 2), draw(4, 2, seed=2)), None, loss=None)


@way("a penalty on some parameters that the module does not use")
def _unused_penalised() -> Case:
    net = Net(lambda m, x: m.l(x).tanh())
    return case(net, loss=lambda z, t: mse(z, t) + net.v.pow(4).sum())


@way("forward pre-hook multiplies by a parameter")
def _pre_hook() -> nn.Module:
    net = Net()
    net.l.register_forward_pre_hook(lambda module, given: (given[0] @ module.weight,))
    return net


@way("one parameter under two names")
def _tied() -> nn.Module:
    net = Net(lambda m, x: m.other(m.l(x).tanh()), other=nn.Linear(2, 2))
    net.other.weight = net.l.weight
    return net


BRANCHES: dict[str, Callable[[Any], bool]] = {
    "isinstance(w, nn.Parameter)": lambda m: isinstance(m.v, nn.Parameter),
    "type(w) is nn.Parameter": lambda m: type(m.v) is nn.Parameter,
    "w.requires_grad": lambda m: m.v.requires_grad,
    "w.is_leaf": lambda m: m.v.is_leaf,
    "w is another name's": lambda m: m.again[0] is m.v,
    "id(w) in a dict": lambda m: id(m.v) in m.known,
    "w among self.parameters()": lambda m: any(p is m.v for p in m.parameters()),
    "torch.is_grad_enabled()": lambda m: torch.is_grad_enabled(),
    "the sign of a value": lambda m: bool(m.l.weight.sum() > -100),
}


def _branch(condition: Callable[[Any], bool]) -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * (m.v.exp() if condition(m) else m.v.square()))
    net.again, net.known = [net.v], {id(net.v): "v"}
    return net


for _name, _condition in BRANCHES.items():
    way(f"a branch on {_name}", partial(_branch, _condition))


LEFT_AS_THEY_ARE: dict[str, Callable[[Any], Any]] = {
    "w.to() of its dtype under torch.no_grad()": lambda m: torch.no_grad()(m.v.to)(m.v.dtype),
    "self.to() of its dtype in forward": lambda m: m.to(m.v.dtype),
    "its own .data": lambda m: setattr(m.v, "data", m.v.data),
}


def _left(touch: Callable[[Any], Any]) -> nn.Module:
    return Net(lambda m, x: (touch(m), m.l(x).tanh() * m.v)[1])


for _name, _touch in LEFT_AS_THEY_ARE.items():
    way(f"a parameter that stays as it is: {_name}", partial(_left, _touch))


@refused("a branch on where a parameter lies in memory", "two calls .* differ|two calls .* different losses")
def _address() -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * (m.v.exp() if m.v.data_ptr() == m.address else m.v.square()))
    net.address = net.v.data_ptr()
    return net


# torch has no second derivative of it that is right
way(
    "parametrizations.weight_norm",
    lambda: generic(Net(inner=parametrizations.weight_norm(nn.Linear(2, 2)), f=lambda m, x: m.inner(m.l(x).tanh()))),
    verified=False,
)
way("dtype of next(self.parameters())", lambda: Net(lambda m, x: m.l(x.to(next(m.parameters()).dtype)).tanh() * m.v))


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
