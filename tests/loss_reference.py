"""What the tests of many batches and of output objects share: a module called by keyword, and Hessians of any scalar function."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from curvature_reference import gradient_twice, randomised
from torch import Tensor, nn


class Padded(nn.Module):
    """Attention over (input_ids, attention_mask) with a class head for each token; what it returns is a choice."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.returns = returns
        self.embedding, self.query, self.key = nn.Embedding(7, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.head = nn.Linear(4, 5)
        randomised(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        scores = self.query(x) @ self.key(x).mT
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        logits = self.head(torch.tanh(x + torch.softmax(scores, -1) @ x))
        loss = None if labels is None else token_loss(logits[:, :-1], labels[:, 1:])  # predicts the next token
        if self.returns == "dict":
            return {"loss": loss, "logits": logits, "depth": 1}
        if self.returns == "object":
            return SimpleNamespace(loss=loss, logits=logits, cache=(x,))
        return logits if self.returns == "tensor" else loss


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not -100, written out."""
    kept = labels != -100
    rows = torch.log_softmax(logits[kept], -1)
    return -rows[torch.arange(len(rows)), labels[kept]].sum() / kept.sum()


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    """Four sequences of 5 tokens, padded: input_ids, attention_mask, labels with -100 at padding and elsewhere."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 7, (4, 5), generator=generator)
    labels = torch.randint(0, 5, (4, 5), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    labels[0, 1], labels[2, 0] = -100, -100
    return ids, mask, labels.masked_fill(mask == 0, -100)


CUTS = [(slice(0, 1), 5), (slice(1, 3), 4), (slice(3, 4), 2)]
"""Rows, and the length that their padding can be cut to."""


def by_autograd(module: nn.Module, value: Callable[[nn.Module], Tensor], names: Any = None) -> Tensor:
    """Return the Hessian of value(module) by torch.autograd.grad twice, one row at a time."""
    return gradient_twice(value(module), [p for n, p in module.named_parameters() if names is None or n in names])
