"""Cotangents of the logits for drawn labels: the gradient of the loss with labels from the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.diagnostics.sharpness.batches import MicroBatch, aligned
from hessiankit.diagnostics.sharpness.options import WHO, SharpnessOptions
from hessiankit.engine.problem.calling import IGNORE_INDEX
from hessiankit.engine.problem.fisher import sample_labels, sample_residuals
from hessiankit.engine.problem.non_finite import spoiled_at
from hessiankit.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Cotangents:
    """Gradients of sqrt(terms) L in the output of one micro-batch, one for each draw of the labels.

    Attributes:
        softmax: The part that does not depend on the labels, of the output's shape: scale times the softmax of the logits, 0 in
            rows without a label; for squared error the output.
        rows: Rows of the output, flat, that have a label; None for squared error.
        labels: (draws, rows): what was drawn for them; for squared error (draws, *output.shape), the residuals.
        terms: How many terms the loss is the mean of; ``scale`` is 1 / sqrt(terms).
        sequences: How many sequences have a position that counts.
        unlikely: How many of the labels of a draw are expected not to be the likeliest one; infinite for squared error.
    """

    softmax: Tensor
    rows: Tensor | None
    labels: Tensor
    terms: int
    sequences: int
    scale: float
    unlikely: float = math.inf

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the gradient of each draw; the next one overwrites it.

        The square of the gradient that it gives a parameter is h of eq. (3) of The Sharpness Disparity Principle.
        """
        if self.rows is None:
            for residuals in self.labels:
                yield (-2.0 * self.scale * residuals).to(self.softmax)
            return
        flat = self.softmax.view(-1, self.softmax.shape[-1])
        for labels in self.labels:
            before = flat[self.rows, labels]
            flat[self.rows, labels] = before - self.scale
            yield self.softmax
            flat[self.rows, labels] = before


@torch.no_grad()
def cotangents(output: Tensor, batch: MicroBatch, options: SharpnessOptions) -> Cotangents | None:
    """Draw labels for a micro-batch and return the gradients of its loss; None where none of its positions counts.

    Squared error, the mean over N entries of (f - y)^2, is minus the logarithm of a Gaussian of variance 1/2: with y drawn from
    it, f - y = sqrt(1/2) xi, and the mean of the squared gradients is the diagonal of (2 / N) J^T J, the Gauss-Newton matrix.
    """
    if output.shape[:1] != (len(batch.numbers),):
        raise InputError(
            f"{WHO}: the model's output has shape {tuple(output.shape)} for {len(batch.numbers)} sequences; expected those"
            " along axis 0"
        )
    target = aligned(WHO, batch, output.shape, options.loss)
    if (at := spoiled_at(output.detach(), mask=options.loss == "cross_entropy")) is not None:  # -inf masks a class
        raise InputError(
            f"{WHO}: the model's output is NaN or infinite, first at {at} (sequence {batch.numbers[at[0]]} of the data);"
            " clean the input or the weights, or use a wider dtype"
        )
    draws, seed, by_token = options.label_draws, options.seed, options.per == "token"
    data = options.kind == "fisher-empirical"
    B, classes, z = output.shape[0], output.shape[-1], output.detach()
    rows: Tensor | None = None
    if options.loss == "mse":
        terms, sequences = (output.numel() if by_token else B), B
        if data:
            labels = (target - z).unsqueeze(0)
        else:
            labels = math.sqrt(0.5) * sample_residuals(output, batch.numbers, draws, seed)
        scale, softmax, unlikely = 1.0 / math.sqrt(terms), z, math.inf
    else:
        counted = (target != IGNORE_INDEX).reshape(B, -1)
        sequences = int(counted.any(1).sum())
        terms = int(counted.sum()) if by_token else sequences
        if terms == 0:
            return None
        logits = z.reshape(B, -1, classes)
        if data:
            labels = target.reshape(1, -1)
        else:
            labels = sample_labels(logits, batch.numbers, draws, seed).reshape(draws, -1)
        rows = counted.reshape(-1).nonzero()[:, 0]
        labels, scale = labels[:, rows], 1.0 / math.sqrt(terms)
        softmax = torch.softmax(logits.float() if logits.dtype.itemsize < 4 else logits, -1)
        softmax.mul_(counted.unsqueeze(-1))
        unlikely = float(counted.sum() - softmax.amax(-1).double().sum())
        softmax.mul_(scale)  # a product of a number and booleans would be rounded to float32
        softmax = softmax.to(output.dtype).reshape(output.shape).contiguous()
    if not output.requires_grad:
        raise InputError(f"{WHO}: the model's output does not depend on its parameters; do not detach it in forward")
    return Cotangents(softmax, rows, labels, terms, sequences, scale, unlikely)
