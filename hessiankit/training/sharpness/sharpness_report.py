"""Average sharpness by block type, by layer and by tensor: a pure function of the replicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.training.partition import TYPES, Part
from hessiankit.training.sharpness.estimate import SharpnessEstimate, as_weights, estimate, ratio
from hessiankit.training.sharpness.options import WHO
from hessiankit.training.sharpness.replicate import Replicates

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture

Place: TypeAlias = "tuple[str, int | None]"
ENOUGH_DRAWS, ENOUGH_LABELS = 4, 10
"""Draws, and labels other than the likeliest ones among all drawn, from which on intervals held 91 % of the time or more."""
COVERAGE = "see docs/intervals.md"
NAMES = {
    "fisher-mc": "Fisher information (labels drawn from the model)",
    "fisher-empirical": "EMPIRICAL Fisher (the data's own labels: not the Fisher information, and its cross terms do not cancel)",
    "ggn": "exact Gauss-Newton matrix",
    "fisher": "exact Fisher information",
    "hessian": "exact Hessian",
}


PER_DECADE = 4
ENTRIES = 2**22  # of a tensor, that are counted at once


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
        rank, total = level * sum(self.counts), 0
        for k, count in enumerate(self.counts):
            if count and total + count >= rank:
                return float(10 ** (self.first + (k + (rank - total) / count) / PER_DECADE))
            total += count
        return math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return edges and counts as plain Python data."""
        numbers = {"counts": list(self.counts), "zeros": self.zeros, "negative": self.negative, "entries": self.entries}
        return {"log10_edges": list(self.edges), **numbers}


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


