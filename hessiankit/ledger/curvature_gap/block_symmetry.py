"""Symmetry and sizes of the block's second derivatives: Theorem 10 and Step 4 of C.5."""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.matrix import Commutation, Dense
from derivations.transformer import PostNormBlockAt
from derivations.vecr import slice_transpose
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, turn, vec_eye
from hessiankit.ledger.curvature_gap.point import ATTENTION, ATTENTION_PAIRS, PAIRS, BlockPoint, point, points
from hessiankit.ledger.evidence import agrees, off, relative_error
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
    errors = [relative_error(a, b) for a, b in zip(equal, reference, strict=True)]
    rest = [relative_error(turned(p), b) for p, b in zip(points(seed), reference, strict=True)]
    return off(errors, "xi_12 against xi_21, both by autograd", corrected=rest)


@claim("curvature-gap/sym-claim", "Theorem 10; C.5, Step 4", "WRONG AS PRINTED", uses=[slice_transpose])
def sym_claim(seed: int) -> Evidence:
    r"""$H_{tr}^{(i,j)} = H_{tr}^{(j,i)}$ almost everywhere

    Correct: slice by slice, $\mathrm{vec}_r H^{(j,i)} = (I_{Ld_V}\otimes K_{n_j,n_i})\,\mathrm{vec}_r H^{(i,j)}$, by Schwarz
    off the kinks; the blocks have different shapes if $n_i\neq n_j$. Of the loss, $H^{(j,i)} = (H^{(i,j)})^\top$
    """
    p = point(seed)
    unequal = [(i, j) for i, j in PAIRS if i != j]
    errors = [relative_error(p.second("Z", i, j), p.second("Z", j, i)) for i, j in unequal]
    rest = [
        relative_error(dense(slice_transpose(Dense(p.second("Z", i, j), "H"), p.X.numel(), p.n(i), p.n(j))), p.second("Z", j, i))
        for i, j in unequal
    ]
    rest += [relative_error(p.second("loss", i, j).T, p.second("loss", j, i)) for i, j in unequal]
    return off(errors, "the least over all pairs; infinite where the shapes differ", corrected=rest)


@claim("curvature-gap/sym-nonlinear", "C.5, Step 4", "WRONG AS PRINTED", uses=[AttentionAt])
def sym_nonlinear(seed: int) -> Evidence:
    r"""the only nonlinearities with a second differential are LayerNorm and ReLU; all else is multilinear

    Correct: softmax is left out: $\partial^2A/\partial T^2\neq 0$; the symmetry holds by Schwarz
    """
    p = point(seed)
    reference = p.second("F", "Q", "Q")  # F has no LayerNorm and no ReLU
    return off(
        relative_error(torch.zeros_like(reference), reference),
        "Phi_QQ",
        corrected=relative_error(dense(p.at.Phi("Q", "Q")), reference),
    )


@claim("curvature-gap/sym-h_z", "C.5, Step 4", "HOLDS", uses=[PostNormBlockAt])
def sym_h_z(seed: int) -> Evidence:
    """$H_Z$ and $H_Y$ are symmetric in their two input indices

    Correct: slice by slice
    """
    p = point(seed)
    n = p.X.numel()
    matrices = [dense(p.block.H_Z), dense(p.block.H_Y)]
    turned = [H.reshape(n, n, n).transpose(1, 2).reshape(n * n, n) for H in matrices]
    return agrees(turned, matrices)


@claim("curvature-gap/commutation-norm", "C.1 and C.6", "HOLDS", uses=[Commutation])
def commutation_norm(seed: int) -> Evidence:
    r"""$\|K_{m,n}\|_2 = 1$ and $\|\mathrm{vec}_r I_d\|_2 = \sqrt d$"""
    found = [torch.linalg.matrix_norm(turn(3, 4), 2), vec_eye(5).norm()]
    return agrees(found, [torch.tensor(1.0), torch.tensor(5.0).double().sqrt()], "m = 3, n = 4, d = 5")


@claim("curvature-gap/c5-sizes", "Theorem 10; Lemma 2", "HOLDS", uses=[PostNormBlockAt, AttentionAt])
def c5_sizes(seed: int) -> Evidence:
    r"""the declared sizes of $J$, $H$, $D_\sigma$, $B$, $G$, $\xi$, $\Phi$, $H_{tr}$, $Z_1$, $Z_2$"""
    p = point(seed)
    L, d_V, _, d_ff = p.sizes
    n, block, at = L * d_V, p.block, p.at
    cases = [
        (block.J_Z, n, n),
        (block.H_Z, n * n, n),
        (block.J_Y, n, n),
        (block.H_Y, n * n, n),
        (block.D_sigma, L * d_ff, L * d_ff),
        (block.J_SY, n, n),
        (at.Z_1, n, d_V**2),
        (at.Z_2, L * d_V**3, d_V**2),
        *((block.G(k), n, p.n(k)) for k in ATTENTION),
        *((block.B(i), n, p.n(i)) for i in ("1", "2", *ATTENTION)),
        *((block.xi(i, j), n * p.n(i), p.n(j)) for i, j in PAIRS),
        *((block.H_tr(i, j), n * p.n(i), p.n(j)) for i, j in PAIRS),
        *((block.Phi(k, m), n * p.n(k), p.n(m)) for k, m in ATTENTION_PAIRS),
    ]
    wrong = [matrix for matrix, rows, columns in cases if tuple(dense(matrix).shape) != (rows, columns)]
    return agrees(float(len(wrong)), 0.0, f"{len(cases)} sizes; the only wrong one is that of S")
