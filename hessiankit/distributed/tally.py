"""What a rank adds up over micro-batches and draws: squares of its pieces of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hessiankit.distributed.pieces import Piece, local
from hessiankit.distributed.ranks import Ranks
from hessiankit.estimation.histogram import PER_DECADE, Histogram, histogram
from hessiankit.estimation.squares import row_sums
from hessiankit.parts import Part


class Tally:
    """This rank's share of what is added up: squares of its pieces of the gradients."""

    def __init__(
        self,
        ranks: Ranks,
        parts: tuple[Part, ...],
        parameters: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        draws: int,
        histograms: bool,
    ) -> None:
        self.ranks, self.parts, self.parameters, self.pieces, self.draws = ranks, parts, parameters, pieces, draws
        self.values: list[Tensor] = []
        self.terms: list[int] = []
        self.rows: dict[str, Tensor] = {}
        self.unused = set(parameters)
        self.entries: dict[str, Tensor] = {}
        if histograms:
            for name, p in parameters.items():
                wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype
                self.entries[name] = torch.zeros_like(local(p.detach()), dtype=wide)

    def begin(self, terms: int) -> None:
        """Begin a micro-batch."""
        self.values.append(torch.zeros(self.draws, len(self.parts), dtype=torch.float64))
        self.terms.append(terms)

    def add(self, draw: int, seen: dict[str, Tensor]) -> None:
        """Add the gradients of a draw, which the parameters hold."""
        gradients = {n: self._gradient(n, p) for n, p in self.parameters.items()}
        arrived = {n: g for n, g in gradients.items() if g is not None}
        self.unused -= set(arrived)
        for k, part in enumerate(self.parts):
            if part.parameter in arrived:
                self.values[-1][draw, k] = self.pieces[part.parameter].squared_norm(part, arrived[part.parameter]).cpu()
        for name in seen:
            self._add_rows(name, draw, arrived.get(name))
        for name, total in self.entries.items():
            if name in arrived:
                wide = arrived[name].to(total.dtype)
                total.addcmul_(wide, wide, value=float(self.terms[-1]))

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by type over all ranks' pieces; a piece that several ranks hold is counted by the first."""
        divisor = float(sum(self.terms)) * self.draws

        def views(kind: str) -> Iterator[Tensor]:
            for part in self.parts:
                own = self.pieces[part.parameter]
                if part.type == kind and own.first:
                    yield from (view / divisor for view in own.of(part, self.entries[part.parameter]))

        own = {kind: histogram(views(kind)) for kind in dict.fromkeys(part.type for part in self.parts)}
        everywhere = self.ranks.gather(own)
        return {kind: merged([its[kind] for its in everywhere]) for kind in own}

    def _gradient(self, name: str, p: nn.Parameter) -> Tensor | None:
        if self.pieces[name].sharded:
            return None if p.grad is None else local(p.grad)
        own = torch.zeros_like(p) if p.grad is None else p.grad  # FSDP2 leaves alone what it does not shard
        return self.ranks.sum(own.detach().clone()) / self.ranks.size

    def _add_rows(self, name: str, draw: int, gradient: Tensor | None) -> None:
        rows = self.rows.setdefault(name, torch.zeros(self.draws, self.parameters[name].shape[0], dtype=torch.float64))
        if gradient is not None:
            own = self.pieces[name]
            sums = row_sums(gradient) * (self.terms[-1] / own.copies)
            rows[draw, own.offset[0] : own.offset[0] + own.shape[0]] += sums


def merged(found: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all entries that several histograms count.

    >>> one, other = histogram([torch.tensor([0.0, 1.0])]), histogram([torch.tensor([1.0, 100.0])])
    >>> both = histogram([torch.tensor([0.0, 1.0, 1.0, 100.0])])
    >>> merged([one, other]) == both
    True
    """
    bins: dict[int, int] = {}
    for one in found:
        for k, count in enumerate(one.counts, round(one.first * PER_DECADE)):
            bins[k] = bins.get(k, 0) + count
    low, high = (min(bins), max(bins)) if bins else (0, -1)
    counts = tuple(bins.get(k, 0) for k in range(low, high + 1))
    return Histogram(
        low / PER_DECADE, counts, sum(x.zeros for x in found), sum(x.negative for x in found), sum(x.entries for x in found)
    )
