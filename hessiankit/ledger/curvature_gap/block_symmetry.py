"""Symmetry and sizes of the block's second derivatives: Theorem 10 and Step 4 of C.5."""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.matrix import Dense
from derivations.vecr import slice_transpose
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense
from hessiankit.ledger.curvature_gap.point import PAIRS, BlockPoint, point, points
from hessiankit.ledger.evidence import relative_error, wrong
from hessiankit.ledger.registry import claim


@claim("curvature-gap/sym-agree", "Theorem 10, below the two formulas", "WRONG AS PRINTED", uses=[slice_transpose])
def sym_agree(seed: int) -> Evidence:
    r"""$\xi_{12}$ and $\xi_{21}$ agree almost everywhere when inserted into Eq. 6

    Correct: $\mathrm{vec}_r\,\xi_{ji} = (I_{Ld_V}\otimes K_{n_j,n_i})\,\mathrm{vec}_r\,\xi_{ij}$
    """

    def turned(p: BlockPoint) -> Tensor:
        return dense(slice_transpose(Dense(p.second("S", "1", "2"), "xi"), p.X.numel(), p.n("1"), p.n("2")))

    reference = [p.second("S", "2", "1") for p in points(seed)]
    equal = [p.second("S", "1", "2") for p in points(seed)]
    return wrong(equal, reference, "xi_12 against xi_21, both by autograd", corrected=[turned(p) for p in points(seed)])


@claim("curvature-gap/sym-claim", "Theorem 10; C.5, Step 4", "WRONG AS PRINTED", uses=[slice_transpose])
def sym_claim(seed: int) -> Evidence:
    r"""$H_{tr}^{(i,j)} = H_{tr}^{(j,i)}$ almost everywhere

    Correct: slice by slice, $\mathrm{vec}_r H^{(j,i)} = (I_{Ld_V}\otimes K_{n_j,n_i})\,\mathrm{vec}_r H^{(i,j)}$, by Schwarz
    off the kinks; the blocks have different shapes if $n_i\neq n_j$. Of the loss, $H^{(j,i)} = (H^{(i,j)})^\top$
    """
    p = point(seed)
    unequal = [(i, j) for i, j in PAIRS if i != j]
    printed, reference = ([p.second("Z", *pair) for pair in pairs] for pairs in (unequal, [(j, i) for i, j in unequal]))
    turned = [
        dense(slice_transpose(Dense(H, "H"), p.X.numel(), p.n(i), p.n(j))) for H, (i, j) in zip(printed, unequal, strict=True)
    ]
    of_loss = max(relative_error(p.second("loss", i, j).T, p.second("loss", j, i)) for i, j in unequal)
    detail = f"the least over all pairs; infinite where the shapes differ; blocks of the loss transposed to {of_loss:.1g}"
    return wrong(printed, reference, detail, corrected=turned)


@claim("curvature-gap/sym-nonlinear", "C.5, Step 4", "WRONG AS PRINTED", uses=[AttentionAt])
def sym_nonlinear(seed: int) -> Evidence:
    r"""the only nonlinearities with a second differential are LayerNorm and ReLU; all else is multilinear

    Correct: softmax is left out: $\partial^2A/\partial T^2\neq 0$; the symmetry holds by Schwarz
    """
    p = point(seed)
    reference = p.second("F", "Q", "Q")  # F has no LayerNorm and no ReLU
    return wrong(torch.zeros_like(reference), reference, "Phi_QQ", corrected=dense(p.at.Phi("Q", "Q")))
