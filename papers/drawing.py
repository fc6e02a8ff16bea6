"""Random numbers of the rows: float64, from one seed, the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Draws tensors one after the other from a seed.

    >>> Draw(0).normal(2, 3).shape
    torch.Size([2, 3])
    >>> bool((Draw(1).normal(4) == Draw(1).normal(4)).all())
    True
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Return normal entries."""
        return std * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform entries."""
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def probabilities(self, *shape: int) -> Tensor:
        """Return rows that are positive and sum to 1."""
        return torch.softmax(self.normal(*shape), -1)

    def orthogonal(self, n: int) -> Tensor:
        """Return an orthogonal matrix."""
        return torch.linalg.qr(self.normal(n, n))[0]
