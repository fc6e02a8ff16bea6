"""Curvature between a source and parameters: what pairs of sources become where rows meet.

Behind an attention over moving tokens every row depends on every row before, and curvature between two sources t and r is a
matrix of L p x L q numbers for each sample. Lifted to the parameters of r, it is L p x i q, the same columns for all samples
and for all that a weight does: columns of the panel of t. A panel is pulled through the sources before t as one matrix,
and at each of them it is lifted from the left into rows of H:

    panel_s = sum over children t of  J_ts^T panel_t,        H[parameters of t, :] += E_t^T panel_t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from hessiankit.engine.columns import Source
from hessiankit.engine.lifts import Lift
from hessiankit.engine.pairs import Blocks


@dataclass(frozen=True)
class _Part:
    """What adds to a panel (``entries``, columns): some columns, whose first is ``start`` before the end, of some rows."""

    data: Tensor
    start: int
    rows: Tensor | None
    entries: int


class Panels:
    """Panels (entries of t, columns), each with the columns of the parameters that had been met when it was made.

    New columns come in front, so that a column has the same distance from the end in every panel.
    """

    def __init__(self) -> None:
        self.starts: dict[Lift, int] = {}  # of the columns of a parameter, counted from the end
        self._width = 0
        self._parts: dict[int, list[_Part]] = {}  # of sources still to come

    def __contains__(self, t: int) -> bool:
        return t in self._parts

    def add(self, t: int, panel: Tensor, rows: Tensor | None = None, entries: int = 0) -> None:
        """Add a panel, or one for some rows of so many, to that of t."""
        self._parts.setdefault(t, []).append(_Part(panel, panel.shape[1], rows, entries or panel.shape[0]))

    def lift(self, t: int, r: Source, K: Tensor) -> None:
        """Add curvature K (R, columns of t, columns of r), lifted to the parameters of r, to the panel of t."""
        for v, owner in reversed(list(zip(r.lifts, r.owners, strict=True))):
            if owner not in self.starts:
                self._width += v.size
                self.starts[owner] = self._width
            columns = _lifted(v, r, K)
            self._parts.setdefault(t, []).append(_Part(columns, self.starts[owner], None, columns.shape[0]))

    def take(self, t: int) -> Tensor:
        """Return the panel of a source, and forget it."""
        parts = sorted(self._parts.pop(t), key=lambda part: (part.rows is not None, -part.data.shape[1]))
        width = max(part.start for part in parts)
        first = parts[0]
        if len(parts) == 1 and first.rows is None and first.data.shape[1] == width:
            return first.data
        if first.rows is not None:
            total = first.data.new_zeros(first.entries, width)
        else:  # what the widest part covers need not be set to zero
            total = first.data.new_empty(first.entries, width)
            left = width - first.start
            total[:, :left] = 0
            total[:, left : left + first.data.shape[1]] = first.data
            total[:, left + first.data.shape[1] :] = 0
            del parts[0]
        for part in parts:
            into = total[:, width - part.start : width - part.start + part.data.shape[1]]
            if part.rows is None:
                into += part.data
            else:
                into.index_add_(0, part.rows, part.data)
        return total

    def columns(self, panel: Tensor) -> Iterator[tuple[Lift, Tensor]]:
        """Yield the lifts of the parameters of which a panel has columns, with these columns."""
        width = panel.shape[1]
        for owner, start in self.starts.items():
            if start <= width:
                yield owner, panel[:, width - start : width - start + owner.size]


def changes_to_panel(t: int, sources: Mapping[int, Source], blocks: Blocks, panels: Panels) -> bool:
    """Tell whether rows of a source meet others, here or on the way to its parents."""
    source = sources[t]
    return bool(source.parents) and (
        t in panels
        or any(level < source.axes for level in source.parents)
        or any(level < min(source.axes, sources[r].axes) for r in blocks.near[t] if r >= t for level in blocks.levels(t, r))
    )


def to_panel(t: int, sources: Mapping[int, Source], blocks: Blocks, panels: Panels) -> bool:
    """Turn blocks between a source and those after it into columns of its panel; return whether its own block is among them."""
    own = False
    for r in sorted((r for r in blocks.near[t] if r >= t and sources[r].lifts), reverse=True):
        if pays(sources[t], sources[r], min(1, *blocks.levels(t, r))):
            for K in blocks.between(t, r).values():
                panels.lift(t, sources[r], K)
            if r == t:
                own = True
            else:
                blocks.forget(t, r)
    return own


def pays(t: Source, r: Source, level: int) -> bool:
    """Tell whether columns of parameters take no more work than columns of their source.

    With l rows of t and m of r in a group, a column of r's weights takes about l i multiplications for each of t's parameters,
    and m (2 l + i) the other way.
    """
    rows_t, rows_r = (source.columns(level) // source.width for source in (t, r))
    size = sum(lift.size for lift in r.lifts) // r.width
    return rows_r * (2 * rows_t + size) >= rows_t * size


def _lifted(v: Lift, r: Source, K: Tensor) -> Tensor:
    """Lift the columns of K (R, columns of t, columns of r): (entries of t, size_v)."""
    groups, wide, columns = K.shape
    by_row = K.mT.reshape(groups, columns // r.width, r.width, wide)
    return v.reduce(by_row).mT.reshape(groups * wide, v.size)
