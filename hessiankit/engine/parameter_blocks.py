"""Blocks of the Hessian from curvature between vertices: H_uv += sum over rows of U_n^T K_n V_n for two parameter Jacobians.

Into a block, sums are added a chunk at a time, small enough for the processor's cache: blocks are far larger than their
factors, and the time goes into passing over them. A dry run that counts operations sees each kind of chunk once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.engine.jacobians import SCRATCH, GainJacobian, IndexJacobian, ParameterJacobian, WeightJacobian
from hessiankit.engine.kernel_calls import KernelSum, compiled_sum

_repeated: ContextVar[Callable[[int], AbstractContextManager[None]] | None] = ContextVar("repeated", default=None)


@contextmanager
def counting_chunks(repeated: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Let :func:`chunks` yield two chunks of each length, the first within ``repeated(how many it represents)``.

    Two, because memory of one chunk may still be alive while the next is computed. Chunks whose work differs are all yielded.
    """
    before = _repeated.set(repeated)
    try:
        yield
    finally:
        _repeated.reset(before)


def chunks(length: int, step: int, *, alike: bool = True) -> Iterator[tuple[int, int]]:
    """Yield start and stop of chunks of ``step`` indices, and of the remainder.

    Args:
        length: Of the axis.
        step: Of a chunk.
        alike: Whether chunks of one length cost the same, wherever they lie.

    >>> list(chunks(7, 3))
    [(0, 3), (3, 6), (6, 7)]
    """
    repeated = _repeated.get()
    whole, rest = divmod(length, step)
    if repeated is None or not alike or whole < 3:
        yield from ((start, start + step) for start in range(0, whole * step, step))
    else:
        with repeated(whole - 1):
            yield 0, step
        yield step, 2 * step
    if rest:
        yield whole * step, length


CACHE = 2**17  # entries of a block that stay in a processor's cache while they are made and added
OUTER = 256  # columns of an outer product of weights made at once: as many as a product of matrices needs to run at speed


def add_pair(u: ParameterJacobian, v: ParameterJacobian, K: Tensor, into: Tensor, *, same: bool) -> KernelSum | None:
    """Add U^T K V to ``into`` (size_u, size_v), for curvature K (R, p, q) between equal rows of two values.

    Args:
        u: Jacobian U of the rows of the block.
        v: Jacobian V of its columns.
        K: Curvature, row by row.
        into: The block of the Hessian, or a view of it.
        same: Whether u and v are one Jacobian and K is symmetric.

    Returns:
        What is left to be added, by compiled kernels.
    """
    if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        left = compiled_sum(u, v, K, into, same=same)
        if left is None:
            _add_kronecker_pair(u, v, K, into, same=same)
        return left
    if isinstance(v, GainJacobian):
        into += u.vjp(v.scale_columns(K))
    elif isinstance(u, GainJacobian):
        into += v.vjp(u.scale_columns(K.mT)).T
    elif isinstance(u, IndexJacobian) and isinstance(v, IndexJacobian):
        into.index_put_((u.which.unsqueeze(2), v.which.unsqueeze(1)), K, accumulate=True)
    elif isinstance(u, IndexJacobian):
        add_pair(v, u, K.mT, into.T, same=False)
    else:
        assert isinstance(u, WeightJacobian)
        assert isinstance(v, IndexJacobian)
        _add_weight_and_table(u, v, K, into)
    return None


