"""The diagonal of a lifted curvature: entry (e, e) of u^T K v for one parameter, without the block.

For a Kronecker lift delta[n, p] = sum_i a_n[i] dW[i, p] only curvature between equal columns counts,

    H[(i, p), (i, p)] = sum_nn' a_n[i] a_n'[i] K[(n, p), (n', p)],

kept as ``D`` (groups, m, m', p) of groups of m rows; where rows stay apart m = 1 and D is the diagonal of K. Two lifts that
reach an entry of the parameter from different columns (tied weights, the mixed term of a weight) need K itself, at those
pairs of columns only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.engine.lifts import SCRATCH, Diagonal, Index, Kronecker, Lift, Whole


def by_column(K: Tensor, width: int) -> Tensor:
    """Return D (G, m, m', width) of curvature K (G, m width, m' width).

    >>> by_column(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 2).tolist()
    [[[[1.0, 4.0]]]]
    """
    return K.unflatten(2, (-1, width)).unflatten(1, (-1, width)).diagonal(dim1=2, dim2=4)


def product_by_column(J: Tensor, X: Tensor, width: int) -> Tensor:
    """Return ``by_column(J @ X, width)`` for J (G, m width, c) and X (G, c, m' width) without the product."""
    if J.shape[1] == X.shape[2] == width:
        return (J * X.mT).sum(2).reshape(-1, 1, 1, width)
    left = J.unflatten(1, (-1, width)).transpose(1, 2)  # (G, width, m, c)
    right = X.unflatten(2, (-1, width)).permute(0, 3, 1, 2)  # (G, width, c, m')
    return (left @ right).permute(0, 2, 3, 1)


def is_by_column(u: Lift, v: Lift) -> bool:
    """Tell whether every entry that two lifts of a parameter share is reached by both from the same column alone."""
    if isinstance(u, Kronecker) and isinstance(v, Kronecker):
        return u.turned == v.turned and u.width == v.width and u.size == v.size and _same(u.at, v.at)
    if isinstance(u, (Diagonal, Whole)) and type(u) is type(v):
        return u is v or (isinstance(u, Diagonal) and _same(u.at, v.at))
    if isinstance(u, Index) and u is v:
        column = torch.arange(u.which.shape[1], device=u.which.device).expand_as(u.which)
        home = column.new_zeros(u.size)
        home[u.which.reshape(-1)] = column.reshape(-1)
        return bool((home[u.which] == column).all())
    return False


def along(u: Lift, v: Lift, D: Tensor) -> Tensor:
    """Return the diagonal (size,) of two lifts for which :func:`is_by_column` holds, from D (G, m, m', p)."""
    groups, m, m_v, p = D.shape
    if isinstance(u, Whole):
        return D[0, 0, 0, u.start : u.start + u.count]
    if isinstance(u, Index):
        which = u.which.reshape(groups, m, p)
        rows = D.sum(2) if m == 1 else (D * (which.unsqueeze(2) == which.unsqueeze(1))).sum(2)
        return D.new_zeros(u.size).index_add_(0, which.reshape(-1), rows.reshape(-1))
    if isinstance(u, Diagonal):
        assert isinstance(v, Diagonal)
        if not v.is_ones:
            D = D * v.weights.reshape(groups, 1, m_v, p)
        D = D.sum(2)
        return (D if u.is_ones else D * u.weights.reshape(groups, m, p)).sum((0, 1))
    assert isinstance(u, Kronecker)
    assert isinstance(v, Kronecker)
    if m == m_v == 1:
        found = (u.weights * v.weights).T @ D.reshape(groups, p)  # (i, p)
    else:
        found = _over_pairs(u, v, D)
    return (found.T if u.turned else found).reshape(-1)


def _over_pairs(u: Kronecker, v: Kronecker, D: Tensor) -> Tensor:
    """Sum over pairs of rows of a group, some columns at a time: (i, p)."""
    groups, m, m_v, _ = D.shape
    a = u.weights.reshape(groups, 1, m, -1)
    b = v.weights.reshape(groups, 1, m_v, -1)
    step = max(1, SCRATCH // (groups * m * a.shape[3]))
    parts = [(((some @ b) * a).sum((0, 2))) for some in D.permute(0, 3, 1, 2).split(step, 1)]
    return torch.cat(parts).T


def across(u: Lift, v: Lift, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions in vec_r of the parameter and what the diagonal of u^T K v adds there, for any two lifts of it.

    Args:
        u: Lift of the rows of the block.
        v: Lift of its columns.
        K: Curvature (G, m, p, m', q) of G groups of m rows of p columns, and m' rows of q columns.
    """
    if isinstance(u, Kronecker) and isinstance(v, Kronecker):
        return _two_weights(u, v, K)
    if isinstance(v, Kronecker):
        return across(v, u, K.permute(0, 3, 4, 1, 2))
    if isinstance(u, Kronecker):
        return _weight_and_entries(u, v, K)
    return _two_entries(u, v, K)


def _two_weights(u: Kronecker, v: Kronecker, K: Tensor) -> tuple[Tensor, Tensor]:
    mine, theirs = _meeting(u, _positions(v, K.device))
    theirs = torch.arange(v.size, device=K.device)[theirs]
    (i, p), (j, q) = _cell(u, mine), _cell(v, theirs)
    groups, m, _, m_v, _ = K.shape
    a, b = (w.weights.reshape(groups, -1, w.weights.shape[1]) for w in (u, v))
    out, step = K.new_empty(mine.numel()), max(1, SCRATCH // (groups * m * m_v))
    for start in range(0, mine.numel(), step):
        cut = slice(start, start + step)
        between = K[:, :, p[cut], :, q[cut]]  # (entries, G, m, m')
        out[cut] = torch.einsum("gme,egmn,gne->e", a[:, :, i[cut]], between, b[:, :, j[cut]])
    return _positions(u, K.device)[mine], out


def _weight_and_entries(u: Kronecker, v: Lift, K: Tensor) -> tuple[Tensor, Tensor]:
    groups, m, p, m_v, q = K.shape
    positions, weights = _entries(v, groups, m_v, q, K.device)
    positions = positions.reshape(groups, m_v * q)
    mine, here = _meeting(u, positions.reshape(-1))
    at = torch.zeros_like(positions).reshape(-1)
    at[here] = mine
    i, o = (x.reshape(groups, 1, -1).expand(-1, m, -1) for x in _cell(u, at))
    a = u.weights.reshape(groups, m, -1).gather(2, i)  # (G, m, m' q)
    between = K.reshape(groups, m, p, m_v * q).gather(2, o.unsqueeze(2)).squeeze(2)
    found = (a * between).sum(1)
    found = found if weights is None else found * weights.reshape(groups, -1)
    return _positions(u, K.device)[mine], found.reshape(-1)[here]


def _two_entries(u: Lift, v: Lift, K: Tensor) -> tuple[Tensor, Tensor]:
    groups, m, p, m_v, q = K.shape
    (x, a), (y, b) = _entries(u, groups, m, p, K.device), _entries(v, groups, m_v, q, K.device)
    same = (x.reshape(groups, -1, 1) == y.reshape(groups, 1, -1)) & (x >= 0).reshape(groups, -1, 1)
    found = K.reshape(groups, m * p, m_v * q) * same
    found = found if b is None else found * b.reshape(groups, 1, -1)
    total = found.sum(2).reshape(x.shape)
    total = total if a is None else total * a
    return x[x >= 0], total[x >= 0]


def _entries(u: Lift, groups: int, m: int, width: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return which entry of the parameter moves each number (groups, m, width), -1 for none, and how much."""
    if isinstance(u, Index):
        assert u.at is not None
        return u.at[u.which].reshape(groups, m, width), None
    if isinstance(u, Diagonal):
        positions = _positions(u, device).expand(groups, m, width)
        return positions, None if u.is_ones else u.weights.reshape(groups, m, width)
    assert isinstance(u, Whole)
    mine = _positions(u, device)
    positions = mine.new_full((width,), -1)
    positions[u.start : u.start + u.count] = mine
    return positions.expand(groups, m, width), None


def _positions(u: Lift, device: torch.device) -> Tensor:
    if u.at is not None:
        return u.at.reshape(-1)
    return torch.arange(u.size, device=device)


def _meeting(u: Kronecker, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs (k, l) with the k-th entry of a weight at the l-th of some positions."""
    mine = _positions(u, positions.device)
    top = 1 + max(int(mine.max()), int(positions.max()))
    order = mine.new_full((top + 1,), -1)  # the last place is for -1, which is nobody's
    order[mine] = torch.arange(mine.numel(), device=mine.device)
    found = order[positions]
    here = (found >= 0).nonzero().squeeze(1)
    return found[here], here


def _cell(u: Kronecker, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return row i and column p of the k-th entries of a weight."""
    rows = u.weights.shape[1]
    return (k % rows, k // rows) if u.turned else (k // u.width, k % u.width)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.reshape(-1), b.reshape(-1)))
