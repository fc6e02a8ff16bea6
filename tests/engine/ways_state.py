"""Ways in which a call changes what the next one finds, draws random numbers, hooks gradients or changes its inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import CALLS, Case, Net, case, draw, forward, generic, mse, refused, way


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


@forward(
    "NaN in a buffer that is not used",
    refused="'idle' contains NaN",
    buffers={"idle": torch.full((2,), float("nan"))},
)
def _spoiled(m: Any, x: Tensor) -> Tensor:
    return m.l(x).tanh() * m.v


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


@refused("a hook that scales the gradient of a parameter", r"hook|gradient")
def _parameter_hook() -> nn.Module:
    net = Net()
    net.v.register_hook(lambda slope: 3 * slope)
    return net


@forward("a hook that looks at the gradient of a value", has={"seen": []})
def _looking_hook(m: Any, x: Tensor) -> Tensor:
    h = m.l(x).tanh()
    if h.requires_grad:
        h.register_hook(lambda slope: m.seen.append(float(slope.detach().norm())))
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


@way("an optimizer step in a post-accumulate hook")
def _fused_step() -> nn.Module:
    net = Net()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    return net


@way("a forward hook for all modules")
def _global_hook() -> Case:
    @contextmanager
    def hooked() -> Iterator[None]:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, given, out: out * 2 if isinstance(module, nn.Linear) else None
        )
        try:
            yield
        finally:
            handle.remove()

    return case(Net(), around=hooked)


@way("a list among the inputs that forward appends to", refused="input", fresh=True)
def _appended() -> Case:
    def f(m: Any, states: list[Tensor]) -> Tensor:
        states.append(m.l(states[-1]).tanh())
        return states[-1] * m.v * len(states)

    return case(Net(f), inputs=([draw(4, 2)],))


refused("dropout in training", "dropout", lambda: Net(lambda m, x: m.drop(m.l(x).tanh()) * m.v, drop=nn.Dropout(0.3)))
refused("F.dropout(training=True)", RANDOM, lambda: Net(lambda m, x: F.dropout(m.l(x).tanh(), 0.3) * m.v))
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