@dataclass(frozen=True, repr=False, eq=False)
class SharpnessReport(Printed, WithDict):
    """Average sharpness S = Tr h / # of the parts of a model, eq. (4) of The Sharpness Disparity Principle (Wang et al.).

    Every number is a :class:`SharpnessEstimate`: value, standard error, interval. The errors are those of the label draws on
    these data; ``data_standard_error`` takes the micro-batches as a sample.

    Attributes:
        types: S by block type, over all entries of all its tensors (Remark 3.1).
        layers: S by index of the block, from 0; None outside the blocks.
        type_layers: S by (type, layer).
        tensors: S by name of the part.
        mean_of_tensors: Plain mean of the tensors' S by type, in which a small tensor counts as much as a large one.
        scale_free: Mean over a type's entries of S ||theta||^2 / # of their tensor, by type; unlike S, it stays the same where
            one tensor is multiplied by c and another one divided by it without a change of the function (ours/ffn-rescaling).
        seen_rows: S of the embeddings over the rows that the data look up; None where no embedding is looked up by rows.
        histograms: Histograms of log10 h by type, averaged over micro-batches and draws; empty without ``histograms=True``.
        terms: Number of terms of L: tokens, sequences or, for squared error, entries.
        sequences: Sequences with a position that counts.
        micro_batches: Number of micro-batches; h is squared in each, then averaged.
        draws: Draws of the labels; 0 where the values are exact.
        per: ``"token"`` or ``"sequence"``.
        kind: ``"fisher-mc"``, ``"fisher-empirical"``, ``"ggn"`` or ``"hessian"``.
        metric: The preconditioner in whose metric the numbers are; "" for none.
        loss: ``"cross_entropy"`` or ``"mse"``.
        seed: Seed of the labels.
        confidence: Coverage probability of the intervals.
        frozen: Parameters that do not require a gradient and were left out.
        unused: Parameters that no output depended on; their h is 0.
        seconds: Time taken.
        replicates: Sums of h by micro-batch, draw and part, for further statistics.
    """

    types: dict[str, SharpnessEstimate]
    layers: dict[int | None, SharpnessEstimate]
    type_layers: dict[tuple[str, int | None], SharpnessEstimate]
    tensors: dict[str, SharpnessEstimate]
    mean_of_tensors: dict[str, SharpnessEstimate]
    scale_free: dict[str, SharpnessEstimate]
    seen_rows: SharpnessEstimate | None
    histograms: dict[str, Histogram]
    terms: int
    sequences: int
    micro_batches: int
    draws: int
    per: str
    kind: str
    metric: str
    loss: str
    seed: int
    confidence: float
    frozen: tuple[str, ...]
    unused: tuple[str, ...]
    seconds: float
    replicates: Replicates = field(repr=False)

    _derived, _hidden = ("order", "ordering"), ("layers", "type_layers", "replicates")

    @property
    def order(self) -> tuple[str, ...]:
        """The types from flat to sharp."""
        return tuple(sorted(self.types, key=lambda kind: self.types[kind].value))

    @property
    def ordering(self) -> str:
        """The order as one line, with ``<`` between neighbours whose quotient has an interval without 1, else ``~``."""
        order = self.order
        text = order[0]
        for low, high in pairwise(order):
            quotient = self.ratio(low, base=high)
            text += f" < {high}" if quotient.low > 1.0 else f" ~ {high}"
        return text

    def ratio(self, type: str, base: str = "Norm") -> SharpnessEstimate:
        """Return S_base / S_type of two block types, with the correlation of the two, which the same draws gave.

        Raises:
            InputError: If the model has no such type.
        """
        for name in (type, base):
            if name not in self.types:
                raise InputError(f"{WHO}: no {name!r} among the measured types; pass one of {', '.join(self.types)}")
        runs = self.replicates
        top, bottom = (runs.mean([k for k, part in enumerate(runs.parts) if part.type == name]) for name in (base, type))
        options: dict[str, Any] = {"confidence": self.confidence, "exact": runs.is_exact}
        return ratio(top, bottom, as_weights(runs.terms), entries=self.types[type].entries, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the replicates as plain Python data, which JSON can hold."""
        layers = {"outside" if layer is None else str(layer): one.to_dict() for layer, one in self.layers.items()}
        type_layers = [{"type": kind, "layer": layer, **one.to_dict()} for (kind, layer), one in self.type_layers.items()]
        return {**super().to_dict(), "layers": layers, "type_layers": type_layers}

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw S as bars with their intervals, by type and, where the model has several blocks, by layer.

        Args:
            path: A file to write, ``.png``, ``.svg`` or ``.pdf``, or ``.csv`` for the numbers.
        """
        from hessiankit.curvature.plots import row_chart  # only here: Matplotlib

        rows: dict[str, SharpnessEstimate | None] = dict(self.types)
        if len(self.layers) > 2:
            rows[""] = None
            rows |= {"outside blocks" if layer is None else f"block {layer}": one for layer, one in self.layers.items()}
        values = {"S": [math.nan if one is None else one.value for one in rows.values()]}
        ends = [(math.nan, math.nan) if one is None else (one.low, one.high) for one in rows.values()]
        axis, title = f"average sharpness S, {self.confidence:.0%} intervals", NAMES[self.kind]
        return row_chart("SharpnessReport.plot", list(rows), values, axis=axis, title=title, path=path, intervals=ends)

    def _headline(self) -> str:
        term = {"token": "tokens" if self.loss == "cross_entropy" else "entries", "sequence": "sequences"}[self.per]
        terms = f"mean over {self.terms:,} {term}" + ("" if self.per == "sequence" else f" of {self.sequences:,} sequences")
        metric = f" in the metric of {self.metric}" if self.metric else ""
        parts = [f"average sharpness{metric}, {NAMES[self.kind]}", self.loss.replace("_", " "), terms]
        if self.draws:
            parts += [_count(self.draws, "draw"), _count(self.micro_batches, "micro-batch", "es")]
        return ", ".join(parts) + f", {self.seconds:.1f} s"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for kind, one in self.types.items():
            has_quotient = "Norm" in self.types and kind != "Norm"
            quotient = f"{self.ratio(kind).value:.3g}" if has_quotient else "1" if kind == "Norm" else ""
            zeros = (f"{self.histograms[kind].zeros / one.entries:.1%}",) if self.histograms else ()
            numbers = (f"{one.value:.4g}", *one.shown, quotient, f"{self.scale_free[kind].value:.3g}", *zeros)
            yield kind, f"{one.entries:,}", *numbers

    def _remarks(self) -> Iterator[str]:
        yield f"from flat to sharp: {self.ordering}"
        if self.draws == 1:
            yield "n.a.: errors come from the differences between draws of the labels; take two draws or more"
        if 1 < self.draws < ENOUGH_DRAWS:
            yield f"{self.draws} draws are too few for sure intervals ({COVERAGE}); take four or more"
        unlikely = self.draws * self.replicates.unlikely
        if self.draws > 1 and unlikely < ENOUGH_LABELS:
            expectation = f"{unlikely:.2g} of all labels drawn are expected not to be the likeliest ones"
            yield f"{expectation}, too few for sure intervals ({COVERAGE}); take more draws or sequences"
        if self.seen_rows is not None:
            yield f"Emb over the {self.seen_rows.entries:,} entries of rows that the data look up: {self.seen_rows}"
        for reason, names in (("left out, frozen", self.frozen), ("no output depends on", self.unused)):
            if names:
                yield f"{reason}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        interval, zeros = f"{self.confidence:.0%} interval", ("zeros",) if self.histograms else ()
        headers = ("type", "entries", "S", "s.e.", interval, "Norm / S", "S |theta|^2/#", *zeros)
        yield table(headers, self._rows(), drop=("zeros", "S |theta|^2/#", "entries", "s.e."))
        yield from self._remarks()


def _count(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}{plural if n != 1 else ''}"


COMMON_FIELDS = ("sequences", "per", "kind", "metric", "loss", "seed", "frozen", "unused", "seconds")
"""Attributes of the report that are those of the replicates."""


def report_of(replicates: Replicates, *, confidence: float = 0.95) -> SharpnessReport:
    """Return the report that replicates give."""
    if not 0 < confidence < 1:
        raise InputError(f"{WHO}: confidence={confidence!r}; pass a number between 0 and 1, e.g. 0.95")
    parts, weights = replicates.parts, as_weights(replicates.terms)
    sizes = torch.tensor([part.size for part in parts], dtype=torch.float64, device="cpu")

    def combined(indices: list[int], factors: Tensor) -> SharpnessEstimate:
        """Return the estimate of a weighted sum of the parts' traces."""
        x, entries = replicates.values[:, :, indices] @ factors, sum(parts[k].size for k in indices)
        return estimate(x, weights, entries=entries, confidence=confidence, exact=replicates.is_exact)

    def pooled(indices: list[int]) -> SharpnessEstimate:
        return combined(indices, torch.ones(len(indices), dtype=torch.float64, device="cpu") / sizes[indices].sum())

    of_type = {kind: indices for (kind, _), indices in _groups(parts, lambda part: (part.type, None))}
    mean_squares = replicates.squared_norms / sizes
    common_fields: dict[str, Any] = {name: getattr(replicates, name) for name in COMMON_FIELDS}
    return SharpnessReport(
        types={kind: pooled(indices) for kind, indices in of_type.items()},
        layers={layer: pooled(indices) for (_, layer), indices in _groups(parts, lambda part: ("", part.layer))},
        type_layers={key: pooled(indices) for key, indices in _groups(parts, lambda part: (part.type, part.layer))},
        tensors={part.name: pooled([k]) for k, part in enumerate(parts)},
        mean_of_tensors={kind: combined(p, 1.0 / (len(p) * sizes[p])) for kind, p in of_type.items()},
        scale_free={kind: combined(p, mean_squares[p] / sizes[p].sum()) for kind, p in of_type.items()},
        seen_rows=_seen_rows(replicates, confidence),
        histograms=_histograms(replicates, of_type),
        terms=int(replicates.terms.sum()),
        micro_batches=len(replicates.terms),
        draws=0 if replicates.is_exact else replicates.draws,
        confidence=confidence,
        replicates=replace(replicates, entries={}),
        **common_fields,
    )


def _groups(parts: Sequence[Part], key: Callable[[Part], Place]) -> Iterator[tuple[Place, list[int]]]:
    """Yield each type and layer with the numbers of its parts: types in the order of TYPES, outside the blocks first."""
    groups: dict[Place, list[int]] = {}
    for k, part in enumerate(parts):
        groups.setdefault(key(part), []).append(k)
    order = {kind: k for k, kind in enumerate(TYPES)}
    for kind, layer in sorted(groups, key=lambda at: (order.get(at[0], len(order)), at[0], -1 if at[1] is None else at[1])):
        yield (kind, layer), groups[kind, layer]


def _seen_rows(replicates: Replicates, confidence: float) -> SharpnessEstimate | None:
    """Return S of the embeddings without the rows that no token looked up; micro-batches are summed first."""
    total, entries = torch.zeros(1, replicates.draws, dtype=torch.float64, device="cpu"), 0
    sizes = {part.parameter: part.size for part in replicates.parts if part.axis is None}
    for name, rows in replicates.rows.items():
        mask = replicates.seen[name]
        total += rows[:, mask].sum(1) / float(replicates.terms.sum())
        entries += int(mask.sum()) * (sizes[name] // len(mask))
    if not entries:
        return None
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    return estimate(total / entries, one, entries=entries, confidence=confidence, exact=replicates.is_exact)


def _histograms(replicates: Replicates, of_type: Mapping[str, list[int]]) -> dict[str, Histogram]:
    if not replicates.entries:
        return {}
    divisor = float(replicates.terms.sum()) * replicates.draws

    def views(indices: list[int]) -> Iterator[Tensor]:
        for k in indices:
            for view in replicates.parts[k].of(replicates.entries[replicates.parts[k].parameter]):
                yield view / divisor

    return {kind: histogram(views(indices)) for kind, indices in of_type.items()}
