"""Fisher information matrices as Gauss-Newton matrices: J^T (sum of outer products of output gradients) J.

Labels are drawn by a counter-based generator: one uniform number belongs to (seed, draw, number of the sequence, position). It
comes from Philox4x64 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): key (seed, draw), counter
(position // 4 + 1, sequence, 0, 0). So no micro-batch, rank or device changes it, and a sequence that is padded keeps the numbers
of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.support.errors import InputError, unknown
from hessiankit.support.torch_state import wide

CHUNK = 2**24
"""Probabilities held at once beside the logits: 128 MiB in float64, and their cumulative sums."""


def uniforms(seed: int, draws: int, numbers: Sequence[int], positions: int) -> Tensor:
    """Return uniform numbers in (0, 1), a float64 tensor (draws, sequences, positions) on the CPU.

    Args:
        numbers: The number of each sequence in the whole data.
        positions: Rows of logits in a sequence.

    >>> both = uniforms(0, 2, [0, 1, 2], 5)
    >>> bool((both[:, 2:, :3] == uniforms(0, 2, [2], 3)).all())
    True
    """
    raw = np.empty((draws, len(numbers), positions), dtype=np.uint64)
    for draw in range(draws):
        source, counter = np.random.Philox(key=np.array([seed, draw], dtype=np.uint64)), 0
        for k, number in enumerate(numbers):  # a generator takes longer to make than to move
            source.advance((number << 64) - counter)
            raw[draw, k] = source.random_raw(positions)
            counter = (number << 64) + math.ceil(positions / 4)
    return torch.from_numpy(((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


UNIT = 2.0**52
"""Integer that stands for a probability of 1."""


@torch.no_grad()
def sample_labels(logits: Tensor, numbers: Sequence[int], draws: int, seed: int) -> Tensor:
    """Return labels drawn from softmax(logits), each independently of the others: integers (draws, B, T).

    The label is the first class at which the cumulative probability exceeds the position's number of :func:`uniforms`; the
    logits are (B, T, C).

    >>> certain = torch.tensor([[[0.0, 900.0], [900.0, 0.0]]])
    >>> sample_labels(certain, [0], 3, 0).tolist()
    [[[1, 0]], [[1, 0]], [[1, 0]]]
    """
    B, T, C = logits.shape
    thresholds = uniforms(seed, draws, numbers, T).reshape(draws, B * T).T  # (B T, draws)
    rows = logits.detach().reshape(B * T, C)
    labels = torch.empty(B * T, draws, dtype=torch.int64, device=logits.device)
    step = max(1, CHUNK // C)
    for first in range(0, B * T, step):
        part = slice(first, first + step)
        probabilities = torch.softmax(rows[part].to(wide(logits.device)), -1)
        cumulative = (probabilities * UNIT).long().cumsum_(-1)  # of integers, whose sums are the same in any order
        levels = (thresholds[part].to(probabilities) * cumulative[:, -1:]).long()
        labels[part] = torch.searchsorted(cumulative, levels.contiguous(), right=True).clamp_(max=C - 1)
    return labels.T.reshape(draws, B, T)


def sample_residuals(output: Tensor, numbers: Sequence[int], draws: int, seed: int) -> Tensor:
    """Return standard normal numbers of the output's shape, float64 (draws, *output.shape): the quantiles of the uniforms."""
    probabilities = uniforms(seed, draws, numbers, output[0].numel())
    return torch.special.ndtri(probabilities).reshape(draws, *output.shape)


KINDS = ("hessian", "ggn", "fisher", "fisher-mc", "fisher-empirical")
"""Curvature matrices.

``"hessian"``: H. ``"ggn"``: its outer-product part J^T L'' J. ``"fisher"``: the Fisher information J^T E[g g^T] J (type 1), g the
gradient of minus the log-likelihood with respect to the outputs, with labels from the model's own distribution; for squared
error and cross entropy E[g g^T] = L'', so that it is the GGN. ``"fisher-mc"``: the mean over drawn labels in place of the
expectation. ``"fisher-empirical"``: the labels of the data in place of drawn ones. A term of the sum over g is a label (cross
entropy) or a row of the output along its last axis (squared error).
"""
SAMPLED_KINDS = KINDS[3:]
NAMES = {
    "hessian": "Hessian",
    "ggn": "Gauss-Newton part of the Hessian",
    "fisher": "Fisher information matrix",
    "fisher-mc": "Monte-Carlo Fisher matrix",
    "fisher-empirical": "empirical Fisher matrix",
}