def _add_weight_and_table(u: WeightJacobian, v: IndexJacobian, K: Tensor, into: Tensor) -> None:
    """Add U^T K V of a weight and a selection, some rows at a time."""
    step = max(1, SCRATCH // (u.size * K.shape[2]))
    for start, stop in chunks(K.shape[0], step):
        rows = slice(start, stop)
        by_u = replace(u, X=u.X[rows]).by_entry(K[rows].transpose(0, 1))  # (size_u, rows, q)
        into += replace(v, which=v.which[rows]).vjp(by_u.permute(1, 2, 0)).T


def _add_kronecker_pair(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, *, same: bool) -> None:
    """Add sum_n (a_n a'_n^T) (x) K_n, a few inputs and outputs at a time."""
    rows, p, q = K.shape
    i, j = u.X.shape[1], v.X.shape[1]
    target = _four_axes(into, u, v).permute(0, 2, 1, 3)  # (i, j, p, q)
    left, right, flat = u.X.T.contiguous(), v.X.T.contiguous(), K.reshape(rows, p * q)
    if v.transposed:  # of two factors that are both read along their rows, the product is a seventh faster
        flat = flat.T.contiguous().T
    step = max(1, OUTER // j)
    for start, stop in chunks(i, step, alike=not same):
        first = start if same else 0  # symmetric: the earlier columns have been seen from the other side
        outer = (left[start:stop].unsqueeze(1) * right[first:]).flatten(0, 1)
        few = max(1, CACHE // (outer.shape[0] * q))
        for top, bottom in chunks(p, few):
            part = flat[:, top * q : bottom * q]
            if v.transposed:  # inputs lie next to each other
                block = (part.T @ outer.T).reshape(bottom - top, q, stop - start, j - first).permute(2, 3, 0, 1)
            else:
                block = (outer @ part).reshape(stop - start, j - first, bottom - top, q)
            target[start:stop, first:, top:bottom].add_(block)
            if same:
                target[stop:, start:stop, top:bottom].add_(block[:, stop - start :].transpose(0, 1))


def add_across_rows(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor) -> None:
    """Add U^T K V to ``into``, for curvature K (G, m p, m' q) between all rows of two values within each of G groups.

    H = sum over groups and pairs of rows of (a_n a'_n'^T) (x) K_nn'.
    """
    if not K.is_contiguous() and K.mT.is_contiguous():
        u, v, K, into = v, u, K.mT, into.T
    groups, p, q, i, j = K.shape[0], u.width, v.width, u.X.shape[1], v.X.shape[1]
    a = u.X.reshape(groups, -1, i).mT  # (G, i, m)
    b = v.X  # (G m', j)
    split = K.reshape(groups, a.shape[2], p, -1)
    target = _four_axes(into, u, v)
    rows = min(i, max(1, CACHE // (j * q)))
    few = max(1, CACHE // (rows * j * q))
    for top, bottom in chunks(p, few):
        some = split[:, :, top:bottom]
        for start, stop in chunks(i, rows):
            half = a[:, start:stop] @ some.flatten(2)  # (G, i, p m' q), of which i and p are some
            shape = (half.shape[1], some.shape[2])
            half = half.reshape(groups, shape[0] * shape[1], -1, q).transpose(0, 1).reshape(-1, b.shape[0], q)
            if v.transposed:
                block = (half.mT @ b).reshape(*shape, q, j).transpose(2, 3)
            else:
                block = (b.T @ half).reshape(*shape, j, q)
            target[start:stop, top:bottom].add_(block)


def add_rows(u: ParameterJacobian, columns: Tensor, width: int, into: Tensor) -> None:
    """Add U^T columns to ``into`` (size_u, c), for ``columns`` (R width, c)."""
    K = columns.unflatten(0, (-1, width))  # (R, p, c)
    if not isinstance(u, WeightJacobian):
        into += u.vjp(K)
        return
    i, c = u.X.shape[1], K.shape[2]
    target = into.unflatten(0, (width, i)) if u.transposed else into.unflatten(0, (i, width)).transpose(0, 1)  # (p, i, c)
    by_output, weights = K.transpose(0, 1), u.X.T
    few = max(1, CACHE // (i * c))
    for top, bottom in chunks(width, few):
        some = by_output[top:bottom]
        target[top:bottom].add_(weights.expand(some.shape[0], -1, -1) @ some)


def add_diagonal_pair(u: ParameterJacobian, v: ParameterJacobian, diagonal: Tensor, into: Tensor) -> None:
    """Add U^T diag(k) V to ``into``, for curvature (R, p) between equal rows and equal columns of two values.

    Of two weights, H[(i, o), (j, o)] = sum_n a_n[i] a'_n[j] k_n[o], and zero between different outputs.
    """
    if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        i, j = u.X.shape[1], v.X.shape[1]
        target = _four_axes(into, u, v).diagonal(dim1=1, dim2=3)  # (i, j, p)
        step = max(1, OUTER // j)
        for start, stop in chunks(i, step):
            outer = (u.X[:, start:stop].unsqueeze(2) * v.X.unsqueeze(1)).flatten(1)
            target[start:stop].add_((outer.T @ diagonal).reshape(-1, j, u.width))
    elif isinstance(u, WeightJacobian) and isinstance(v, GainJacobian):
        sums = u.X.T @ (diagonal if v.is_ones else diagonal * v.X)  # (i, p)
        split = into.unflatten(0, (u.width, -1) if u.transposed else (-1, u.width))
        split.diagonal(dim1=0 if u.transposed else 1, dim2=2).add_(sums)
    elif isinstance(u, GainJacobian) and isinstance(v, WeightJacobian):
        add_diagonal_pair(v, u, diagonal, into.T)
    else:
        add_pair(u, v, torch.diag_embed(diagonal), into, same=False)


def _four_axes(into: Tensor, u: WeightJacobian, v: WeightJacobian) -> Tensor:
    """Return a block as (i, p, j, q): inputs and outputs of both weights, however they are stored."""
    left, right = ((w.width, w.X.shape[1]) if w.transposed else (w.X.shape[1], w.width) for w in (u, v))
    split = into.view(*left, *right)
    split = split.transpose(0, 1) if u.transposed else split
    return split.transpose(2, 3) if v.transposed else split
