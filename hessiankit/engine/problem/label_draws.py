"""Labels drawn from a model's own distribution, by a counter-based generator.

One uniform number belongs to (seed, draw, number of the sequence, position). It comes from Philox4x64 (Salmon et al., Parallel
random numbers: as easy as 1, 2, 3, SC 2011): key (seed, draw), counter (position // 4 + 1, sequence, 0, 0). So no micro-batch,
rank or device changes it, and a sequence that is padded keeps the numbers of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**24
"""Probabilities held at once beside the logits: 128 MiB in float64, and their cumulative sums."""


def uniforms(seed: int, draws: int, numbers: Sequence[int], positions: int) -> Tensor:
    """Return uniform numbers in (0, 1), a float64 tensor (draws, sequences, positions) on the CPU.

    Args:
        seed: 0 or more.
        draws: Number of draws.
        numbers: The number of each sequence in the whole data.
        positions: Rows of logits in a sequence.

    >>> both = uniforms(0, 2, [0, 1, 2], 5)
    >>> bool((both[:, 2:, :3] == uniforms(0, 2, [2], 3)).all())
    True
    """
    found = np.empty((draws, len(numbers), positions))
    for draw in range(draws):
        for k, number in enumerate(numbers):
            key, counter = np.array([seed, draw], dtype=np.uint64), np.array([0, number, 0, 0], dtype=np.uint64)
            raw = np.random.Philox(key=key, counter=counter).random_raw(positions)
            found[draw, k] = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(found)


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def sample_labels(logits: Tensor, numbers: Sequence[int], draws: int, seed: int) -> Tensor:
    """Return labels drawn from softmax(logits), each independently of the others: integers (draws, B, T).

    The label is the first class at which the cumulative probability exceeds the position's uniform number.

    Args:
        logits: (B, T, C).
        numbers: The number of each sequence in the whole data.
        draws: Number of draws.
        seed: 0 or more.

    >>> certain = torch.tensor([[[0.0, 900.0], [900.0, 0.0]]])
    >>> sample_labels(certain, [0], 3, 0).tolist()
    [[[1, 0]], [[1, 0]], [[1, 0]]]
    """
    B, T, C = logits.shape
    own = uniforms(seed, draws, numbers, T).reshape(draws, B * T).T  # (B T, draws)
    rows = logits.detach().reshape(B * T, C)
    found = torch.empty(B * T, draws, dtype=torch.int64, device=logits.device)
    step = max(1, CHUNK // C)
    for first in range(0, B * T, step):
        part = slice(first, first + step)
        cumulative = torch.softmax(rows[part].to(wide(logits.device)), -1).cumsum_(-1)
        levels = own[part].to(cumulative) * cumulative[:, -1:]  # whose rounding would else reach beyond the last class
        found[part] = torch.searchsorted(cumulative, levels.contiguous(), right=True).clamp_(max=C - 1)
    return found.T.reshape(draws, B, T)


def sample_residuals(output: Tensor, numbers: Sequence[int], draws: int, seed: int) -> Tensor:
    """Return standard normal numbers of the output's shape, float64 (draws, *output.shape): the quantiles of the uniforms."""
    B = output.shape[0]
    own = uniforms(seed, draws, numbers, output.numel() // B)
    return torch.special.ndtri(own).reshape(draws, *output.shape)
