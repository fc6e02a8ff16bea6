"""What a draw sends back through the model: the gradient of the loss in the logits, for labels that were drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.errors import InputError
from hessiankit.estimation.batches import IGNORED, MicroBatch, aligned
from hessiankit.estimation.labels import sample_labels, sample_residuals

Sampler: TypeAlias = Callable[[Tensor, Sequence[int], int], Tensor]
"""Called with logits (B, T, C), the numbers of the sequences and the number of draws; returns labels (draws, B, T).

For squared error it is called with the output and returns standard normal numbers (draws, *output.shape)."""


@dataclass(frozen=True, eq=False)
class Seeds:
    """The draws of one micro-batch.

    Attributes:
        output: The model's output, with its graph.
        gradient: The gradient of sqrt(terms) L in the output, for no label yet; of the output's shape.
        rows: Rows of the output, flat, that have a label.
        labels: (draws, rows): what was drawn for them; for squared error (draws, *output.shape), the residuals.
        terms: How many terms the loss is the mean of.
        sequences: How many sequences have a position that counts.
        scale: 1 / sqrt(terms).
    """

    output: Tensor
    gradient: Tensor
    rows: Tensor | None
    labels: Tensor
    terms: int
    sequences: int
    scale: float

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield, for each draw, the gradient of sqrt(terms) L in the output; it is overwritten when the next one is asked for.

        The square of what arrives at a parameter is h of eq. (3) of The Sharpness Disparity Principle.
        """
        if self.rows is None:
            for residuals in self.labels:
                yield (-2.0 * self.scale * residuals).to(self.gradient)
            return
        flat = self.gradient.view(-1, self.gradient.shape[-1])
        for labels in self.labels:
            before = flat[self.rows, labels]
            flat[self.rows, labels] = before - self.scale
            yield self.gradient
            flat[self.rows, labels] = before


@torch.no_grad()
def seeds(
    who: str,
    output: Tensor,
    batch: MicroBatch,
    *,
    loss: str,
    per: str,
    estimator: str,
    draws: int,
    seed: int,
    sampler: Sampler | None = None,
) -> Seeds | None:
    """Draw labels for a micro-batch; None where none of its positions counts.

    Args:
        who: What an error message starts with.
        output: The model's output, with its graph.
        batch: The micro-batch that it belongs to.
        loss: ``"cross_entropy"``, or ``"mse"``: the mean over all entries of (f - y)^2, minus the logarithm of a Gaussian of
            variance 1/2; with y drawn from it, f - y = sqrt(1/2) xi, and the mean of the squared gradients over N entries is the
            diagonal of (2 / N) J^T J, the Gauss-Newton matrix.
        per: ``"token"`` (for squared error: the entry) or ``"sequence"``.
        estimator: ``"fisher"``, or ``"empirical_fisher"`` for the labels of the data.
        draws: Number of draws.
        seed: Of the labels.
        sampler: Draws the labels instead; for tests of the estimator.

    Raises:
        InputError: If output and labels do not fit, or the output is not finite.
    """
    if output.shape[:1] != (len(batch.numbers),):
        raise InputError(
            f"{who}: the model's output has shape {tuple(output.shape)} for {len(batch.numbers)} sequences; expected those"
            " along axis 0"
        )
    target = aligned(who, batch, output.shape, loss)
    _check_finite(who, output, batch, masked=loss == "cross_entropy")
    data = estimator == "empirical_fisher"
    if loss == "mse":
        terms = output.numel() if per == "token" else len(batch.numbers)
        if data:
            residuals = (target - output.detach()).unsqueeze(0)
        else:
            normal = sampler(output, batch.numbers, draws) if sampler else sample_residuals(output, batch.numbers, draws, seed)
            residuals = math.sqrt(0.5) * normal
        return Seeds(output, output.detach(), None, residuals, terms, len(batch.numbers), 1.0 / math.sqrt(terms))
    B, classes = output.shape[0], output.shape[-1]
    counted = (target != IGNORED).reshape(B, -1)
    sequences = int(counted.any(1).sum())
    terms = int(counted.sum()) if per == "token" else sequences
    if terms == 0:
        return None
    scale = 1.0 / math.sqrt(terms)
    rows = counted.reshape(-1).nonzero()[:, 0]
    logits = output.detach().reshape(B, -1, classes)
    if data:
        labels = target.reshape(1, -1)
    elif sampler is not None:
        labels = sampler(logits, batch.numbers, draws).reshape(draws, -1)
    else:
        labels = sample_labels(logits, batch.numbers, draws, seed).reshape(draws, -1)
    gradient = torch.softmax(logits.float() if logits.dtype.itemsize < 4 else logits, -1)
    gradient.mul_(counted.unsqueeze(-1)).mul_(scale)  # a product of a number and booleans would be rounded to float32
    gradient = gradient.to(output.dtype).reshape(output.shape).contiguous()
    return Seeds(output, gradient, rows, labels[:, rows], terms, sequences, scale)


def _check_finite(who: str, output: Tensor, batch: MicroBatch, *, masked: bool) -> None:
    """Refuse NaN and infinity; a class may be masked by -inf."""
    bad = ~torch.isfinite(output.detach())
    if masked and bool(bad.any()):
        bad &= output.detach() != -math.inf
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise InputError(
            f"{who}: the model's output is NaN or infinite, first at {index} (sequence {batch.numbers[index[0]]} of the data);"
            " clean the input or the weights, or use a wider dtype"
        )
