"""Norms of torch inside the context, by every route, against central differences of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from curvature_reference import draw
from operator_cases import error
from torch import Tensor
from torch.nn import functional as F

import hessiankit as hk

Loss = Callable[..., Tensor]
X = draw(6, 4)
NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda z, g, b: F.layer_norm(z, (4,), g, b),
    "layer_norm, no gain": lambda z, g, b: F.layer_norm(z, (4,)) * g + b,
    "layer_norm, a bias and no gain": lambda z, g, b: F.layer_norm(z, (4,), None, b) * g,
    "torch.layer_norm": lambda z, g, b: torch.layer_norm(z, (4,), g, b),
    "rms_norm": lambda z, g, b: F.rms_norm(z, (4,), g) + b,
    "batch_norm": lambda z, g, b: F.batch_norm(z, None, None, g, b, True),
    "batch_norm, running": lambda z, g, b: F.batch_norm(z, X[0], X[1].abs(), g, b),
    "instance_norm": lambda z, g, b: F.instance_norm(z.view(2, 4, 3), None, None, g, b),
    "group_norm": lambda z, g, b: F.group_norm(z, 2, g, b),
    "group_norm, no gain": lambda z, g, b: F.group_norm(z, 2) * g + b,
    "weight_norm": lambda z, g, b: F.linear(z, torch._weight_norm(z[:4], g[:, None], 0), b),
}
ROUTES: dict[str, Callable[[Loss, Tensor], Tensor]] = {
    "torch.func.hessian": lambda f, t: torch.func.hessian(f)(t),
    "jacfwd(jacfwd)": lambda f, t: torch.func.jacfwd(torch.func.jacfwd(f))(t),
    "jacrev(jacrev)": lambda f, t: torch.func.jacrev(torch.func.jacrev(f))(t),
    "jacrev(jacfwd)": lambda f, t: torch.func.jacrev(torch.func.jacfwd(f))(t),
    "double backward": torch.autograd.functional.hessian,
    "batched": lambda f, t: torch.autograd.functional.hessian(f, t, vectorize=True),
}


def normed(norm: Callable[..., Tensor], t: Tensor) -> Tensor:
    W, gain, bias = t.split((16, 4, 4))
    return norm(X @ W.view(4, 4), gain, bias).sin().sum()


def slopes_by_differences(f: Loss, t: Tensor, h: float = 1e-3) -> Tensor:
    """The Hessian by central differences of eighth order of the gradient."""

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(f(x := x.requires_grad_()), x)[0]

    weights = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
    steps = torch.eye(len(t), dtype=t.dtype) * h
    return torch.stack([sum(w * (slope(t + k * e) - slope(t - k * e)) / h for k, w in weights.items()) for e in steps])  # type: ignore[misc]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_by_every_route(name: str, route: str) -> None:
    if (name, route) == ("group_norm", "batched"):
        pytest.skip("torch 2.13 cannot batch its backward of group_norm")
    f, t = partial(normed, NORMS[name]), draw(24, seed=4)
    with hk.twice_differentiable():
        found = ROUTES[route](f, t)
    assert error(found, slopes_by_differences(f, t)) <= 1e-8
