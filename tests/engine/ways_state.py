"""Ways in which a call changes what the next one finds: buffers, counters, kept values, parameters, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from ways import CALLS, Case, Net, case, forward, generic, mse, refused, way


def _with_buffer(f: Callable[..., Any], **buffers: Tensor) -> nn.Module:
    net = Net(f)
    for name, value in buffers.items():
        net.register_buffer(name, value)
    return net


@forward(
    "a buffer reassigned in forward, with effect",
    refused=r"'scale'",
    right=False,
    buffers={"scale": torch.ones(2, dtype=torch.float64)},
)
def _reassigned(m: Any, x: Tensor) -> Tensor:
    m.scale = m.scale * 0.9
    return m.l(x).tanh() * m.v * m.scale


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


@forward("a call counter without effect", has={"calls": 0})
def _idle_counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.l(x).tanh() * m.v


@refused("a counter in a closure, with effect", CALLS)
def _closure_counter() -> nn.Module:
    calls = [0]

    def f(m: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return m.l(x).tanh() * m.v * calls[0]

    return Net(f)


@forward("a warm-up that ends after some calls", has={"calls": 0}, fresh=True, verified=False)
def _warm_up(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.l(x).tanh() * m.v if m.calls <= 2 else m.l(x) * m.v


@forward("outputs appended to a list", has={"seen": []})
def _collected(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    m.seen.append(h)
    return h * m.v


def _remembering() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.last_hidden = m.l(x).tanh()
        return m.last_hidden * m.v

    return Net(f, last_hidden=None)


@way("an attribute that the first call makes")
def _first_made() -> nn.Module:
    net = _remembering()
    del net.last_hidden
    return net


@way("the loss reads the last hidden state")
def _activity() -> Case:
    net = _remembering()
    return case(net, loss=lambda z, t: mse(z, t) + net.last_hidden.pow(4).mean())


@way("an auxiliary loss collected in a list by the module, added by the loss")
def _auxiliary() -> Case:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x).tanh()
        m.losses.clear()
        m.losses.append(h.square().mean() * m.v.square().sum())
        return h * m.v

    net = Net(f)
    net.losses = []
    return case(net, loss=lambda z, t: mse(z, t) + sum(net.losses))


@forward("a constant computed by the first call and kept", has={"table": None})
def _lazy_table(m: Any, x: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.arange(2, dtype=x.dtype)
    return (m.l(x) + m.table).tanh() * m.v


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


@refused("nn.Embedding with max_norm", r"max_norm|'table\.weight'")
def _embedding() -> Case:
    net = Net(lambda m, ids: m.l(m.table(ids)).tanh() * m.v, table=nn.Embedding(4, 2, max_norm=0.3))
    return case(net, inputs=torch.tensor([0, 1, 2, 3]))


@refused("spectral_norm in training", r"_u|_v|buffer")
def _spectral_norm() -> nn.Module:
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2).double())
    return Net(lambda m, x: m.inner(m.l(x).tanh()), inner=inner)


@way("modes changed by forward")
def _modes() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.drop.eval()
        return m.drop(m.l(x).tanh()) * m.v

    net = Net(f, drop=nn.Dropout(0.3))
    net.drop.p = 0.0
    return net


@forward("the default dtype changed for a part of forward")
def _default_dtype(m: Any, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return m.l(x).tanh() * m.v * torch.tensor([1.0, 2.0])
    finally:
        torch.set_default_dtype(before)


@way("forward replaced on the instance")
def _patched() -> nn.Module:
    net = Net()
    net.forward = lambda x: net.l(x).tanh() * net.v.exp()
    return net


@way("a recurrent state that the caller resets", refused=rf"'state'|{CALLS}", fresh=True)
def _recurrent() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.state = m.l(x + m.state).tanh()
        return m.state * m.v

    net = generic(Net(f))
    net.state = torch.zeros(4, 2, dtype=torch.float64)
    return net


way("the last hidden state kept as an attribute", lambda: _remembering())
way("batch norm in training", lambda: Net(lambda m, x: m.norm(m.l(x)).tanh() * m.v, norm=nn.BatchNorm1d(2)))
way("batch norm in evaluation", lambda: Net(lambda m, x: m.norm(m.l(x)).tanh() * m.v, norm=nn.BatchNorm1d(2)).eval())
way(
    "NaN in a buffer that is not used",
    lambda: _with_buffer(lambda m, x: m.l(x).tanh() * m.v, idle=torch.full((2,), float("nan"))),
    refused="'idle' contains NaN",
)
