"""The Hessian of the loss: Eq. 7, and Eq. 6 with every piece as printed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from derivations.loss import MeanSquaredErrorAt
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.autodiff import hessian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.attention_curvature import printed_phi
from hessiankit.ledger.curvature_gap.block_hessian import printed_xi_12, printed_xi_21
from hessiankit.ledger.curvature_gap.block_jacobians import lifted, printed_G_K
from hessiankit.ledger.curvature_gap.notation import dense, eye, if_it_conforms, kron, turn, vec_eye
from hessiankit.ledger.curvature_gap.point import ATTENTION, PAIRS, BlockPoint, point, points
from hessiankit.ledger.evidence import relative_error, wrong
from hessiankit.ledger.registry import claim

RIGHT = (("1", "1"), ("2", "2"), ("2", "Q"), ("2", "V"), ("V", "V"))
"""Blocks whose printed formulas are right."""

WITHOUT = tuple(
    (i, j)
    for i, j in PAIRS
    if i in ATTENTION and (j in ("1", "2") or (i, j) in {("K", "K"), ("K", "Q"), ("K", "V"), ("Q", "V"), ("V", "K")})
)
"""Blocks without a printed formula, or with a description only."""


def printed_G(p: BlockPoint, k: str) -> Tensor:
    """Return G_k as printed."""
    return printed_G_K(p) if k == "K" else dense(p.at.jacobian(f"W_{k}"))


def printed_B(p: BlockPoint, i: str) -> Tensor:
    """Return B_i as printed in Theorem 10."""
    return dense(p.block.J_SY @ p.block.J_Y) @ printed_G(p, i) if i in ATTENTION else dense(p.block.B(i))


def printed_xi(p: BlockPoint, i: str, j: str) -> Tensor:
    """Return xi_ij as printed in Theorem 10 and Lemma 2, with exact Jacobians and Hessians of the norms."""
    L, d_V, _, d_ff = p.sizes
    if (i, j) in (("1", "1"), ("2", "2")):
        return torch.zeros(p.X.numel() * p.n(i), p.n(j), dtype=p.X.dtype)
    if (i, j) in (("1", "2"), ("2", "1")):
        return printed_xi_12(p) if i == "1" else printed_xi_21(p)
    D, dY = dense(p.block.D_sigma), dense(p.block.J_Y) @ printed_G(p, j)
    if i == "1":
        inner = kron(eye(L), turn(d_ff, d_V), eye(d_ff)) @ kron(eye(L * d_V), vec_eye(d_ff))
        return kron(lifted(p, "2") @ D, eye(p.n(j))) @ inner @ dY
    if i == "2":
        return kron(eye(L), turn(d_V, d_ff), eye(d_V)) @ kron(eye(L * d_ff), vec_eye(d_V)) @ D @ lifted(p, "1") @ dY
    bent = kron(eye(p.X.numel()), printed_G(p, i).T) @ dense(p.block.H_Y) @ printed_G(p, j)
    phi = printed_phi(p, i, j)
    return kron(dense(p.block.J_SY), eye(p.n(i))) @ (bent + kron(dense(p.block.J_Y), eye(p.n(i))) @ phi)


def printed_H_tr(p: BlockPoint, i: str, j: str) -> Tensor:
    """Return Eq. 6 with xi_ij and B_i as printed."""
    front = kron(dense(p.block.J_Z), eye(p.n(i))) @ printed_xi(p, i, j)
    return front + kron(eye(p.X.numel()), printed_B(p, i).T) @ dense(p.block.H_Z) @ printed_B(p, j)


def errors_of_print(p: BlockPoint) -> dict[tuple[str, str], float]:
    """Return the error of each block that has a printed formula."""
    pairs = [pair for pair in PAIRS if pair not in WITHOUT]
    return {(i, j): relative_error(if_it_conforms(printed_H_tr, p, i, j), p.second("Z", i, j)) for i, j in pairs}


@claim("curvature-gap/eq6-printed", "Theorems 5 and 10, Lemma 2", "WRONG AS PRINTED", uses=[PostNormBlockAt.H_tr])
def eq6_printed(seed: int) -> Evidence:
    r"""Eq. 6 with $\xi_{ij}$, $G_k$, $\Phi_{k\ell}$ as printed gives the blocks $H_{tr}^{(i,j)}$

    Correct: right: (1,1), (2,2), (2,Q), (2,V), (V,V); 9 blocks are wrong, 11 have no formula. Corrected $\xi$, $G_K$, $\Phi$
    give all 25
    """
    p = point(seed)
    errors = errors_of_print(p)
    bad = [pair for pair in errors if pair not in RIGHT]
    apart = sum(errors[pair] == math.inf for pair in bad)
    right = [relative_error(dense(p.block.H_tr(i, j)), p.second("Z", i, j)) for i, j in PAIRS]
    right += [errors[pair] for pair in RIGHT]
    detail = f"{len(bad)} blocks, {apart} of them do not conform; {len(WITHOUT)} have no formula; the rest to {max(right):.1g}"
    references = [p.second("Z", i, j) for i, j in (*bad, *(RIGHT if max(right) > 1e-10 else ()))]
    printed = [if_it_conforms(printed_H_tr, p, i, j) for i, j in bad]
    return wrong(printed, references, detail, corrected=[dense(p.block.H_tr(i, j)) for i, j in bad])


def loss_blocks(p: BlockPoint, c: float) -> Iterator[Tensor]:
    """Yield 2/(L d_V) J_i^T J_j + c (vec_r(Z - Target)^T (x) I) H_tr for all pairs, pieces by autograd."""
    row = (p.block.Z - p.target).reshape(1, -1)
    for i, j in PAIRS:
        outer = 2 / p.X.numel() * p.first("Z", i).T @ p.first("Z", j)
        yield outer + c * kron(row, eye(p.n(i))) @ p.second("Z", i, j)


@claim("curvature-gap/eq7", "Sec. 4.2, Eq. 7", "WRONG AS PRINTED", uses=[PostNormBlockAt.loss_hessian])
def eq7(seed: int) -> Evidence:
    r"""$\frac{\partial^2\mathcal{L}(Z)}{\partial W_i\partial W_j} = J_i^\top\frac{2}{Ld_V}J_j + R^{tr}H_{tr}^{(i,j)}$ with
    $R^{tr}_m = \mathrm{vec}_r(Z - \mathrm{Target})^\top\otimes I_m$

    Correct: $\frac{2}{Ld_V}[J_i^\top J_j + (\mathrm{vec}_r(Z - \mathrm{Target})^\top\otimes I_{n_i})H_{tr}^{(i,j)}]$
    """
    printed = [block for p in points(seed) for block in loss_blocks(p, 1.0)]
    reference = [p.second("loss", i, j) for p in points(seed) for i, j in PAIRS]
    closed = [dense(p.block.loss_hessian(p.target, i, j).total) for p in points(seed) for i, j in PAIRS]
    return wrong(printed, reference, "the least of 25 blocks; corrected: no piece by autograd", corrected=closed)


@claim("curvature-gap/eq7-l", "Sec. 4.2, below Eq. 7", "WRONG AS PRINTED", uses=[MeanSquaredErrorAt])
def eq7_l(seed: int) -> Evidence:
    r"""$\mathcal{L}(\cdot) = \|\cdot - \mathrm{Target}\|_2^2$ has second derivative $\frac{2}{Ld_V}$

    Correct: $\frac{2}{Ld_V}I$ belongs to $\frac{1}{Ld_V}\|\cdot - \mathrm{Target}\|_F^2$; this loss has $2I$
    """
    p = point(seed)
    n = p.X.numel()
    reference = hessian_of(lambda Z: (Z - p.target).square().sum(), p.block.Z)
    closed = dense(MeanSquaredErrorAt(p.block.Z, p.target).hessian("Z", "Z"))  # of the mean
    return wrong(2 / n * eye(n), reference, "against autograd", corrected=n * closed)
