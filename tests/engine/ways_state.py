"""Ways to call and what a call may do: derivatives and casts within a forward, losses, states, random numbers, hooks, inputs that change."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import CALLS, Case, Net, case, draw, forward, mse, refused, way


@forward(
    "a buffer changed in place, with effect",
    refused=r"'scale'",
    right=False,
    buffers={"scale": torch.ones(2, dtype=torch.float64)},
)
def _changed(m: Any, x: Tensor) -> Tensor:
    m.scale.mul_(0.9)
    return m.l(x).tanh() * m.v * m.scale


@forward("a buffer that counts calls, without effect", buffers={"calls": torch.tensor(0)})
def _counting_buffer(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.l(x).tanh() * m.v


MEAN = {"mean": torch.ones(2, dtype=torch.float64)}


@forward("a buffer that is replaced, without effect", buffers=MEAN)
def _replaced(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h * m.v


@forward("a buffer written by entries, without effect", buffers=MEAN)
def _by_entries(m: Any, x: Tensor) -> Tensor:
    m.mean[0].add_(1)
    m.mean[1] = 3
    return m.l(x).tanh() * m.v


@way("a buffer written before it is read")
def _written_before_use(constant: bool) -> nn.Module:
    def gate(m: Any, h: Tensor) -> Tensor:
        m.mean.copy_(h.mean(0))
        first, view = m.mean[0] * 1, m.mean[1:]
        m.mean.copy_(h.amax(0))
        view.mul_(2)
        return first + m.mean * view

    net = Net(lambda m, x: (h := m.l(x).tanh()) * m.v * (m.fixed if constant else gate(m, h.detach())))
    net.register_buffer("mean", MEAN["mean"].clone())
    net.fixed = gate(net, net.l(draw(4, 2)).tanh().detach())
    return net


@forward("a batch norm whose statistics are written by the same call", buffers=MEAN)
def _statistics_of_this_call(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    m.mean.fill_(1)
    return F.batch_norm(h, m.mean, m.mean.clone(), training=True) * m.v


@forward(
    "a plain tensor changed in place, with effect",
    refused=rf"'scale'|{CALLS}",
    right=False,
    has={"scale": torch.ones(2, dtype=torch.float64)},
)
def _plain(m: Any, x: Tensor) -> Tensor:
    m.scale.mul_(0.9)
    return m.l(x).tanh() * m.v * m.scale


@forward("a call counter with effect", refused="it changes its 'calls'", right=False, has={"calls": 0})
def _counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.l(x).tanh() * m.v * m.calls


@forward("a warm-up that ends after some calls", has={"calls": 0}, fresh=True, verified=False)
def _warm_up(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.l(x).tanh() * m.v if m.calls <= 2 else m.l(x) * m.v


@forward("outputs appended to a list", has={"seen": []})
def _collected(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    m.seen.append(h)
    return h * m.v


@way("the loss reads the last hidden state, kept as an attribute")
def _activity() -> Case:
    def f(m: Any, x: Tensor) -> Tensor:
        m.last_hidden = m.l(x).tanh()
        return m.last_hidden * m.v

    net = Net(f)
    return case(net, loss=lambda z, t: mse(z, t) + net.last_hidden.pow(4).mean())


@forward("a function of a parameter kept by the first call", has={"kept": None}, refused=rf"'kept'|{CALLS}", fresh=True)
def _stale(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.v.exp()
    return m.l(x).tanh() * m.kept


@forward("a parameter set by the first call", refused=r"'v'|initialised|\bready\b", right=False, has={"ready": False})
def _act_norm(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    if not m.ready:
        m.v.data.copy_(1 / h.detach().std(0))
        m.ready = True
    return (h * m.v).tanh()


@forward("a parameter renormalised in place by every call", refused=r"'l\.weight'", right=False)
def _max_norm(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.l.weight.mul_(0.9)
    return m.l(x).tanh() * m.v


@refused("spectral_norm in training", r"_u|_v|buffer")
def _spectral_norm() -> nn.Module:
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2).double())
    return Net(lambda m, x: m.inner(m.l(x).tanh()), inner=inner)


@forward("the default dtype changed for a part of forward")
def _default_dtype(m: Any, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return m.l(x).tanh() * m.v * torch.tensor([1.0, 2.0])
    finally:
        torch.set_default_dtype(before)


way("batch norm in training", lambda: Net(lambda m, x: m.norm(m.l(x)).tanh() * m.v, norm=nn.BatchNorm1d(2)))


RANDOM = "random"


@way("a Generator seeded anew by every call", refused=RANDOM)
def _seeded() -> nn.Module:
    def noise(x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)

    return Net(lambda m, x: (m.l(x) + noise(x)).tanh() * m.v)


@forward("a hook that scales the gradient of a value", refused=r"hook|gradient", right=False)
def _tensor_hook(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    if h.requires_grad:
        h.register_hook(lambda slope: 3 * slope)
    return h * m.v


@way("a full backward hook that looks")
def _backward_hook() -> nn.Module:
    net = Net(lambda m, x: m.l((x * m.v).exp()).tanh())
    net.seen = []
    net.l.register_full_backward_hook(lambda module, into, out: net.seen.append(float(out[0].detach().norm())))
    return net


@refused("a full backward hook that scales", r"hook|gradient")
def _scaling_backward_hook() -> nn.Module:
    net = Net(lambda m, x: m.l((x * m.v).exp()).tanh())
    net.l.register_full_backward_hook(lambda module, into, out: (3 * into[0],))
    return net


refused(
    "dropout of attention weights",
    RANDOM,
    lambda: Net(lambda m, x: F.scaled_dot_product_attention(*[m.l(x)[None] * m.v] * 3, dropout_p=0.5)[0]),
)
refused("torch.rand in forward", RANDOM, lambda: Net(lambda m, x: (m.l(x) + torch.rand_like(x)).tanh() * m.v))
refused("torch.randn in the loss", RANDOM, lambda: case(Net(), loss=lambda z, t: mse(z, t + torch.randn_like(t))))
refused(
    "a Generator that goes on from call to call",
    rf"{RANDOM}|{CALLS}",
    lambda: Net(
        lambda m, x: (m.l(x) + torch.rand(4, 2, generator=m.numbers, dtype=x.dtype)).tanh() * m.v,
        numbers=torch.Generator().manual_seed(3),
    ),
)
refused("random numbers of Python", rf"{RANDOM}|{CALLS}", lambda: Net(lambda m, x: m.l(x).tanh() * m.v * random.random()))
refused("random numbers of NumPy", rf"{RANDOM}|{CALLS}", lambda: Net(lambda m, x: m.l(x).tanh() * m.v * np.random.rand()))  # noqa: NPY002
way("an input changed in place", lambda: Net(lambda m, x: m.l(x.add_(1)).tanh() * m.v), refused="input", fresh=True)
way(
    "a dict among the inputs that forward pops from",
    lambda: case(Net(lambda m, batch: m.l(batch.pop("x")).tanh() * m.v), inputs=({"x": draw(4, 2)},)),
    refused="input",
    fresh=True,
)
way(
    "a target changed in place by the loss",
    lambda: case(Net(), loss=lambda z, t: mse(z, t.mul_(2))),
    refused="target",
    fresh=True,
)


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


@refused("a scripted submodule", "TorchScript")
def _scripted() -> nn.Module:
    net = Net()
    net.l = torch.jit.trace(net.l, draw(4, 2))
    return net


way(
    "a loss that is a module with constant parameters of its own",
    lambda: case(Net(), loss=Net(lambda m, z, t: ((z - t) * m.v).square().mean()).requires_grad_(False)),
)


@way("a loss that calls the model again")
def _consistency() -> Case:
    net, more = Net(), draw(4, 2, seed=5)
    return case(net, loss=lambda z, t: mse(z, t) + mse(net(more), z))


@way("a gradient penalty in the loss", refused=r"autograd\.grad|inner")
def _gradient_penalty() -> Case:
    net, more = Net(), draw(4, 2, seed=5)

    def loss(z: Tensor, t: Tensor) -> Tensor:
        at = more.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        return mse(z, t) + slope.square().mean()

    return case(net, loss=loss)


@way("one tensor given twice, compared by identity")
def _same_input() -> Case:
    x = draw(4, 2)
    net = Net(lambda m, query, key: m.l(query).tanh() * m.v if query is key else m.l(query) @ key.T @ key)
    return case(net, inputs=(x, x))


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
