"""Lifts of weights as the sums that the compiled kernels know.

A block of two weights is stored with one index contiguous, which is either the output q or the input j of the later one:

    outputs:    into[(i, j), p, q] += sum_n (a_n[i] b_n[j])  K_n[p, q]
    inputs:     into[(p, q), i, j] += sum_n  K_n[p, q]      (a_n[i] b_n[j])

Where curvature reaches one weight in several ways, all of them are summed before they meet the other weight:

    into[i, (p, y), z] += sum_n a_n[i] sum_t s_tn[p, y] v_tn[p, z],    y, z the indices of the later weight as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hessiankit.compiled.library import kernels
from hessiankit.compiled.sums import SINGLE, Factor, Sum
from hessiankit.engine.lifts import Kronecker

NARROW = 4  # contiguous entries below which a kernel's vectors are mostly empty


def lift_compiled(u: Kronecker, pairs: Sequence[tuple[Kronecker, Tensor]], into: Tensor, *, same: bool) -> float | None:
    """Add the lifts of one weight's curvature with another, reached in one or more ways, by the compiled kernels.

    Args:
        u: Lift of the rows of the block.
        pairs: Lifts v of its columns, all of one parameter, each with its curvature (R, p, q).
        into: The block, or a view of it.
        same: Whether u and v are one lift and K is symmetric.

    Returns:
        How far from symmetric K was, as far as it was looked at; None if there are no kernels for this.
    """
    library = kernels()
    if library is None or not _fit(into, u.weights, *(t for v, K in pairs for t in (v.weights, K))):
        return None
    found = _one(u, *pairs[0], into, same) if len(pairs) == 1 else _several(u, pairs, into)
    return None if found is None else found.add(library)


def rows_compiled(u: Kronecker, K: Tensor, into: Tensor) -> bool:
    """Add the lift of ``K`` (R, p, c) from the left to ``into`` (size_u, c); False if there are no kernels for this.

    into[i, p, c] += sum_n a_n[i] K_n[p, c]
    """
    library = kernels()
    if library is None or not _fit(into, u.weights, K) or into.stride(1) != 1 or K.shape[2] < NARROW:
        return False
    (u_i, u_p), (k_n, k_p, k_c) = _strides(u, into.stride(0)), K.stride()
    a, terms = Factor(u.weights, (*u.weights.stride(), 0)), [(None, Factor(K, (k_n, k_p, 0, k_c)))]
    Sum(into, K.shape[0], (u.weights.shape[1], 1), (K.shape[1], 1, K.shape[2]), (u_i, 0, u_p, 0), a, None, terms).add(library)
    return True


def _fit(into: Tensor, *factors: Tensor) -> bool:
    return into.dtype in SINGLE and all(x.is_cpu and x.dtype == into.dtype for x in (into, *factors))


def _one(u: Kronecker, v: Kronecker, K: Tensor, into: Tensor, same: bool) -> Sum | None:
    if into.stride(1) != 1:
        if into.stride(0) != 1:
            return None
        u, v, K, into = v, u, K.mT, into.T
    i, j = u.weights.shape[1], v.weights.shape[1]
    n, p, q = K.shape
    (u_i, u_p), (v_j, v_q) = (_strides(w, step) for w, step in ((u, into.stride(0)), (v, 1)))
    (a_n, a_i), (b_n, b_j), (k_n, k_p, k_q) = u.weights.stride(), v.weights.stride(), K.stride()
    if (j if v.turned else q) < NARROW:
        return None
    if v.turned:
        outer = (Factor(u.weights, (a_n, a_i, 0)), Factor(v.weights, (b_n, 0, 0, b_j)))
        steps, curvature = (u_p, v_q, u_i, 0), Factor(K, (k_n, k_p, k_q))
        return Sum(into, n, (p, q), (i, 1, j), steps, curvature, None, [outer], symmetric=same, mean=same)
    terms = [(None, Factor(K, (k_n, k_p, 0, k_q)))]
    a, b = Factor(u.weights, (a_n, a_i, 0)), Factor(v.weights, (b_n, 0, b_j))
    return Sum(into, n, (i, j), (p, 1, q), (u_i, v_j, u_p, 0), a, b, terms, symmetric=same)


def _several(u: Kronecker, pairs: Sequence[tuple[Kronecker, Tensor]], into: Tensor) -> Sum | None:
    first = pairs[0][0]
    p, (y, z) = u.width, (first.width, first.weights.shape[1]) if first.turned else (first.weights.shape[1], first.width)
    if into.stride(1) != 1 or z < NARROW:
        return None
    u_i, u_p = _strides(u, into.stride(0))
    terms: list[tuple[Factor | None, Factor]] = []
    for v, K in pairs:
        (b_n, b_j), (k_n, k_p, k_q) = v.weights.stride(), K.stride()
        if v.turned:
            terms.append((Factor(K, (k_n, k_p, k_q)), Factor(v.weights, (b_n, 0, 0, b_j))))
        else:
            terms.append((Factor(v.weights, (b_n, 0, b_j)), Factor(K, (k_n, k_p, 0, k_q))))
    a = Factor(u.weights, (*u.weights.stride(), 0))
    return Sum(into, u.weights.shape[0], (u.weights.shape[1], 1), (p, y, z), (u_i, 0, u_p, z), a, None, terms)


def _strides(w: Kronecker, step: int) -> tuple[int, int]:
    """Return how far apart the inputs and the outputs of a weight are, whose entries are ``step`` apart."""
    return (step, step * w.weights.shape[1]) if w.turned else (step * w.width, step)
