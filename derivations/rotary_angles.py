"""Angles of rotary position embeddings (Su et al., "RoFormer", Section 3.2.2)."""

from __future__ import annotations

import torch


def angles(length: int, width: int, theta: float = 10000.0) -> torch.Tensor:
    """Return the angles l theta^{-2i/w} of the positions l = 0, ..., L - 1 and the pairs i < w/2: L x w/2, in float64.

    >>> angles(2, 4, theta=100.0).tolist()
    [[0.0, 0.0], [1.0, 0.1]]
    """
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)  # (w/2,)
    return torch.arange(length, dtype=torch.float64, device="cpu").reshape(-1, 1) * frequencies
