"""The training loop of experiments and figures, and the training of a small classifier by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.support.errors import InputError
from hessiankit.support.progress import progress_bar


def updates(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: Iterable[int],
    *,
    clip: float = math.inf,
    schedule: Any = None,
    micro: int | None = None,
    mean: Callable[[float], float] = float,
) -> Iterator[tuple[int, float]]:
    """Update a model in place, and yield (step, loss of its batch before the update) after each update.

    Where a loss is not finite it is yielded without an update, and the run ends.

    ``clip`` bounds the norm of the gradient; the schedule is stepped after each update. ``micro`` is the largest number of
    samples that memory holds at once: gradients of parts of a batch are added up. ``mean`` averages the loss over the ranks.
    """
    for step in steps:
        inputs, targets = batch()
        optimizer.zero_grad(set_to_none=True)
        size, value = micro or len(inputs), 0.0
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            scalar = loss(model(x), y) * (len(x) / len(inputs))
            scalar.backward()
            value += float(scalar.detach())
        value = mean(value)
        if math.isfinite(value):
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        yield step, value
        if not math.isfinite(value):
            return


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    steps: int = 300,
    batch_size: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
    progress: bool = True,
    callback: Callable[[int, float], None] | None = None,
) -> tuple[float, ...]:
    """Train a classifier in place with AdamW and cross entropy; return the loss of each step, before its update.

    Args:
        model: Maps a batch of inputs to logits ``(B, C)``.
        inputs: ``(N, ...)``.
        labels: Classes ``(N,)``.
        steps: Number of updates.
        batch_size: Samples an update; all of them if there are fewer.
        lr: Learning rate, constant.
        seed: Draws the batches.
        progress: Whether to show a bar on a terminal's standard error.
        callback: Called after each update with the number of updates done and the loss.

    Raises:
        InputError: The loss is not finite.

    >>> model = nn.Linear(1, 2)
    >>> x = torch.linspace(-1, 1, 20).reshape(-1, 1)
    >>> labels = (x[:, 0] > 0).long()
    >>> _ = train(model, x, labels, steps=200, lr=0.1)
    >>> accuracy(model, x, labels)
    1.0
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    rows = batches(len(inputs), min(batch_size, len(inputs)), seed)
    losses: list[float] = []

    def batch() -> tuple[Tensor, Tensor]:
        chosen = next(rows).to(inputs.device)
        return inputs[chosen], labels[chosen]

    with progress_bar() if progress else nullcontext(lambda *_: None) as tell:
        for step, value in updates(model, optimizer, batch, F.cross_entropy, range(1, steps + 1)):
            if not math.isfinite(value):
                raise InputError(
                    f"train: the loss became {value} at step {step}; lower the learning rate (now {lr:g}) or look for values "
                    "that are not finite in the inputs"
                )
            losses.append(value)
            tell(f"training, loss {value:.4f}", step, steps)
            if callback is not None:
                callback(step, value)
    optimizer.zero_grad(set_to_none=True)
    return tuple(losses)


def batches(samples: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of one batch after the other: each epoch is a fresh order, cut into batches; a smaller last one is left out.

    >>> rows = batches(5, 2, seed=0)
    >>> [len(set(next(rows).tolist()) | set(next(rows).tolist())) for epoch in range(3)]
    [4, 4, 4]
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(samples, generator=generator)[: samples - samples % size].split(size)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int = 1024) -> float:
    """Return the fraction of inputs whose largest logit is at the label.

    >>> accuracy(nn.Identity(), torch.eye(2), torch.tensor([0, 0]))
    0.5
    """
    pairs = zip(inputs.split(batch_size), labels.split(batch_size), strict=True)
    return sum(int((model(x).argmax(-1) == t).sum()) for x, t in pairs) / labels.numel()
