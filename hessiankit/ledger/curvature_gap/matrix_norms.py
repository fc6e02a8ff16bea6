"""Matrix norms: App. B.1 (Definition 1, Proposition 2) and B.3."""

from __future__ import annotations

import torch

from derivations.norms import (
    NORMS,
    block_norm_bound,
    block_norm_bound_printed,
    block_norms,
    norm_inequality,
)
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import ones, spectral
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import bounded, small
from hessiankit.ledger.registry import claim


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
