"""A perceptron, its data, and the point at which approximations are made."""

from __future__ import annotations

from typing import Any

import torch
from curvature_reference import draw, randomised
from torch import nn

from hessiankit.curvature.approximating.approximations import Point
from hessiankit.request.read import read_request

AGREED = 1e-10
X, Y, T = draw(6, 3), torch.tensor([0, 3, 1, 2, 2, 0]), draw(6, 4, seed=3)


def perceptron(*, bias: bool = True) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias)))


def point(
    module: nn.Module, inputs: Any, target: Any, loss: Any = "cross_entropy", *, minibatch: int = 1, **options: Any
) -> Point:
    kind = options.setdefault("kind", "ggn")
    tasks = read_request(module, inputs, target, loss=loss, **options).together()
    return Point(module, tasks, kind, None, "dense", None, 60, minibatch, 5, 0, {})
