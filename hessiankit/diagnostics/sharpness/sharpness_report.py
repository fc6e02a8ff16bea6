"""Average sharpness by block type, by layer and by tensor: a pure function of the replicates."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hessiankit.diagnostics.sharpness.estimate import SharpnessEstimate, as_weights, estimate, ratio
from hessiankit.diagnostics.sharpness.histogram import Histogram, histogram
from hessiankit.diagnostics.sharpness.options import WHO
from hessiankit.diagnostics.sharpness.replicate import Replicates
from hessiankit.partition import TYPES, Part
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture

K = TypeVar("K", bound=Hashable)
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


@dataclass(frozen=True, repr=False, eq=False)
class SharpnessReport(Printed, WithDict):
    """Average sharpness S = Tr h / # of the parts of a model, eq. (4) of The Sharpness Disparity Principle (Wang et al.).

    Every number is a :class:`SharpnessEstimate`: value, standard error, interval. The errors are those of the label draws on
    these data; ``data_standard_error`` takes the micro-batches as a sample.

    Attributes:
        types: By block type, over all entries of all its tensors (Remark 3.1).
        layers: By index of the block, from 0; None outside the blocks.
        type_layers: By (type, layer).
        tensors: By name of the part.
        mean_of_tensors: By type, the plain mean of the tensors' S, in which a small tensor counts as much as a large one.
        scale_free: By type, the mean over its entries of S ||theta||^2 / # of their tensor; unlike S, it stays the same where
            one tensor is multiplied by c and another one divided by it without a change of the function (ours/ffn-rescaling).
        seen_rows: S of the embeddings over the rows that the data look up; None where no embedding is looked up by rows.
        histograms: By type, of log10 h, averaged over micro-batches and draws; empty without ``histograms=True``.
        terms: Number of terms of L: tokens, sequences or, for squared error, entries.
        sequences: Sequences with a position that counts.
        micro_batches: How many; h is squared in each, then averaged.
        draws: Draws of the labels; 0 where the values are exact.
        per: ``"token"`` or ``"sequence"``.
        kind: ``"fisher-mc"``, ``"fisher-empirical"``, ``"ggn"`` or ``"hessian"``.
        metric: The preconditioner in whose metric the numbers are; "" for none.
        loss: ``"cross_entropy"`` or ``"mse"``.
        seed: Of the labels.
        confidence: Of the intervals.
        frozen: Parameters that do not require a gradient and were left out.
        unused: Parameters that no output depended on; their h is 0.
        seconds: Time taken.
        replicates: By micro-batch, draw and part, for further statistics.
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
        """The same as a line, with ``<`` where the interval of the quotient of two neighbours leaves out 1, else ``~``."""
        order = self.order
        text = order[0]
        for low, high in pairwise(order):
            quotient = self.ratio(low, base=high)
            text += f" < {high}" if quotient.low > 1.0 else f" ~ {high}"
        return text

    def ratio(self, type: str, base: str = "Norm") -> SharpnessEstimate:
        """Return S_base / S_type, with the correlation of the two, which the same draws gave.

        Args:
            type: A block type.
            base: Another one.

        Raises:
            InputError: If the model has no such type.
        """
        for name in (type, base):
            if name not in self.types:
                raise InputError(f"{WHO}: no {name!r} among the measured types; pass one of {', '.join(self.types)}")
        own = self.replicates
        top, bottom = (_mean(own, lambda part, name=name: part.type == name) for name in (base, type))  # type: ignore[misc]
        weights = as_weights(own.terms)
        entries = self.types[type].entries
        return ratio(top, bottom, weights, entries=entries, confidence=self.confidence, exact=not _drawn(own))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the replicates as plain Python data, which JSON can hold."""
        layers = {"outside" if layer is None else str(layer): one.to_dict() for layer, one in self.layers.items()}
        both = [{"type": kind, "layer": layer, **one.to_dict()} for (kind, layer), one in self.type_layers.items()]
        return {**super().to_dict(), "layers": layers, "type_layers": both}

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw S as bars with their intervals, by type and, where the model has several blocks, by layer.

        Args:
            path: Where to write the picture; its suffix chooses the format: ``.png``, ``.svg`` or ``.pdf``. The numbers go beside
                it as CSV.

        Raises:
            InputError: The file cannot be written.
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
            known = "Norm" in self.types and kind != "Norm"
            quotient = f"{self.ratio(kind).value:.3g}" if known else "1" if kind == "Norm" else ""
            zeros = (f"{self.histograms[kind].zeros / one.entries:.1%}",) if self.histograms else ()
            numbers = (f"{one.value:.4g}", *one.shown, quotient, f"{self.scale_free[kind].value:.3g}", *zeros)
            yield kind, f"{one.entries:,}", *numbers

    @property
    def _headers(self) -> tuple[str, ...]:
        interval = f"{self.confidence:.0%} interval"
        zeros = ("zeros",) if self.histograms else ()
        return ("type", "entries", "S", "s.e.", interval, "Norm / S", "S |theta|^2/#", *zeros)

    def _remarks(self) -> tuple[str, ...]:
        remarks = [f"from flat to sharp: {self.ordering}"]
        if self.draws == 1:
            remarks.append("n.a.: errors come from the differences between draws of the labels; take two draws or more")
        if 1 < self.draws < ENOUGH_DRAWS:
            remarks.append(f"{self.draws} draws are too few for sure intervals ({COVERAGE}); take four or more")
        unlikely = self.draws * self.replicates.unlikely
        if self.draws > 1 and unlikely < ENOUGH_LABELS:
            counted = f"{unlikely:.2g} of all labels drawn are expected not to be the likeliest ones"
            remarks.append(f"{counted}, too few for sure intervals ({COVERAGE}); take more draws or sequences")
        if self.seen_rows is not None:
            remarks.append(f"Emb over the {self.seen_rows.entries:,} entries of rows that the data look up: {self.seen_rows}")
        if self.frozen:
            remarks.append(f"left out, frozen: {_listing(self.frozen)}")
        if self.unused:
            remarks.append(f"no output depends on: {_listing(self.unused)}")
        return tuple(remarks)

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(self._headers, self._rows(), drop=("zeros", "S |theta|^2/#", "entries", "s.e."))
        yield from self._remarks()


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def _listing(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _drawn(own: Replicates) -> bool:
    return own.kind == "fisher-mc"


def _mean(own: Replicates, chosen: Callable[[Part], bool]) -> Tensor:
    """Return the replicates (micro-batches, draws) of the mean of h over the entries of some parts."""
    picked = [k for k, part in enumerate(own.parts) if chosen(part)]
    return own.values[:, :, picked].sum(2) / sum(own.parts[k].size for k in picked)


def _groups(parts: Iterable[Part], key: Callable[[Part], K]) -> dict[K, list[int]]:
    groups: dict[K, list[int]] = {}
    for k, part in enumerate(parts):
        groups.setdefault(key(part), []).append(k)
    return groups


def report_of(own: Replicates, *, confidence: float = 0.95) -> SharpnessReport:
    """Return the report that replicates give."""
    if not 0 < confidence < 1:
        raise InputError(f"{WHO}: confidence={confidence!r}; pass a number between 0 and 1, e.g. 0.95")
    parts, weights = own.parts, as_weights(own.terms)
    sizes = torch.tensor([part.size for part in parts], dtype=torch.float64, device="cpu")
    exact = not _drawn(own)

    def combined(picked: list[int], factors: Tensor) -> SharpnessEstimate:
        """Return the estimate of a weighted sum of the parts' traces."""
        x = own.values[:, :, picked] @ factors
        entries = sum(parts[k].size for k in picked)
        return estimate(x, weights, entries=entries, confidence=confidence, exact=exact)

    def pooled(picked: list[int]) -> SharpnessEstimate:
        return combined(picked, torch.ones(len(picked), dtype=torch.float64, device="cpu") / sizes[picked].sum())

    of_type = _groups(parts, lambda part: part.type)
    of_type = {kind: of_type[kind] for kind in (*TYPES, *sorted(set(of_type) - set(TYPES))) if kind in of_type}
    of_layer = _groups(parts, lambda part: part.layer)
    of_both = _groups(parts, lambda part: (part.type, part.layer))
    mean_squares = own.squared_norms / sizes
    return SharpnessReport(
        types={kind: pooled(picked) for kind, picked in of_type.items()},
        layers={layer: pooled(of_layer[layer]) for layer in sorted(of_layer, key=_layer_first)},
        type_layers={both: pooled(of_both[both]) for both in sorted(of_both, key=lambda b: (_rank(b[0]), _layer_first(b[1])))},
        tensors={part.name: pooled([k]) for k, part in enumerate(parts)},
        mean_of_tensors={kind: combined(p, 1.0 / (len(p) * sizes[p])) for kind, p in of_type.items()},
        scale_free={kind: combined(p, mean_squares[p] / sizes[p].sum()) for kind, p in of_type.items()},
        seen_rows=_seen_rows(own, confidence),
        histograms=_histograms(own, of_type),
        terms=int(own.terms.sum()),
        sequences=own.sequences,
        micro_batches=len(own.terms),
        draws=own.draws if _drawn(own) else 0,
        per=own.per,
        kind=own.kind,
        metric=own.metric,
        loss=own.loss,
        seed=own.seed,
        confidence=confidence,
        frozen=own.frozen,
        unused=own.unused,
        seconds=own.seconds,
        replicates=replace(own, entries={}),
    )


