"""Ways in which a call changes a state, draws numbers or changes a gradient on its way back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import Case, Net, case, draw, generic, mse, refused, way

CALLS = r"two calls|called again|earlier calls|each call|depends on .*calls"
RANDOM = r"random"


def _with_buffer(f: Callable[..., Any], **buffers: Tensor) -> nn.Module:
    net = Net(f)
    for name, value in buffers.items():
        net.register_buffer(name, value)
    return net


@refused("a buffer reassigned in forward, with effect", r"'scale'")
def _reassigned() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.scale = m.scale * 0.9
        return m.l(x).tanh() * m.v * m.scale

    return _with_buffer(f, scale=torch.ones(3, dtype=torch.float64))


@refused("a buffer changed in place, with effect", r"'scale'")
def _changed() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.scale.mul_(0.9)
        return m.l(x).tanh() * m.v * m.scale

    return _with_buffer(f, scale=torch.ones(3, dtype=torch.float64))


@way("a buffer that counts calls, without effect", refused=r"'calls'")
def _counting_buffer() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.l(x).tanh() * m.v

    return _with_buffer(f, calls=torch.tensor(0))


@refused("a plain tensor changed in place, with effect", rf"'scale'|{CALLS}")
def _plain() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.scale.mul_(0.9)
        return m.l(x).tanh() * m.v * m.scale

    net = Net(f)
    net.scale = torch.ones(3, dtype=torch.float64)
    return net


@refused("a call counter with effect", rf"'calls'|{CALLS}")
def _counter() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.l(x).tanh() * m.v * m.calls

    net = Net(f)
    net.calls = 0
    return net


@way("a call counter without effect")
def _idle_counter() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.l(x).tanh() * m.v

    net = Net(f)
    net.calls = 0
    return net


@refused("a counter in a closure, with effect", CALLS)
def _closure_counter() -> nn.Module:
    calls = [0]

    def f(m: Any, x: Tensor) -> Tensor:
        calls[0] += 1
        return m.l(x).tanh() * m.v * calls[0]

    return Net(f)


@refused("a warm-up that ends after some calls", rf"'calls'|{CALLS}")
def _warm_up() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.l(x).tanh() * m.v if m.calls <= 2 else m.l(x) * m.v

    net = Net(f)
    net.calls = 0
    return net


@way("outputs appended to a list")
def _collected() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x).tanh()
        m.seen.append(h)
        return h * m.v

    net = Net(f)
    net.seen = []
    return net


def _remembering() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.last_hidden = m.l(x).tanh()
        return m.last_hidden * m.v

    net = Net(f)
    net.last_hidden = None
    return net


@way("the last hidden state kept as an attribute")
def _kept() -> nn.Module:
    return _remembering()


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


@way("a constant computed by the first call and kept")
def _lazy_table() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        if m.table is None:
            m.table = torch.arange(3, dtype=x.dtype)
        return (m.l(x) + m.table).tanh() * m.v

    net = Net(f)
    net.table = None
    return net


@way("a function of a parameter kept by the first call", refused=rf"'kept'|{CALLS}", fresh=True)
def _stale() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        if m.kept is None:
            m.kept = m.v.exp()
        return m.l(x).tanh() * m.kept

    net = Net(f)
    net.kept = None
    return net


@refused("a parameter set by the first call", r"'v'|initialised|\bready\b")
def _act_norm() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x)
        if not m.ready:
            m.v.data.copy_(1 / h.detach().std(0))
            m.ready = True
        return (h * m.v).tanh()

    net = Net(f)
    net.ready = False
    return net


@refused("a parameter renormalised in place by every call", r"'l\.weight'")
def _max_norm() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.l.weight.mul_(0.9)
        return m.l(x).tanh() * m.v

    return Net(f)


@refused("nn.Embedding with max_norm", r"max_norm|'table\.weight'")
def _embedding() -> Case:
    net = Net(lambda m, ids: m.l(m.table(ids)).tanh() * m.v, table=nn.Embedding(4, 3, max_norm=0.3))
    return case(net, inputs=torch.tensor([0, 1, 2, 3]))


@refused("batch norm in training", "batch norm")
def _batch_norm() -> nn.Module:
    return Net(lambda m, x: m.norm(m.l(x)).tanh() * m.v, norm=nn.BatchNorm1d(3))


@way("batch norm in evaluation")
def _batch_norm_at_rest() -> nn.Module:
    return Net(lambda m, x: m.norm(m.l(x)).tanh() * m.v, norm=nn.BatchNorm1d(3)).eval()


@refused("spectral_norm in training", r"_u|_v|buffer")
def _spectral_norm() -> nn.Module:
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3).double())
    return Net(lambda m, x: m.inner(m.l(x).tanh()), inner=inner)


@refused("dropout in training", "dropout")
def _dropout() -> nn.Module:
    return Net(lambda m, x: m.drop(m.l(x).tanh()) * m.v, drop=nn.Dropout(0.3))


@refused("F.dropout(training=True)", RANDOM)
def _dropout_function() -> nn.Module:
    return Net(lambda m, x: F.dropout(m.l(x).tanh(), 0.3) * m.v)


@refused("torch.rand in forward", RANDOM)
def _rand() -> nn.Module:
    return Net(lambda m, x: (m.l(x) + torch.rand_like(x)).tanh() * m.v)


@refused("torch.randn in the loss", RANDOM)
def _noisy_loss() -> Case:
    return case(Net(), loss=lambda z, t: mse(z, t + torch.randn_like(t)))


@refused("a Generator that goes on from call to call", rf"{RANDOM}|{CALLS}")
def _generator() -> nn.Module:
    net = Net(lambda m, x: (m.l(x) + torch.rand(4, 3, generator=m.numbers, dtype=x.dtype)).tanh() * m.v)
    net.numbers = torch.Generator().manual_seed(3)
    return net


@way("a Generator seeded anew by every call", refused=RANDOM)
def _seeded() -> nn.Module:
    def noise(x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)

    return Net(lambda m, x: (m.l(x) + noise(x)).tanh() * m.v)


@refused("random numbers of Python", rf"{RANDOM}|{CALLS}")
def _python_random() -> nn.Module:
    return Net(lambda m, x: m.l(x).tanh() * m.v * random.random())


@refused("random numbers of NumPy", rf"{RANDOM}|{CALLS}")
def _numpy_random() -> nn.Module:
    return Net(lambda m, x: m.l(x).tanh() * m.v * np.random.rand())  # noqa: NPY002


@refused("a hook that scales the gradient of a value", r"hook|gradient")
def _tensor_hook() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda slope: 3 * slope)
        return h * m.v

    return Net(f)


@refused("a hook that scales the gradient of a parameter", r"hook|gradient")
def _parameter_hook() -> nn.Module:
    net = Net()
    net.v.register_hook(lambda slope: 3 * slope)
    return net


@way("a hook that looks at the gradient of a value")
def _looking_hook() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        h = m.l(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda slope: m.seen.append(float(slope.detach().norm())))
        return h * m.v

    net = Net(f)
    net.seen = []
    return net


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


@way("modes changed by forward")
def _modes() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        m.drop.eval()
        return m.drop(m.l(x).tanh()) * m.v

    net = Net(f, drop=nn.Dropout(0.3))
    net.drop.p = 0.0
    return net


@way("an input changed in place", refused="input", fresh=True)
def _changed_input() -> nn.Module:
    return Net(lambda m, x: m.l(x.add_(1)).tanh() * m.v)


@way("a dict among the inputs that forward pops from", refused="input", fresh=True)
def _popped() -> Case:
    return case(Net(lambda m, batch: m.l(batch.pop("x")).tanh() * m.v), inputs=({"x": draw(4, 3)},))


@way("a list among the inputs that forward appends to", refused="input", fresh=True)
def _appended() -> Case:
    def f(m: Any, states: list[Tensor]) -> Tensor:
        states.append(m.l(states[-1]).tanh())
        return states[-1] * m.v * len(states)

    return case(Net(f), inputs=([draw(4, 3)],))


@way("a target changed in place by the loss", refused="target", fresh=True)
def _changed_target() -> Case:
    return case(Net(), loss=lambda z, t: mse(z, t.mul_(2)))


@way("NaN in a buffer that is not used", refused="'idle' contains NaN")
def _spoiled() -> nn.Module:
    return _with_buffer(lambda m, x: m.l(x).tanh() * m.v, idle=torch.full((2,), float("nan")))


@way("the default dtype changed for a part of forward")
def _default_dtype() -> nn.Module:
    def f(m: Any, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return m.l(x).tanh() * m.v * torch.tensor([1.0, 2.0, 3.0])
        finally:
            torch.set_default_dtype(before)

    return Net(f)


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
    net.state = torch.zeros(4, 3, dtype=torch.float64)
    return net
