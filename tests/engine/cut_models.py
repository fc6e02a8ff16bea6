"""Eighteen models of every kind of stream, at whose values the engine may cut: chains, stacks, recurrences, convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hessiankit as hk
from benchmarks.gpt2 import TinyGPT2


def chain(*widths: int) -> nn.Module:
    """A perceptron of some widths."""
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d) to (B, h)."""
        states: Tensor = self.layer(x)[0]
        return states[:, -1]


class Residual(nn.Module):
    """A stream x + B tanh(A x), layer after layer."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(chain(width, hidden, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def _stack(layers: int, d: int, hidden: int, **options: Any) -> nn.Module:
    return nn.Sequential(*(hk.TransformerBlock(d_model=d, d_ff=hidden, **options) for _ in range(layers)))


def _convolutions() -> nn.Module:
    pooled = [nn.Conv2d(1, 6, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 12, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*pooled, nn.Flatten(), nn.Linear(48, 20), nn.Tanh(), nn.Linear(20, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain of 60, width 3": (lambda: chain(*[3] * 61), (8, 3)),
    "chain of 20, width 12": (lambda: chain(*[12] * 21), (32, 12)),
    "perceptron, wide": (lambda: chain(20, 64, 64, 10), (64, 20)),
    "perceptron, many rows": (lambda: chain(4, 16, 16, 16, 2), (2000, 4)),
    "bottleneck": (lambda: chain(40, 30, 3, 30, 40), (16, 40)),
    "narrow stream": (lambda: Residual(3, 24, 12), (2, 4, 3)),
    "wide stream": (lambda: Residual(24, 4, 6), (8, 24)),
    "one block": (lambda: _stack(1, 16, 64), (1, 49, 16)),
    "one block, eight samples": (lambda: _stack(1, 8, 32), (8, 8, 8)),
    "two blocks": (lambda: _stack(2, 16, 64), (1, 49, 16)),
    "four blocks": (lambda: _stack(4, 16, 64), (1, 49, 16)),
    "four narrow blocks": (lambda: _stack(4, 8, 32), (16, 8, 8)),
    "three pre-norm blocks": (lambda: _stack(3, 8, 32, placement="pre", n_heads=2), (2, 16, 8)),
    "encoder": (_encoder, (2, 12, 8)),
    "GPT-2, two layers": (lambda: TinyGPT2(64, 16, d_model=16, tied=True), (4, 16)),
    "convolutions": (_convolutions, (8, 1, 12, 12)),
    "gated recurrence": (lambda: Recurrent(nn.GRU(4, 8, batch_first=True)), (4, 10, 4)),
    "recurrence of two layers": (lambda: Recurrent(nn.RNN(3, 6, 2, batch_first=True)), (4, 12, 3)),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, str]:
    """Return a module, inputs, a target and the loss."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    module = make().double()
    if name.startswith("GPT"):
        tokens = torch.randint(64, shape)
        return module, tokens, tokens.flip(1), "cross_entropy"
    x = torch.randn(shape).double()
    return module, x, torch.randn_like(module(x)), "mse"
