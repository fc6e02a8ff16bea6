"""Sums of squared gradients in double precision, and histograms of their entries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.diagnostics.sharpness.options import MeasuredParts
from hessiankit.partition.part import CHUNK
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import wide


def row_sums(x: Tensor) -> Tensor:
    """Return the sums of squares along each row of a matrix, float64 (rows,) on the CPU.

    >>> row_sums(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [25.0, 1.0]
    """
    flat = x.flatten(1)
    sums = [part.to(wide(x.device)).square().sum(1).cpu() for part in flat.split(max(1, CHUNK // flat.shape[1]))]
    return torch.cat(sums).double()


class SquaredGradients:
    """Sums of squared gradients over micro-batches and draws, so far: what :class:`Replicates` holds in the end, by its names.

    ``whole`` returns all of a tensor that is spread over several processes, and of others the tensor itself.
    """

    def __init__(
        self, who: str, measured: MeasuredParts, draws: int, histograms: bool, whole: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self.who, self.parts, self.draws, self.whole = who, measured.parts, draws, whole
        self.values: list[Tensor] = []
        self.terms: list[int] = []
        self.sequences, self.unlikely = 0, 0.0
        self.rows: dict[str, Tensor] = {}
        parameters = measured.parameters
        self.places: dict[str, list[int]] = {name: [] for name in parameters}
        for k, part in enumerate(measured.parts):
            self.places[part.parameter].append(k)
        self.entries = {name: _zeros(p.detach()) for name, p in parameters.items()} if histograms else {}
        self.unused = set(parameters)

    def begin(self, terms: int, sequences: int, unlikely: float) -> None:
        """Begin a micro-batch whose loss is a mean over that many terms."""
        self.values.append(torch.zeros(self.draws, len(self.parts), dtype=torch.float64, device="cpu"))
        self.terms.append(terms)
        self.sequences += sequences
        self.unlikely += unlikely

    def add(self, draw: int, gradients: Mapping[str, Tensor], embeddings: Container[str]) -> None:
        """Add the gradients of a draw; those that no output depends on are missing. ``embeddings`` are looked up by
        rows.
        """
        self.unused -= gradients.keys()
        squares = [torch.zeros((), device="cpu")] * len(self.parts)
        for name, own in gradients.items():
            gradient = self.whole(own)
            for k in self.places[name]:
                squares[k] = self.parts[k].squared_norm(gradient)
            if name in embeddings:
                none = torch.zeros(self.draws, len(gradient), dtype=torch.float64, device="cpu")
                self.rows.setdefault(name, none)[draw] += self.terms[-1] * row_sums(gradient)
            if (total := self.entries.get(name)) is not None:
                own = own.to(total.dtype)
                total.addcmul_(own, own, value=float(self.terms[-1]))
        self.values[-1][draw] = self._finite(squares)

    def _finite(self, squares: list[Tensor]) -> Tensor:
        """Return the parts' sums, float64 (parts,) on the CPU, after a check that they are finite."""
        if len({x.device for x in squares}) > 1:
            squares = [x.cpu() for x in squares]
        sums = torch.stack([x.to(wide(x.device)) for x in squares]).cpu().double()
        bad = ~torch.isfinite(sums)
        if bool(bad.any()):
            part = self.parts[int(bad.nonzero()[0])]
            raise InputError(
                f"{self.who}: the gradient of {part.name!r} is NaN or infinite, though the output is finite; a derivative "
                "overflows there (a norm of a constant row, a square root at 0): use a wider dtype or an eps > 0"
            )
        return sums


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float32 if p.dtype.itemsize < 4 else p.dtype)


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

    >>> found = histogram([torch.tensor([0.0, 1.0, 10.0, 15.0])])
    >>> found.zeros, found.entries, found.quantile(0.5)
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
