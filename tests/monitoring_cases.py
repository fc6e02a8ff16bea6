"""Shared by the tests of monitors: a model with dropout and a buffer that counts its calls, data, and a training loop."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hessiankit as hk

VOCABULARY = 13


class Noisy(nn.Module):
    """A language model whose training draws random numbers and changes a buffer."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = hk.Transformer(VOCABULARY, 8, 12, layers, n_heads=2, placement="pre", activation="gelu")
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.dropout(self.model(tokens))


def tokens(seed: int, rows: int = 4, length: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def pair(seed: int = 100, rows: int = 4) -> tuple[Tensor, Tensor]:
    drawn = tokens(seed, rows)
    return drawn[:, :-1], drawn[:, 1:]


def train(model: nn.Module, steps: int, monitor: Any = None, first: int = 0, optimizer: Any = None) -> torch.optim.Optimizer:
    """Take steps ``first + 1`` to ``steps``, gradients added up over two batches, and measure in between too."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    if monitor is not None:
        monitor.step(first)
    for step in range(first + 1, steps + 1):
        model.train()
        inputs, labels = pair(step)
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
        if monitor is not None and step == 2:
            monitor.measure(1)  # gradients of half a step lie in .grad
        inputs, labels = pair(1000 + step)
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(step, learning_rate=1e-2)
    return optimizer


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No line reaches the disk."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield
