"""Random numbers, hooks that change a gradient on its way back, and inputs that a call changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import CALLS, Case, Net, case, draw, forward, mse, refused, way

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