def _layer_first(layer: int | None) -> float:
    return -math.inf if layer is None else layer


def _rank(kind: str) -> tuple[int, str]:
    return (TYPES.index(kind) if kind in TYPES else len(TYPES), kind)


def _seen_rows(own: Replicates, confidence: float) -> SharpnessEstimate | None:
    """Return S of the embeddings without the rows that no token looked up; micro-batches are summed first."""
    total, entries = torch.zeros(1, own.draws, dtype=torch.float64, device="cpu"), 0
    sizes = {part.parameter: part.size for part in own.parts if part.axis is None}
    for name, rows in own.rows.items():
        mask = own.seen[name]
        total += rows[:, mask].sum(1) / float(own.terms.sum())
        entries += int(mask.sum()) * (sizes[name] // len(mask))
    if not entries:
        return None
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    return estimate(total / entries, one, entries=entries, confidence=confidence, exact=not _drawn(own))


def _histograms(own: Replicates, of_type: Mapping[str, list[int]]) -> dict[str, Histogram]:
    if not own.entries:
        return {}
    divisor = float(own.terms.sum()) * own.draws

    def views(picked: list[int]) -> Iterator[Tensor]:
        for k in picked:
            for view in own.parts[k].of(own.entries[own.parts[k].parameter]):
                yield view / divisor

    return {kind: histogram(views(picked)) for kind, picked in of_type.items()}