@dataclass(frozen=True)
class Curvature:
    """The curvature matrix of a call: its kind and draws.

    Attributes:
        kind: One of :data:`KINDS`.
        seed: Seed of drawn labels.
        draws: Labels drawn for each term.
    """

    kind: str = "hessian"
    seed: int = 0
    draws: int = 1

    def __post_init__(self) -> None:
        """Raise InputError if the kind is not known, or its draws cannot be made."""
        if self.kind not in KINDS:
            raise unknown("request", "kind", self.kind, KINDS)
        if self.draws < 1:
            raise InputError(f"request: draws={self.draws} draws no label; pass 1 or more")
        if self.seed < 0:
            raise InputError(f"request: seed={self.seed} is negative; pass 0 or more")

    def of(self, batch: BatchLoss) -> BatchLoss:
        """Return the loss of a batch with the same gradient whose Gauss-Newton matrix, or Hessian, is this one.

        Raises:
            InputError: The kind does not fit the loss.
        """
        check_fits(batch, self.kind)
        if self.kind not in SAMPLED_KINDS:
            return replace(batch, output=None)
        with batch.at(), torch.no_grad():
            Z = batch.read() if batch.output is None else batch.output
            drawn_targets = _targets(batch, Z, self.draws if self.kind == "fisher-mc" else 0, self.seed)
            data_target = batch.target.reshape(drawn_targets.shape[0], *drawn_targets.shape[2:])
            targets = torch.cat((data_target.unsqueeze(1), drawn_targets), 1)
            return replace(batch, loss=batch.loss.sampled(), target=targets, output=None)


def check_fits(batch: BatchLoss, kind: str) -> None:
    """Raise InputError if a kind does not fit the loss of a batch."""
    if kind != "hessian" and not batch.loss.splits:
        raise InputError(
            f"request: kind={kind!r} needs the module's output as one tensor, or its 'logits' and a loss that nothing else of "
            "the module enters; pass loss=... that compares one tensor"
        )
    if kind.startswith("fisher") and not batch.loss.name:
        raise InputError(f"request: kind={kind!r} needs a loss with a likelihood, 'mse' or 'cross_entropy'; or pass kind='ggn'")


def counted_samples(batch: BatchLoss) -> Tensor | slice:
    """Return the samples of a batch, and of a cross entropy those alone that have a label that counts."""
    target = batch.own_target
    if batch.loss.plain != "cross_entropy" or target.ndim == 0:
        return slice(None)
    return (target != IGNORE_INDEX).reshape(len(target), -1).any(1)  # type: ignore[no-any-return]


def _targets(batch: BatchLoss, Z: Tensor, draws: int, seed: int) -> Tensor:
    """Return drawn targets, or without draws the data's, (B, M, ...), without the classes' axis for a cross entropy.

    Outputs without a first axis of samples are one sample.
    """
    if batch.loss.name == "mse":
        Z, target = (x.reshape(-1, 1) if x.ndim < 2 else x for x in (Z, batch.target))
        if not draws:
            return target.unsqueeze(1)
        noise = sample_residuals(Z, range(batch.first, batch.first + len(Z)), draws, seed).to(Z)  # y ~ N(z, 1/2)
        return (Z - noise / math.sqrt(2.0)).transpose(0, 1)
    Z, target = (Z.unsqueeze(0), batch.target.unsqueeze(0)) if Z.ndim == 1 else (Z, batch.target)
    if not draws:
        return target.unsqueeze(1)
    rows = Z.reshape(len(Z), -1, Z.shape[-1])
    labels = sample_labels(rows, range(batch.first, batch.first + len(Z)), draws, seed).reshape(draws, *target.shape)
    return labels.masked_fill_(target == IGNORE_INDEX, IGNORE_INDEX).transpose(0, 1)
