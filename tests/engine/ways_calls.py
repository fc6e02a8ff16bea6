"""Ways to call: derivatives, transforms, compilers and casts within a forward; what a loss may be; what an input may be."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import Case, Net, case, draw, forward, generic, mse, refused, way

CAST = "autocast"


@forward("autocast in forward, in float64")
def _autocast_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.l(x).tanh() * m.v


@way("a part under inference_mode", refused="inference")
def _inference(constant: bool) -> nn.Module:
    def gate(m: Any) -> Tensor:
        with torch.inference_mode():
            value = m.v.square()
        return value.clone()

    net = Net(lambda m, x: m.l(x).tanh() * m.v * (m.fixed if constant else gate(m)))
    net.fixed = net.v.detach().square()
    return net


@forward("the whole forward under torch.no_grad()", refused=r"does not depend|has an effect|no_grad", right=False)
def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.l(x).tanh() * m.v


class Rounded(torch.autograd.Function):
    """Rounds; its backward is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


@way("a custom autograd.Function that is a straight-through estimator", refused="Rounded|custom|Function|gradient")
def _straight_through(constant: bool) -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x) * 3
        return (h + m.fixed if constant else Rounded.apply(h)).tanh() * m.v

    net = Net(f)
    with torch.no_grad():
        h = net.l(draw(4, 2)) * 3
        net.fixed = h.round() - h
    return net


@refused("a scripted submodule", "TorchScript")
def _scripted() -> nn.Module:
    net = Net()
    net.l = torch.jit.trace(net.l, draw(4, 2))
    return net


def _scaled_gelu(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x + 0.04 * x * x * x)) * scale


@way("a scripted function")
def _scripted_function() -> nn.Module:
    scripted = torch.jit.script(_scaled_gelu)
    net = Net(lambda m, x: scripted(m.l(x), m.v))
    for _ in range(3):  # from the third call on it has a derivative of its own
        net(draw(4, 2).to(net.v)).sum().backward()
    net.zero_grad()
    return net


@way("a number taken out of a tensor")
def _item(constant: bool) -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * m.v * (m.fixed if constant else float(m.v.detach().sum())))
    net.fixed = float(net.v.detach().sum())
    return net


@way("a NumPy array made of a parameter")
def _numpy(constant: bool) -> nn.Module:
    net = Net(lambda m, x: m.l(x).tanh() * m.v * (m.fixed if constant else torch.from_numpy(m.v.detach().numpy().copy())))
    net.fixed = net.v.detach().clone()
    return net


@way("a loss that is a module with parameters of its own")
def _loss_module() -> Case:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(draw(2, seed=4))

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            return ((z - t) * self.scale).square().mean()

    return case(Net(), loss=Weighted())


@way("a loss that closes over the inputs")
def _loss_on_inputs() -> Case:
    x = draw(4, 2)
    return case(Net(), inputs=x, loss=lambda z, t: ((z - t) * x).square().mean())


@way("a loss that calls the model again")
def _consistency() -> Case:
    net, more = Net(), draw(4, 2, seed=5)
    return case(net, loss=lambda z, t: mse(z, t) + mse(net(more), z))


@way("a loss that calls a submodule")
def _submodule() -> Case:
    net = Net()
    return case(net, loss=lambda z, t: mse(net.l(z), t))


@way("a gradient penalty in the loss", refused=r"autograd\.grad|inner")
def _gradient_penalty() -> Case:
    net, more = Net(), draw(4, 2, seed=5)

    def loss(z: Tensor, t: Tensor) -> Tensor:
        at = more.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        return mse(z, t) + slope.square().mean()

    return case(net, loss=loss)


@way("GaussianNLLLoss")
def _gaussian() -> Case:
    net = Net(lambda m, x: (m.l(x).tanh(), F.softplus(m.v).expand(4, 2)))
    return case(net, loss=lambda z, t: nn.GaussianNLLLoss()(z[0], t, z[1]))


@way("a dict of outputs, some of which the loss reads")
def _outputs() -> Case:
    net = Net(lambda m, x: {"z": m.l(x).tanh() * m.v, "norm": m.v.square().sum(), "name": "out"})
    return case(net, loss=lambda out, t: mse(out["z"], t) * (1 + out["norm"]))


@way("one tensor given twice, compared by identity")
def _same_input() -> Case:
    x = draw(4, 2)
    net = Net(lambda m, query, key: m.l(query).tanh() * m.v if query is key else m.l(query) @ key.T @ key)
    return case(net, inputs=(x, x))


@way("self-attention, whose inputs are one tensor")
def _attention() -> Case:
    x = draw(2, 3, 2)
    net = generic(nn.MultiheadAttention(2, 1, batch_first=True))
    return case(net, inputs=(x, x, x), target=draw(2, 3, 2, seed=2), loss=lambda z, t: mse(z[0], t))


@way("the inputs as target")
def _autoencoder() -> Case:
    x = draw(4, 2)
    return case(Net(), inputs=x, target=x)


@way("an input compared with a tensor of the module by identity")
def _known_input() -> Case:
    x = draw(4, 2)
    net = Net(lambda m, given: m.l(given).tanh() * (m.v.exp() if given is m.known else m.v))
    net.known = x
    return case(net, inputs=x)


way(
    "the call under autocast, in float64",
    lambda: case(Net(), around=partial(torch.autocast, "cpu", torch.bfloat16)),
    refused=CAST,
)
way("the call under torch.no_grad()", lambda: case(Net(), around=torch.no_grad), reference=lambda: case(Net()))
way(
    "functional_call in forward",
    lambda: Net(lambda m, x: torch.func.functional_call(m.l, {"weight": m.l.weight * 2, "bias": m.v}, (x,)).tanh()),
)
way("an input that requires grad", lambda: case(Net(), inputs=draw(4, 2).requires_grad_(True)))
way(
    "a model that takes keyword arguments",
    lambda: case(Net(lambda m, *, x, scale: (m.l(x) * scale).tanh() * m.v), inputs={"x": draw(4, 2), "scale": draw(2, seed=9)}),
)
