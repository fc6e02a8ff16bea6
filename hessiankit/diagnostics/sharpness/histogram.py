"""Histograms of the entries of h, by quarters of a decade."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PER_DECADE = 4
ENTRIES = 2**22


@dataclass(frozen=True)
class Histogram:
    """The distribution of log10 h over the entries of a block type.

    Attributes:
        first: log10 of the first bin's lower edge; the bins are a quarter of a decade wide.
        counts: Entries in each bin.
        zeros: Entries that are exactly 0 (rows of tokens that do not occur, dead units), or too small for the type they are
            added up in.
        negative: Entries below 0, which only the Hessian's diagonal has.
        entries: All of them.

    >>> h = histogram([torch.tensor([0.0, 1.0, 10.0, 15.0])])
    >>> h.zeros, h.entries, h.quantile(0.5)
    (1, 4, 11.547819846894582)
    """

    first: float
    counts: tuple[int, ...]
    zeros: int
    negative: int
    entries: int

    @property
    def edges(self) -> tuple[float, ...]:
        """log10 of the bins' edges, one more than there are bins."""
        return tuple(self.first + k / PER_DECADE for k in range(len(self.counts) + 1))

    def quantile(self, level: float) -> float:
        """Return a quantile of the positive entries, interpolated inside its bin; NaN where there are none."""
        wanted, below = level * sum(self.counts), 0
        for k, count in enumerate(self.counts):
            if count and below + count >= wanted:
                return float(10 ** (self.first + (k + (wanted - below) / count) / PER_DECADE))
            below += count
        return math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return edges and counts as plain Python data."""
        own = {"counts": list(self.counts), "zeros": self.zeros, "negative": self.negative, "entries": self.entries}
        return {"log10_edges": list(self.edges), **own}


@torch.no_grad()
def histogram(tensors: Iterable[Tensor]) -> Histogram:
    """Return the histogram of all entries of some tensors."""
    bins: Counter[int] = Counter()
    zeros = negative = entries = 0
    for x in tensors:
        for chunk in x.reshape(-1).split(ENTRIES):
            entries += chunk.numel()
            zeros += int((chunk == 0).sum())
            negative += int((chunk < 0).sum())
            places = torch.floor(PER_DECADE * torch.log10(chunk[chunk > 0])).to(torch.int64)
            if places.numel():
                lowest = int(places.min())
                bins.update(dict(enumerate(torch.bincount(places - lowest).tolist(), lowest)))
    low, high = (min(bins), max(bins)) if bins else (0, -1)
    return Histogram(low / PER_DECADE, tuple(bins[k] for k in range(low, high + 1)), zeros, negative, entries)
