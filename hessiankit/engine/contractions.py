"""Sums over rows: E_t^T K E_r for curvature K between equal rows of two places, added to a block of the matrix."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.engine.jacobians import SCRATCH, GainJacobian, IndexJacobian, ParameterJacobian, WeightJacobian
from hessiankit.engine.kernel_calls import KernelSum, kernel_sum
from hessiankit.primitives.directions import together

CACHE = 2**17
"""Entries of a block that stay in a processor's cache while they are made and added."""
OUTER = 256
"""Columns of an outer product of weights made at once: as many as a product of matrices needs to run at speed."""


def add_between(u: ParameterJacobian, v: ParameterJacobian, K: Tensor, into: Tensor, *, is_symmetric: bool) -> KernelSum | None:
    """Add sum_n u_n^T K_n v_n.

    Args:
        u: Jacobian of the rows of the block.
        v: Jacobian of its columns.
        K: (R, p, q), for some outputs of both, those of ``into``.
        into: The block: each side (outputs), or (inputs, outputs) of a weight.
        is_symmetric: Whether u and v are one and K is symmetric.

    Returns:
        The sum that the compiled kernels have still to add.
    """
    if isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian):
        return add_weights(u.X, v.X, K, into, is_symmetric=is_symmetric)
    by_output = K.transpose(0, 1)  # (p, R, q)
    if isinstance(v, GainJacobian) and not v.is_ones:
        by_output = by_output * v.X
    if isinstance(u, GainJacobian) and not u.is_ones:
        by_output = by_output * u.X.T.unsqueeze(2)
    if isinstance(u, WeightJacobian):
        into += (u.X.T @ by_output).transpose(0, 1)
    else:
        into += v.X.T @ by_output if isinstance(v, WeightJacobian) else by_output.sum(1)
    return None


def add_selected(u: ParameterJacobian, v: ParameterJacobian, K: Tensor, into: Tensor) -> None:
    """Add sum_n u_n^T K_n v_n to ``into`` (size of u, size of v), where one of the two is a selection."""
    if not isinstance(v, IndexJacobian):
        add_selected(v, u, K.mT, into.T)
    elif isinstance(u, IndexJacobian):
        into.index_put_((u.index.unsqueeze(2), v.index.unsqueeze(1)), K, accumulate=True)
    elif isinstance(u, GainJacobian):
        into += v.vjp((K if u.is_ones else K * u.X.unsqueeze(2)).mT).T
    else:
        assert isinstance(u, WeightJacobian)
        step = max(1, together(SCRATCH, K) // (u.size * K.shape[2]))
        for start in range(0, len(K), step):
            rows = slice(start, start + step)
            pairs = torch.einsum("ni,npq->nqip", u.X[rows], K[rows])
            pairs = (pairs.mT if u.transposed else pairs).flatten(2)  # (rows, q, size of u)
            into += replace(v, index=v.index[rows]).vjp(pairs).T


def add_equal_columns(u: ParameterJacobian, v: ParameterJacobian, k: Tensor, into: Tensor) -> None:
    """Add sum_n u_n^T diag(k_n) v_n for k (R, p) to a block as in :func:`add_between`, both sides of the same outputs."""
    p = k.shape[1]
    for w in (u, v):
        if isinstance(w, GainJacobian) and not w.is_ones:
            k = k * w.X
    first = int(isinstance(u, WeightJacobian))
    diagonal = into.diagonal(dim1=first, dim2=into.ndim - 1)  # (inputs of u, inputs of v, p), without those of gains
    if not (isinstance(u, WeightJacobian) and isinstance(v, WeightJacobian)):
        X = next((w.X for w in (u, v) if isinstance(w, WeightJacobian)), None)
        diagonal += k.sum(0) if X is None else X.T @ k
        return
    i, j = u.X.shape[1], v.X.shape[1]
    step = max(1, together(OUTER, k) // j)
    for start in range(0, i, step):
        outer = (u.X[:, start : start + step].unsqueeze(2) * v.X.unsqueeze(1)).flatten(1)
        diagonal[start : start + step].add_((outer.T @ k).reshape(-1, j, p))


def add_weights(X: Tensor, Y: Tensor, K: Tensor, into: Tensor, *, is_symmetric: bool) -> KernelSum | None:
    """Add sum_n x_n[i] K_n[p, q] y_n[j] to ``into`` (i, p, j, q), a few inputs and outputs at a time."""
    by_kernel = kernel_sum(X, Y, K, into, is_symmetric=is_symmetric)
    if by_kernel is not None:
        return by_kernel
    rows, p, q = K.shape
    i, j = X.shape[1], Y.shape[1]
    target = into.permute(0, 2, 1, 3)  # (i, j, p, q)
    x, y, flat = X.T.contiguous(), Y.T.contiguous(), K.reshape(rows, p * q)
    inputs_last = into.stride(2) < into.stride(3)
    if inputs_last:  # of two factors that are both read along their rows, the product is a seventh faster
        flat = flat.T.contiguous().T
    step = max(1, together(OUTER, K) // j)
    for start in range(0, i, step):
        stop = min(i, start + step)
        first = start if is_symmetric else 0  # symmetric: the earlier columns have been seen from the other side
        outer = (x[start:stop].unsqueeze(1) * y[first:]).flatten(0, 1)
        height = max(1, together(CACHE, K) // (outer.shape[0] * q))
        for top in range(0, p, height):
            bottom = min(p, top + height)
            part = flat[:, top * q : bottom * q]
            if inputs_last:
                block = (part.T @ outer.T).reshape(bottom - top, q, stop - start, j - first).permute(2, 3, 0, 1)
            else:
                block = (outer @ part).reshape(stop - start, j - first, bottom - top, q)
            target[start:stop, first:, top:bottom].add_(block)
            if is_symmetric:
                target[stop:, start:stop, top:bottom].add_(block[:, stop - start :].transpose(0, 1))
    return None
