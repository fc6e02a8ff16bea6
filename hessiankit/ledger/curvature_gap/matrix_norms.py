"""Matrix norms: App. B.1 (Definition 1, Proposition 2) and B.3."""

from __future__ import annotations

import math

import torch

from derivations.matrix import Dense
from derivations.norms import (
    NORMS,
    block_diagonal_norm,
    block_norm_bound,
    block_norm_bound_printed,
    block_norms,
    kronecker_norm,
    matrix_norm,
    norm_inequality,
    ones_norm,
    product_norm_bound,
    sum_norm_bound,
    transpose_norm,
)
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import kron, ones, spectral
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, bounded, small
from hessiankit.ledger.registry import claim


@claim("curvature-gap/def1", "App. B.1, Definition 1", "HOLDS", uses=[matrix_norm])
def def1(seed: int) -> Evidence:
    r"""$\|A\|_2 = \sigma_1$, $\|A\|_F = \sqrt{\sum a_{ij}^2} = \sqrt{\sum\sigma_i^2}$, $\|A\|_1$ largest column sum,
    $\|A\|_\infty$ largest row sum, $\|A\|_{\max}$ largest entry"""
    A = Draw(seed).normal(3, 4)
    sigma = torch.linalg.eigvalsh(A @ A.T).clamp(min=0).sqrt()
    rows = [[abs(float(a)) for a in row] for row in A]
    told = {
        "2": float(sigma.max()),
        "F": math.sqrt(float((sigma**2).sum())),
        "1": max(map(sum, zip(*rows, strict=True))),
        "inf": max(map(sum, rows)),
        "max": max(map(max, rows)),
    }
    return agrees([matrix_norm(A, kind) for kind in told], list(told.values()), "singular values by eigenvalues of A A^T")


@claim("curvature-gap/proposition2", "App. B.1, Proposition 2", "HOLDS", uses=[ones_norm])
def proposition2(seed: int) -> Evidence:
    r"""$\|1_{L\times L}\|_2 = L$"""
    sizes = (1, 2, 5)
    return agrees([ones_norm(L) for L in sizes], [spectral(ones(L, L)) for L in sizes], "L = 1, 2, 5, by singular values")


@claim("curvature-gap/property7", "App. B.3, Property 7", "HOLDS", uses=[norm_inequality])
def property7(seed: int) -> Evidence:
    r"""$\|A\|_X\le c_{XY}\|A\|_Y$ with the 20 constants of the table (the diagonal is left out)"""
    draw = Draw(seed)
    m, n = 3, 4
    single = torch.zeros(m, n, dtype=torch.float64)
    single[0, 0] = 1
    column, row = ones(m, n) * single[:1], ones(m, n) * single[:, :1]
    attaining = [single, ones(m, n), column, row, torch.eye(m, n, dtype=torch.float64)]
    matrices = [*(draw.normal(m, n) for _ in range(20)), *attaining]
    cells = [(x, y) for x in NORMS for y in NORMS if x != y]
    largest = {cell: max(norm_inequality(A, *cell).ratio for A in matrices) for cell in cells}
    errors = [abs(ratio - 1) for ratio in largest.values()]
    return small(errors, f"the largest of 25 ratios, from 1, in each of {len(cells)} cells: every constant is attained")


@claim("curvature-gap/property8", "App. B.3, Property 8, Eq. 11", "HOLDS", uses=[sum_norm_bound])
def property8(seed: int) -> Evidence:
    r"""$\|A + B\|_2\le\|A\|_2 + \|B\|_2$"""
    draw = Draw(seed)
    pairs = [(draw.normal(3, 4), draw.normal(3, 4)) for _ in range(30)]
    pairs.append((pairs[0][0], 2 * pairs[0][0]))
    ratios = [spectral(A + B) / sum_norm_bound(Dense(A), Dense(B)) for A, B in pairs]
    return bounded(ratios, "30 pairs, attained by B = 2 A", attained=1 - 1e-12)


@claim("curvature-gap/property9", "App. B.3, Property 9", "HOLDS", uses=[kronecker_norm])
def property9(seed: int) -> Evidence:
    r"""$\|A\otimes B\|_2 = \|A\|_2\|B\|_2$"""
    draw = Draw(seed)
    A, B = draw.normal(3, 4), draw.normal(2, 5)
    return agrees(kronecker_norm(Dense(A), Dense(B)), spectral(kron(A, B)))


@claim("curvature-gap/property10", "App. B.3, Property 10", "HOLDS", uses=[product_norm_bound])
def property10(seed: int) -> Evidence:
    r"""$\|AB\|_2\le\|A\|_2\|B\|_2$"""
    draw = Draw(seed)
    pairs = [(draw.normal(3, 4), draw.normal(4, 5)) for _ in range(30)]
    pairs.append((pairs[0][0], pairs[0][0].T))
    ratios = [spectral(A @ B) / product_norm_bound(Dense(A), Dense(B)) for A, B in pairs]
    return bounded(ratios, "30 pairs, attained by B = A^T", attained=1 - 1e-12)


@claim("curvature-gap/property11", "App. B.3, Property 11", "HOLDS", uses=[block_norm_bound_printed, block_norm_bound])
def property11(seed: int) -> Evidence:
    r"""$\|A\|_2\le\sqrt{mn}\,\max_{ij}\|B_{ij}\|_2$ for a matrix of blocks $B_{ij}$

    Correct: $m, n$ are the numbers of blocks; the print says that they are the sizes of $A$, which is weaker. The last step
    of C.1 cites Property 7 and needs this one
    """
    draw = Draw(seed)
    rows, columns = [1, 2, 3], [2, 3]
    ratios = []
    for k in range(31):
        A = draw.normal(6, 5)
        if k == 30:  # equal blocks attain it
            A, rows, columns = ones(6, 4), [2, 2, 2], [2, 2]
        norms = block_norms(A, rows, columns)
        sharper = block_norm_bound(norms)
        ratios += [
            spectral(A) / block_norm_bound_printed(norms),
            sharper / block_norm_bound_printed(norms),
            spectral(A) / sharper,
        ]
    return bounded(ratios, "30 matrices of 3 x 2 unequal blocks, attained by equal blocks", attained=1 - 1e-12)


@claim("curvature-gap/property11b", "App. B.3, Property 11, note", "HOLDS", uses=[block_diagonal_norm])
def property11b(seed: int) -> Evidence:
    r"""$\|A\|_2 = \max_i\|B_{ii}\|_2$ for a block-diagonal matrix"""
    draw = Draw(seed)
    blocks = [draw.normal(2, 3), draw.normal(3, 2), draw.normal(1, 1)]
    return agrees(block_diagonal_norm([spectral(B) for B in blocks]), spectral(torch.block_diag(*blocks)), "unequal blocks")


@claim("curvature-gap/property12", "App. B.3, Property 12", "HOLDS", uses=[transpose_norm])
def property12(seed: int) -> Evidence:
    r"""$\|A\|_2 = \|A^\top\|_2$"""
    A = Draw(seed).normal(3, 4)
    return agrees([transpose_norm(Dense(A)), spectral(A)], [spectral(A), spectral(A.T)])
