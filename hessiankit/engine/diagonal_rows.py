"""The diagonal of the Hessian from block rows: curvature of each place with itself, between equal columns.

At z = X W with rows n in groups,

    H[(i, p), (i, p)] = sum over n, n' of one group of  X[n, i] X[n', i] K[(n, p), (n', p)],

so that of each place K is needed at equal columns alone, D (groups, m, m', p). A parameter that enters several places, or an
entry of which reaches several columns, is taken whole: a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hessiankit.engine.block_rows import BlockRows, Tail, combine
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.paths import Paths, Place
from hessiankit.engine.sections import Directions, Section, SweepPlan, sweeps
from hessiankit.engine.sweep import Along


def read_diagonal(paths: Paths, add: Callable[[ParameterJacobian, Tensor], None]) -> None:
    """Call ``add`` with each parameter Jacobian and the diagonal (size,) of its entries.

    Args:
        paths: By column.
        add: Adds the diagonal of some entries.
    """
    rows = BlockRows(paths, alone=True)
    tail: Tail | None = None
    for section in rows.sections:
        before, tail, _ = rows.tails(section, tail, alone=True)
        kept, level = (tail.K.numel(), tail.level) if tail else (0, 0)
        for plan in sweeps(paths, section, kept, level, alone=True):
            (d,) = plan.directions
            through = 0 if tail is None else tail.K[0].numel() // len(tail.K[0]) * d.groups
            parts = [
                _equal_columns(rows, section, plan, (d, start, stop), tail)
                for ((_, start, stop),) in plan.chunks(3 * plan.numbers + through)
            ]
            D = torch.cat(parts, -1)
            for u in d.jacobians:
                add(u, u.diagonal(D))
        tail = before


def _equal_columns(
    rows: BlockRows, section: Section, plan: SweepPlan, cut: tuple[Directions, int, int], tail: Tail | None
) -> Tensor:
    """Return D (groups, m, m, outputs) of some outputs of a place; groups that meet behind the section are one."""
    d, start, stop = cut
    value, p, m = rows.paths.value(d.place.at), stop - start, d.rows
    meeting = 1 if tail is None else value.shape[min(d.level, tail.level) : d.level].numel()
    groups = d.groups // meeting
    D = value.new_zeros(groups, meeting, m, meeting, m, p)

    def pushed(T: Tensor) -> None:
        assert tail is not None
        if d.level < tail.level:  # rows meet before the section's end, or these are parameter entries
            along = T.reshape(m, p, groups, -1, tail.K.shape[1])
            bent = torch.einsum("mpgbk,gbkl->mpgbl", along, tail.K.reshape(groups, -1, *tail.K.shape[1:]))
            D.add_(torch.einsum("mpgbl,npgbl->gmnp", bent, along).reshape(D.shape))
            return
        K = combine(T, d.level, tail.K)  # (groups, p, .) where all rows stay apart
        if m == meeting == 1:
            D[:, 0, 0, 0, 0].add_((K * T.reshape(p, groups, -1).transpose(0, 1)).sum(2))
            return
        K = K.reshape(groups, meeting, m, p, meeting, -1)
        D.add_(torch.einsum("gampbs,npgbs->gambnp", K, T.reshape(m, p, groups, meeting, -1)))

    def arrive(place: Place, bar: Along, mixed: bool) -> None:
        if place is not d.place or mixed:
            return
        assert isinstance(bar, Tensor)
        if d.by_entry and place.axes:
            covectors = bar.reshape(p, -1, place.width).permute(1, 2, 0)
            entries = torch.cat([u.vjp(covectors) for u in place.jacobians])[start:stop]
            D.add_(entries.diagonal())
            return
        K = bar.reshape(m, p, d.groups, m, -1)[..., start:stop].diagonal(dim1=1, dim2=4)  # (m, groups, m', p)
        own = K.transpose(0, 1).reshape(groups, meeting, m, m, p)
        D.diagonal(dim1=1, dim2=3).add_(own.permute(0, 2, 3, 4, 1))

    units = d.columns(start, stop, value) if plan.by_pairs else d.tangents(start, stop, value)
    seeds = {d.place.at: (slice(0, len(units)), units)}
    rows.sweep(section, plan.path, len(units), arrive, seeds=seeds, pushed=pushed if tail is not None else None)
    return D.reshape(groups, meeting * m, meeting * m, p)
