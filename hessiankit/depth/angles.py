"""Angular distances between the hidden states of two depths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.arguments import checked
from hessiankit.errors import InputError

CLIP = (1.0, 99.0)
"""Percentiles between which the authors' code clips a row before it draws it."""


@dataclass(frozen=True, eq=False)
class AngularDistances:
    """d(x^l, x^{l+n}) = arccos(cos(x^l, x^{l+n})) / pi (The Curse of Depth, Eq. 1), a mean over tokens, in [0, 1].

    x^l is the input of block l, x^{L+1} the last output before the final norm; the authors' code takes the final norm's
    output for it, and the last token of a window, which may be padding.

    Attributes:
        all: (L+1, L+1) symmetric in float64, entry [i, j] = d(x^{i+1}, x^{j+1}), mean over the counted tokens.
        last: The same over the last counted token of each sequence.
    """

    all: Tensor
    last: Tensor

    def by_distance(self, tokens: str = "all") -> Tensor:
        """Return the matrix as the paper draws it: (L, L), row n-1 and column l-1 hold d(x^l, x^{l+n}); NaN beyond.

        Args:
            tokens: ``"all"`` or ``"last"``.
        """
        d = self.all if tokens == "all" else self.last
        L = len(d) - 1
        out = d.new_full((L, L), math.nan)
        for n in range(1, L + 1):
            out[n - 1, : L + 1 - n] = d.diagonal(n)
        return out

    def row_normalised(self, tokens: str = "all") -> Tensor:
        """Return :meth:`by_distance` with each row clipped to its percentiles 1 and 99 and stretched to [0, 1].

        That is how the authors' heat maps are made. A row then spans 0 to 1 whatever its angles are: these are no angles, and
        rows cannot be compared. A constant row becomes 0.
        """
        out = self.by_distance(tokens)
        for n, row in enumerate(out):
            known = row[: len(row) - n]
            low, high = torch.quantile(known, torch.tensor(CLIP, dtype=known.dtype) / 100)
            width = high - low
            known.copy_((known.clamp(low, high) - low) / width if width > 0 else torch.zeros_like(known))
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return both matrices as lists."""
        return {"all": self.all.tolist(), "last": self.last.tolist()}


@checked("angular_distance")
def angular_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return arccos(cos(x, y)) / pi of the vectors along the last axis.

    Computed as 2 atan2(||u - v||, ||u + v||) / pi of the unit vectors u, v: the same angle, but with all digits where it is
    small, of which arccos keeps half; nothing has to be clamped.

    >>> x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> [round(float(angular_distance(x, torch.tensor(y, dtype=torch.float64))), 12) for y in ([2.0, 0], [0, 3.0], [-1.0, 0])]
    [0.0, 0.5, 1.0]
    """
    kinds = [(tuple(z.shape), z.dtype, z.device, z.layout) for z in (x, y)]
    if kinds[0] != kinds[1] or not x.is_floating_point() or x.layout != torch.strided or not x.ndim:
        seen = " and ".join(f"{tuple(z.shape)} {z.dtype} on {z.device}" for z in (x, y))
        raise InputError(
            f"angular_distance: x and y are {seen}; pass two dense real tensors (..., d) of one shape, dtype and device"
        )
    u, v = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)) / math.pi


class AngleSums:
    """Sums over tokens, a batch at a time."""

    def __init__(self, n_layers: int) -> None:
        self.sums = torch.zeros(2, n_layers + 1, n_layers + 1, dtype=torch.float64)
        self.tokens = [0, 0]

    def add(self, stream: list[Tensor], keep: Tensor, last: Tensor) -> None:
        """Add the tokens of one batch.

        Args:
            stream: x_1, ..., x_{L+1}, each (..., d).
            keep: Which tokens count, booleans (...).
            last: Which of them are the last of a sequence.
        """
        is_last = last[keep]
        self.tokens[0] += int(keep.sum())
        self.tokens[1] += int(is_last.sum())
        wide = torch.float32 if keep.device.type == "mps" else torch.float64
        states = [x.detach()[keep].to(wide) for x in stream]
        for i, x in enumerate(states):
            for j in range(i + 1, len(states)):
                d = angular_distance(x, states[j])
                self.sums[0, i, j] += d.sum().cpu()
                self.sums[1, i, j] += d[is_last].sum().cpu()

    def result(self) -> AngularDistances:
        """Return the means."""
        means = [(s + s.T) / n for s, n in zip(self.sums, self.tokens, strict=True)]
        return AngularDistances(*means)
