"""Symmetries that follow from the uses of columns: gauges, scales that norms remove, shifts without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from hessiankit.tracing.trace import Trace
from hessiankit.verify.identity_columns import Following, LinearUse, PairUse, RowUse, Space, Use
from hessiankit.verify.identity_generators import GeneratorPart, Kind, Leg, Symmetry

CURVED = "H Bθ = -Bᵀg"


STATEMENTS = {
    ("linear maps", "linear"): f"(A G, G⁻¹C): <A, g> = <C, g>, {CURVED}",
    ("linear maps", "diagonal"): f"(A D, D⁻¹C), D diagonal: <A, g> = <C, g>, {CURVED}",
    ("linear maps", "rotation"): f"(A R, RᵀC), R a rotation: {CURVED}",
    ("logits", "linear"): f"(A G, C G⁻ᵀ): <A, g> = <C, g>, {CURVED}",
    ("logits", "diagonal"): f"(A D, C D⁻¹), D diagonal: <A, g> = <C, g>, {CURVED}",
    ("logits", "rotation"): f"(A R, C R), R a rotation: {CURVED}",
    ("norm scale", ""): "<A, g> = 0, H A = -g on A, 0 elsewhere",
    ("row mean", ""): "A + u ⊗ 1: <u ⊗ 1, g> = 0, H (u ⊗ 1) = 0",
    ("key bias", ""): "g = 0, H = 0 in the rows of A",
}


def _connected(edges: Tensor) -> list[Tensor]:
    """Return the sets of columns that edges (n, 2) connect, in the order of their smallest columns."""
    columns, ends = torch.unique(edges, return_inverse=True)
    first, second = ends.cpu().numpy().T
    graph = coo_array((np.ones(len(ends)), (first, second)), shape=(len(columns), len(columns)))
    count, labels = connected_components(graph, directed=False)
    return [columns[torch.from_numpy(labels == n).to(columns.device)] for n in range(count)]


def structures(trace: Trace) -> tuple[list[Symmetry], list[str]]:
    """Return the symmetries that a trace's structure implies, and what would hold were a norm's eps 0."""
    following = Following(trace)
    uses: dict[Space, list[Use]] = {space: [] for space in following.spaces}
    for use in following.uses:
        for space in dict.fromkeys(c.space for c, _ in use.reads):
            uses[space].append(use)
    found: list[Symmetry] = []
    skipped: list[str] = []
    for space, own in uses.items():
        found += _gauge(space, own)
        found += _scale(space, own, skipped)
        found += _mean(space, own)
    for pair in following.uses:
        if isinstance(pair, PairUse):
            found += _logits(pair, uses)
    return [symmetry for symmetry in found if not symmetry.entangled], skipped


def _seen_by(space: Space, uses: Sequence[Use]) -> Tensor:
    """Return which of a space's columns (a mask) some of the uses read."""
    device = space.legs[0][0].at.device
    seen = torch.zeros(space.size, dtype=torch.bool, device=device)
    for use in uses:
        for channel, columns in use.reads:
            if channel.space is space:
                seen[columns.reshape(-1) - space.first] = True
    return seen


def _gauge(space: Space, uses: Sequence[Use]) -> Iterator[Symmetry]:
    """Columns that only linear maps read: the rows of those maps take the inverse transformation."""
    linear = [u for u in uses if isinstance(u, LinearUse)]
    if not linear:
        return
    others = [u for u in uses if u not in linear and not (isinstance(u, RowUse) and u.passed)]
    free = _seen_by(space, linear) & ~_seen_by(space, others)
    labels = torch.zeros(space.size, dtype=torch.long, device=free.device)
    for use in linear:
        here = _seen_by(space, [use])
        pairs = torch.stack([labels, torch.where(here, use.channel.labels, 0)], 1)
        free &= (pairs[:, 1] >= 0) | ~here
        labels = torch.unique(pairs, dim=0, return_inverse=True)[1]
    kinds = {u.channel.freedom for u in linear}
    if not bool(free.any()) or {"diagonal", "rotation"} <= kinds:
        return
    kind: Kind = next((k for k in ("diagonal", "rotation") if k in kinds), "linear")  # type: ignore[assignment]
    groups = [free] if kind == "diagonal" else [free & (labels == n) for n in torch.unique(labels[free]).tolist()]
    parts = []
    for group in groups:
        columns = group.nonzero()[:, 0] + space.first
        against = [leg for use in linear for leg in _rows_of(use, columns)]
        parts.append(GeneratorPart(kind, tuple(space.restricted(columns)), tuple(against)))
    yield Symmetry("linear maps", STATEMENTS["linear maps", kind], tuple(parts))


def _rows_of(use: LinearUse, columns: Tensor) -> Iterator[Leg]:
    """Yield the rows of a weight that meet some columns, once for each time that the columns occur in its input."""
    ordered, places = torch.sort(use.columns, stable=True)
    first, end = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    for n in range(int((end - first).amin())):
        yield Leg(use.weight.parameter, use.weight.at[:, places[first + n]])


