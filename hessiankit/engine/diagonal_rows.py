"""The diagonal of the Hessian from block rows: curvature of each place with itself, between equal columns.

At z = X W with rows n in groups,

    H[(i, p), (i, p)] = sum over n, n' of one group of  X[n, i] X[n', i] K[(n, p), (n', p)],

so only the entries of K between equal columns are needed, D (groups, m, m', p). For directions t and t' of one column these
are the sum of t^T [lambda_v . D^2 phi_v] t' over the operations they pass, and nothing is pulled back. A parameter that
enters several places, or of which an entry reaches several columns, is a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hessiankit.engine.block_rows import BlockRows, Tail, combine
from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.paths import Paths
from hessiankit.engine.sweep import StoredTangents, Tangents, UnitColumns, all_dense, dense, push, reads, work_space
from hessiankit.engine.sweep_plans import Directions, Section, SweepPlan


def read_diagonal(paths: Paths, sections: Sequence[Section], add: Callable[[ParameterJacobian, Tensor], None]) -> None:
    """Call ``add`` with each parameter Jacobian and the diagonal (size,) of its entries.

    The paths are by column, the sections of places with themselves alone (:func:`hessiankit.engine.sections.sections`).
    """
    rows = BlockRows(paths, sections)
    tail: Tail | None = None
    for section in sections:
        entry_tail, tail = rows.tails(section, tail, (), is_diagonal=True)
        for plan in section.plans:
            (d,) = plan.directions
            tail_numbers = 0 if tail is None else tail.K[0].numel() // len(tail.K[0]) * d.groups
            parts = [
                _equal_columns(paths, section, plan, (d, start, stop), tail)
                for ((_, start, stop),) in plan.chunks(3 * plan.numbers + tail_numbers, work_space(paths.device))
            ]
            D = torch.cat(parts, -1)
            for u in d.jacobians:
                add(u, u.diagonal(D))
        tail = entry_tail


def _equal_columns(
    paths: Paths, section: Section, plan: SweepPlan, chunk: tuple[Directions, int, int], tail: Tail | None
) -> Tensor:
    """Return D (groups, m, m, outputs) of some outputs of a place; groups whose paths join after the section count as one."""
    d, start, stop = chunk
    value, p, m = paths.value(d.place.at), stop - start, d.rows
    meeting = 1 if tail is None else value.shape[min(d.level, tail.level) : d.level].numel()
    groups = d.groups // meeting
    D = value.new_zeros(groups, meeting, m, meeting, m, p)
    tangents: dict[int, Tangents] = {d.place.at: (d.columns if plan.by_pairs else d.tangents)(start, stop, value)}
    input_tangents = push(plan.path, tangents, *reads(plan.path, () if tail is None else (section.end,)))
    diagonal = D.diagonal(dim1=1, dim2=3)  # (groups, m, m, p, meeting)
    for step in plan.path:
        step_tangents = input_tangents.pop(step.output, None)
        if step_tangents is not None and (curvature := _bend(step, step_tangents, d.groups, m)) is not None:
            diagonal += curvature.reshape(groups, meeting, m, m, p).permute(0, 2, 3, 4, 1)
    if tail is not None and (T := dense(tangents.get(section.end))) is not None:
        D += _behind(T, d, tail, (groups, meeting, m, p))
    return D.reshape(groups, meeting * m, meeting * m, p)


def _bend(step: Step, step_tangents: Sequence[StoredTangents | None], groups: int, m: int) -> Tensor | None:
    """Return t^T [lambda . D^2 phi] t between the directions of one group and of equal columns, (groups, m, m, p)."""
    point, moving_tangents = step.primitive, [t for t in step_tangents if t is not None]
    t = moving_tangents[0]
    if len(moving_tangents) == 1 and isinstance(t, UnitColumns) and point.factor is not None and point.bend is not None:
        return (t.scale.square() * point.bend)[..., t.start : t.stop].reshape(groups, 1, 1, len(t))
    tangents = all_dense(step_tangents)
    total: Tensor | None = None
    for tangent, bar in zip(tangents, point.pull(None, tangents), strict=True):
        if tangent is None or bar is None:
            continue
        if m == 1:
            part = (bar * tangent).reshape(len(tangent), groups, -1).sum(2).T[:, None, None]
        else:
            part = torch.einsum("mpgs,npgs->gmnp", *(x.reshape(m, len(x) // m, groups, -1) for x in (bar, tangent)))
        total = part if total is None else total + part
    return total


def _behind(T: Tensor, d: Directions, tail: Tail, shape: tuple[int, int, int, int]) -> Tensor:
    """Return T^T K T of equal columns, T tangents at a section's end, K the rest's curvature: (groups, b, m, b, m, p)."""
    groups, meeting, m, p = shape
    if d.level < tail.level:  # rows meet before it, or these are directions of parameter entries
        tangents = T.reshape(m, p, groups, -1, tail.K.shape[1])
        covectors = torch.einsum("mpgbk,gbkl->mpgbl", tangents, tail.K.reshape(groups, -1, *tail.K.shape[1:]))
        return torch.einsum("mpgbl,npgbl->gmnp", covectors, tangents).reshape(groups, meeting, m, meeting, m, p)
    K = combine(T, d.level, tail.K)  # (groups, p, .) where all rows stay apart
    if m == meeting == 1:
        return (K * T.reshape(p, groups, -1).transpose(0, 1)).sum(2).reshape(groups, 1, 1, 1, 1, p)
    K = K.reshape(groups, meeting, m, p, meeting, -1)
    return torch.einsum("gampbs,npgbs->gambnp", K, T.reshape(m, p, groups, meeting, -1))