def _scale(space: Space, uses: Sequence[Use], skipped: list[str]) -> Iterator[Symmetry]:
    """Columns that only norms with eps = 0 read: their length does not matter."""
    direct = [u for u in uses if not all(c.normed for c, _ in u.reads if c.space is space)]
    norms = [u for u in direct if isinstance(u, RowUse) and u.eps is not None and not u.channel.summed]
    free = _seen_by(space, norms) & ~_seen_by(space, [u for u in direct if u not in norms])
    if any(role == "gain" for _, role in space.legs) or not bool(free.any()):
        return
    names = ", ".join(dict.fromkeys(leg.parameter for leg, _ in space.legs))
    if eps := max(u.eps or 0.0 for u in norms):
        skipped.append(f"{names}: <w, g> = 0 and H w = -g hold up to O(eps) only, and the norm has eps = {eps:g}")
        return
    if any(role == "table" for _, role in space.legs) and len(space.legs) > 1:
        return  # the rows of a table cannot be scaled one by one where they share another parameter
    parts = []
    for columns in _joined(norms, free, space):
        legs = space.restricted(columns)
        if space.legs[0][1] == "table":
            parts.append(GeneratorPart("diagonal", (Leg(legs[0].parameter, legs[0].at.T),)))
        else:
            parts.append(GeneratorPart("linear", tuple(Leg(leg.parameter, leg.at.reshape(-1, 1)) for leg in legs)))
    if parts:
        yield Symmetry("norm scale", STATEMENTS["norm scale", ""], tuple(parts))


def _mean(space: Space, uses: Sequence[Use]) -> Iterator[Symmetry]:
    """Columns that only LayerNorms and softmaxes read: adding the same to all columns of a row changes nothing."""
    direct = [u for u in uses if not all(c.normed for c, _ in u.reads if c.space is space)]
    centred = [u for u in direct if isinstance(u, RowUse) and u.centred and u.channel.uniform]
    free = _seen_by(space, centred) & ~_seen_by(space, [u for u in direct if u not in centred])
    parts = []
    for columns in _joined(centred, free, space):
        legs = space.restricted(columns, "weight", "bias", "table")
        if legs:
            parts.append(GeneratorPart("shift", tuple(legs)))
    if parts:
        yield Symmetry("row mean", STATEMENTS["row mean", ""], tuple(parts))


def _joined(uses: Sequence[RowUse], free: Tensor, space: Space) -> list[Tensor]:
    """Return the sets of free columns that rows hold together."""
    if not uses:
        return []
    edges = [torch.stack(torch.broadcast_tensors(use.columns[:, :1], use.columns), -1).reshape(-1, 2) for use in uses]
    return [columns for columns in _connected(torch.cat(edges)) if bool(free[columns - space.first].all())]


def _logits(pair: PairUse, uses: dict[Space, list[Use]]) -> Iterator[Symmetry]:
    """Queries and keys that meet only each other: Q K^T keeps its value under (Q G, K G^-T), and softmax loses the key bias."""
    for channel, columns in pair.reads:
        space = channel.space
        others = [u for u in uses[space] if u is not pair and not (isinstance(u, RowUse) and u.passed)]
        if bool(_seen_by(space, others)[columns.reshape(-1) - space.first].any()):
            return
    kinds = {channel.freedom for channel, _ in pair.reads}
    if not {"diagonal", "rotation"} <= kinds:
        kind: Kind = next((k for k in ("diagonal", "rotation") if k in kinds), "linear")  # type: ignore[assignment]
        yield Symmetry("logits", STATEMENTS["logits", kind], tuple(_heads(pair, kind)))
    key = pair.right
    if pair.softmax[0] and key.uniform:
        biases = key.space.restricted(torch.unique(pair.right_columns), "bias")
        if biases:
            shifts = tuple(Leg(leg.parameter, leg.at.reshape(-1, 1)) for leg in biases)
            yield Symmetry("key bias", STATEMENTS["key bias", ""], (GeneratorPart("shift", shifts),))


def _heads(pair: PairUse, kind: Kind) -> Iterator[GeneratorPart]:
    """Yield one part for each set of heads that share queries or keys."""
    sides = pair.columns, pair.right_columns
    numbers = torch.unique(torch.cat(sides), dim=0, return_inverse=True)[1].reshape(2, -1)  # of equal rows
    for members in _connected(numbers.T):
        legs: list[list[Leg]] = [[], []]
        for side, own, (channel, _), into in zip(sides, numbers, pair.reads, legs, strict=True):
            for row in torch.unique(side[torch.isin(own, members)], dim=0):
                into += channel.space.restricted(row)
        yield GeneratorPart(kind, tuple(legs[0]), tuple(legs[1]))
