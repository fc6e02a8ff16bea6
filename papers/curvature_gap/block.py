"""The block's derivatives: Lemmas 1 and 3, Theorems 4, 5, 9 and 10, Eqs. 6 and 7, Step 4 of C.5."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Dense
from derivations.softmax import SoftmaxAt
from derivations.transformer import PostNormBlockAt
from derivations.vecr import slice_transpose
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.curvature_gap.attention import printed_phi
from papers.curvature_gap.point import (
    ATTENTION,
    ATTENTION_PAIRS,
    PAIRS,
    WEIGHTS,
    BlockPoint,
    BlockSizes,
    misprint,
    point,
    points,
)
from papers.drawing import Draw
from papers.evidence import agrees, assumed, relative_error, wrong
from papers.notation import dense, eye, if_it_conforms, kron, ones, turn, vec_eye
from papers.registry import claim, claims_of


@claim("thm4", "Theorem 4", "HOLDS", uses=[PostNormBlockAt.jacobian])
def thm4(seed: int) -> Evidence:
    r"""$\partial Z/\partial W_i = J_Z B_i$ for $i\in\{1,2\}$, $J_Z J_{SY}G_i$ with $G_i = \partial Y/\partial W_i$ for
    $i\in\{K,Q,V\}$"""

    def printed(p: BlockPoint, i: str) -> Tensor:
        J_Z = dense(p.block.J_Z)
        return J_Z @ (dense(p.block.J_SY) @ p.first("Y", i) if i in ATTENTION else p.first("S", i))

    names = [(p, i) for p in points(seed) for i in WEIGHTS]
    found = [build(p, i) for build in (printed, lambda p, i: dense(p.block.jacobian(i))) for p, i in names]
    return agrees(found, [p.first("Z", i) for p, i in names] * 2, "the print and the closed form, against autograd")


def tokens_indicator(p: BlockPoint) -> Tensor:
    """Return diag(vec_r 1{X > 0}) as Theorem 9 prints it."""
    return torch.diag((p.X > 0).to(p.X.dtype).reshape(-1))


def lifted(p: BlockPoint, i: str) -> Tensor:
    """Return I_L (x) W_i^T."""
    return kron(eye(p.sizes.L), p.weights[i].T)


def of_S_in_Y(p: BlockPoint) -> Tensor:
    """Return dS/dY by autograd."""
    W = p.weights
    return jacobian_of(lambda Y: torch.relu(Y @ W["1"]) @ W["2"] + Y, p.block.Y)


@claim("thm9-b1", "Theorem 9, four times", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_b1(seed: int) -> Evidence:
    r"""$\partial S/\partial W_1 = (I_L\otimes W_2^\top)\,\mathrm{diag}(\mathrm{vec}_r 1_{X>0})\,(Y\otimes I_{d_{ff}})$
    Correct: $1_{YW_1>0}$ in place of $1_{X>0}$, as Theorem 10 has
    Severity: slip of print"""

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ tokens_indicator(p) @ kron(p.block.Y, eye(p.sizes.d_ff))

    return misprint(seed, printed, lambda p: dense(p.block.B("1")), lambda p: p.first("S", "1"))


@claim("thm9-b1line", "Theorem 9, proof, i = 1", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_b1line(seed: int) -> Evidence:
    r"""$\partial S/\partial W_1 = (I_L\otimes W_2^\top)\frac{\partial\sigma(YW_1)}{\partial YW_1}(I_L\otimes W_1^\top)$
    Correct: the last factor is $\partial(YW_1)/\partial W_1 = Y\otimes I_{d_{ff}}$; the printed one is
    $\partial(YW_1)/\partial Y$
    Severity: slip of print"""

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ dense(p.block.D_sigma) @ lifted(p, "1")

    return misprint(seed, printed, lambda p: dense(p.block.B("1")), lambda p: p.first("S", "1"))


@claim("thm9-jsy", "Theorem 9", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_jsy(seed: int) -> Evidence:
    r"""$\partial S/\partial Y = (I_L\otimes W_2^\top)\,\mathrm{diag}(\mathrm{vec}_r 1_{X>0})\,(I_L\otimes W_1^\top) + I$
    Correct: $1_{YW_1>0}$ in place of $1_{X>0}$
    Severity: slip of print
    Follows: thm9-b1"""

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ tokens_indicator(p) @ lifted(p, "1") + eye(p.X.numel())

    return misprint(seed, printed, lambda p: dense(p.block.J_SY), of_S_in_Y)


def printed_G_K(p: BlockPoint) -> Tensor:
    """Return dF/dW_K with K_{d_V,d_K} as printed."""
    L, d_V, d_K, _ = p.sizes
    front = kron(eye(L), (p.X @ p.weights["V"]).T) @ dense(p.at.dA)
    return front @ kron(p.X @ p.weights["Q"], p.X) @ turn(d_V, d_K) / math.sqrt(d_K)


@claim("g_k", "C.4", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt])
def g_k(seed: int) -> Evidence:
    r"""$\partial F/\partial W_K = (I_L\otimes W_V^\top X^\top)\,\frac{\partial A}{\partial M}\,(XW_Q\otimes X)K_{d_V
    d_K}/\sqrt{d_K}$
    Needs: $d_K = d_V$
    Correct: $K_{d_K,d_V}$, as Lemma 2 and C.1 have"""
    generic, equal = points(seed)
    references = [equal.first("F", "K"), generic.first("F", "K")]
    holds = agrees([printed_G_K(equal), dense(generic.at.G_K)], references, "d_K = d_V = 3; corrected at generic sizes")
    return assumed(holds, relative_error(printed_G_K(generic), references[1]), above=0.1)


@claim("da-dm-unif", "C.4 and C.1", "HOLDS UNDER ASSUMPTION", uses=[SoftmaxAt])
def da_dm_unif(seed: int) -> Evidence:
    r"""$\partial A/\partial M = \frac1n I_L\otimes(I_L - \frac1L 1_{L\times L})$ under uniform attention
    Needs: $n = L$ ($n$ is not defined), and attention is uniform, which C.1 does not repeat
    Correct: $\mathrm{blockdiag}(\mathrm{diag}(A_i) - A_iA_i^\top)$"""
    L = 3
    printed = kron(eye(L), eye(L) - ones(L, L) / L) / L
    generic, uniform = point(seed), point(seed, uniform=True)
    references = [jacobian_of(lambda T: T.softmax(1), p.at.T) for p in (uniform, generic)]
    holds = agrees([printed, dense(generic.at.dA)], references, "uniform attention; the general form elsewhere")
    return assumed(holds, relative_error(printed, references[1]), above=0.1)


# The definitions of Theorem 10
@claim("g-clash", "Theorem 10, 'from Theorem 4'", "WRONG AS PRINTED", uses=[PostNormBlockAt.G])
def g_clash(seed: int) -> Evidence:
    r"""$B_k = J_{SY}J_Y G_k$ with the $G_k = \partial Y/\partial W_k$ of Theorem 4
    Correct: $G_k = \partial F/\partial W_k$, as Theorem 10 defines it; $J_Y$ would enter twice
    Severity: slip of print"""
    return misprint(
        seed,
        lambda p: dense(p.block.J_SY @ p.block.J_Y) @ p.first("Y", "V"),
        lambda p: dense(p.block.J_SY @ p.block.J_Y @ p.block.G("V")),
        lambda p: p.first("S", "V"),
        "for W_V",
    )


# Second derivatives of the block: Theorems 5 and 10
def blocks(seed: int, pairs: Sequence[tuple[str, str]], detail: str = "against autograd") -> Evidence:
    """Compare xi_ij, corrected and completed, with autograd for given pairs, at generic and at equal sizes."""
    found = [dense(p.block.xi(i, j)) for p in points(seed) for i, j in pairs]
    return agrees(found, [p.second("S", i, j) for p in points(seed) for i, j in pairs], detail)


@claim("eq6", "Theorem 5, Eq. 6; Theorem 10, Eq. 12", "HOLDS", uses=[PostNormBlockAt.H_tr])
def eq6(seed: int) -> Evidence:
    r"""$H_{tr}^{(i,j)} = (J_Z\otimes I_{n_i})\xi_{ij} + (I_{Ld_V}\otimes B_i^\top)H_Z B_j$, pieces exact"""
    p = point(seed)
    J_Z, H_Z = dense(p.block.J_Z), dense(p.block.H_Z)
    found = []
    for i, j in PAIRS:
        functional = kron(J_Z, eye(p.n(i))) @ p.second("S", i, j)
        found.append(functional + kron(eye(len(J_Z)), p.first("S", i).T) @ H_Z @ p.first("S", j))
    return agrees(
        found, [p.second("Z", i, j) for i, j in PAIRS], "all 25 blocks, xi and B by autograd, J_Z and H_Z in closed form"
    )


@claim("eq6-closed", "Theorem 5, Eq. 6", "OMITTED", uses=[PostNormBlockAt.H_tr])
def eq6_closed(seed: int) -> Evidence:
    r"""all 25 blocks $H_{tr}^{(i,j)}$ in closed form, with the corrected and the missing $\xi_{ij}$, $G_K$, $\Phi_{k\ell}$
    Correct: of the 25 blocks, 5 are right in print, 9 wrong at generic sizes, 11 without a formula"""
    found = [dense(p.block.H_tr(i, j)) for p in points(seed) for i, j in PAIRS]
    return agrees(found, [p.second("Z", i, j) for p in points(seed) for i, j in PAIRS], "no piece by autograd, against autograd")


# Pairs of feed-forward weights
def printed_xi_12(p: BlockPoint) -> Tensor:
    """Return the matrix printed as xi_12."""
    L, d_V, _, d_ff = p.sizes
    inner = dense(p.block.D_sigma) @ kron(p.block.Y, eye(d_ff))
    return kron(eye(L), turn(d_V, d_ff), eye(d_V)) @ kron(eye(L * d_ff), vec_eye(d_V)) @ inner


def printed_xi_21(p: BlockPoint) -> Tensor:
    """Return the product printed as xi_21; it does not conform at any size."""
    L, d_V, _, d_ff = p.sizes
    front = lifted(p, "2") @ dense(p.block.D_sigma)
    return front @ kron(eye(L), turn(d_ff, d_V), eye(d_ff)) @ kron(eye(L * d_V), vec_eye(d_ff))


claims_of(
    __name__, misprint, "WRONG AS PRINTED", [FeedForwardAt.hessian],
    ("xi_12", "Theorem 10", printed_xi_12, lambda p: dense(p.block.xi("1", "2")), lambda p: p.second("S", "1", "2"), r"""
     $\xi_{12} = (I_L\otimes K_{d_V,d_{ff}}\otimes I_{d_V})(I_{Ld_{ff}}\otimes\mathrm{vec}_r I_{d_V})\,D_\sigma(Y\otimes
     I_{d_{ff}})$
     Correct: $(I_{Ld_V}\otimes[(Y\otimes I_{d_{ff}})^\top D_\sigma])(I_L\otimes K_{d_V,L}\otimes I_{d_{ff}})(\mathrm{vec}_r
     I_L\otimes I_{d_Vd_{ff}})K_{d_V,d_{ff}}$; the printed matrix is $\xi_{21} = \partial B_2/\partial W_1$
     Severity: slip of print"""),
    ("xi_21", "Theorem 10", printed_xi_21, lambda p: dense(p.block.xi("2", "1")), lambda p: p.second("S", "2", "1"), r"""
     $\xi_{21} = (I_L\otimes W_2^\top)D_\sigma(I_L\otimes K_{d_{ff},d_V}\otimes I_{d_{ff}})(I_{Ld_V}\otimes\mathrm{vec}_r
     I_{d_{ff}})$
     Correct: what is printed as $\xi_{12}$; the product has inner sizes $Ld_{ff}$ and $Ld_Vd_{ff}^2$ and is no derivative
     Severity: false"""),
)  # fmt: skip


def lift_of_W_2(p: BlockPoint) -> Tensor:
    """Return d(I_L (x) W_2^T)/dW_2 by autograd."""
    return jacobian_of(lambda W: kron(eye(p.sizes.L), W.T), p.weights["2"])


@claim("xi_21-step2", "Theorem 10, proof", "HOLDS UNDER ASSUMPTION", uses=[FeedForwardAt.hessian])
def xi_21_step2(seed: int) -> Evidence:
    r"""$\frac{\partial(I_L\otimes W_2^\top)}{\partial W_2} = (I_L\otimes K_{d_V,L}\otimes I_{d_{ff}})(\mathrm{vec}_r
    I_L\otimes I_{d_Vd_{ff}})K_{d_{ff},d_V}$
    Needs: $d_{ff} = d_V$
    Correct: $K_{d_V,d_{ff}}$, since $W_2$ has shape $d_{ff}\times d_V$"""

    def product(p: BlockPoint, last: Tensor) -> Tensor:
        L, d_V, _, d_ff = p.sizes
        return kron(eye(L), turn(d_V, L), eye(d_ff)) @ kron(vec_eye(L), eye(d_V * d_ff)) @ last

    generic, equal = points(seed)
    d_V, d_ff = generic.sizes.d_V, generic.sizes.d_ff
    found = [product(equal, turn(3, 3)), product(generic, turn(d_V, d_ff))]
    holds = agrees(found, [lift_of_W_2(equal), lift_of_W_2(generic)], "d_ff = d_V = 3; corrected at generic sizes")
    return assumed(holds, relative_error(product(generic, turn(d_ff, d_V)), lift_of_W_2(generic)), above=0.5)


# Pairs of a feed-forward and an attention weight
def printed_xi_1k(p: BlockPoint, k: str) -> Tensor:
    """Return xi_1k with I_{n_k} as printed, J_Y and G_k exact."""
    L, d_V, _, d_ff = p.sizes
    front = kron(lifted(p, "2") @ dense(p.block.D_sigma), eye(p.n(k)))
    inner = kron(eye(L), turn(d_ff, d_V), eye(d_ff)) @ kron(eye(L * d_V), vec_eye(d_ff))
    return front @ inner @ p.first("Y", k)


@claim("xi_1k", "Theorem 10", "HOLDS UNDER ASSUMPTION", uses=[PostNormBlockAt.xi])
def xi_1k(seed: int) -> Evidence:
    r"""$\xi_{1k} = ((I_L\otimes W_2^\top)D_\sigma\otimes I_{n_k})(I_L\otimes K_{d_{ff},d_V}\otimes
    I_{d_{ff}})(I_{Ld_V}\otimes\mathrm{vec}_r I_{d_{ff}})\,J_YG_k$
    Needs: $n_k = n_1$: $d_{ff} = d_K$ for $Q$ and $K$, $d_{ff} = d_V$ for $V$
    Correct: $I_{n_1}$ in place of $I_{n_k}$"""
    generic, narrow, equal = point(seed), point(seed, BlockSizes(3, 4, 2, 2)), point(seed, BlockSizes(3, 3, 3, 3))
    cases = [(narrow, "K"), (narrow, "Q"), (equal, "V")]
    found = [printed_xi_1k(p, k) for p, k in cases] + [dense(generic.block.xi("1", k)) for k in ATTENTION]
    references = [p.second("S", "1", k) for p, k in (*cases, *((generic, k) for k in ATTENTION))]
    fails = [relative_error(if_it_conforms(printed_xi_1k, generic, k), generic.second("S", "1", k)) for k in ATTENTION]
    return assumed(agrees(found, references, "n_k = n_1; corrected at generic sizes"), fails, above=1.0)


claims_of(
    __name__, blocks, "OMITTED", [PostNormBlockAt.xi],
    ("xi_k1", "Theorem 10, 'for all pairs'", [(k, "1") for k in ATTENTION], "k = K, Q, V, against autograd", r"""
     $\xi_{k1} = (I_{Ld_V}\otimes(J_YG_k)^\top)((I_L\otimes W_2^\top)D_\sigma\otimes I_{Ld_V})(I_L\otimes
     K_{d_{ff},L}\otimes I_{d_V})(\mathrm{vec}_r I_L\otimes I_{d_Vd_{ff}})K_{d_{ff},d_V}$"""),
    ("xi_k2", "Theorem 10, 'for all pairs'", [(k, "2") for k in ATTENTION], "k = K, Q, V, against autograd", r"""
     $\xi_{k2} = (I_{Ld_V}\otimes(J_YG_k)^\top(I_L\otimes W_1)D_\sigma)(I_L\otimes K_{d_V,L}\otimes
     I_{d_{ff}})(\mathrm{vec}_r I_L\otimes I_{d_Vd_{ff}})K_{d_V,d_{ff}}$"""),
)  # fmt: skip


claims_of(
    __name__, blocks, "HOLDS", [PostNormBlockAt.xi],
    ("xi_2k", "Theorem 10", [("2", k) for k in ATTENTION], "k = K, Q, V, against autograd", r"""
     $\xi_{2k} = (I_L\otimes K_{d_V,d_{ff}}\otimes I_{d_V})(I_{Ld_{ff}}\otimes\mathrm{vec}_r I_{d_V})\,D_\sigma(I_L\otimes
     W_1^\top)J_YG_k$"""),
    ("xi_kl", "Theorem 10", ATTENTION_PAIRS, "nine pairs, against autograd", r"""
     $\xi_{k\ell} = (J_{SY}\otimes I_{n_k})[(I_{Ld_V}\otimes G_k^\top)H_YG_\ell + (J_Y\otimes I_{n_k})\Phi_{k\ell}]$
     Correct: for ReLU, with exact $\Phi$"""),
)  # fmt: skip


# Symmetry and sizes of the block's second derivatives: Theorem 10 and Step 4 of C.5
@claim("sym-agree", "Theorem 10, below the two formulas", "HOLDS", uses=[slice_transpose])
def sym_agree(seed: int) -> Evidence:
    r"""$\xi_{12}$ and $\xi_{21}$ 'agree almost everywhere when pre- and post-composed in equation 6'
    Correct: as transposes: contracted with any residual $r$ the two blocks of Eq. 6 satisfy $(r^\top\otimes
    I)H^{(2,1)} = [(r^\top\otimes I)H^{(1,2)}]^\top$; here with the derivatives for $\xi_{12}$ and $\xi_{21}$ (see xi_21)"""
    r, found = Draw(seed), []
    for p in points(seed):
        row = r.normal(1, p.X.numel())
        found.append([kron(row, eye(p.n(i))) @ p.second("Z", i, j) for i, j in (("1", "2"), ("2", "1"))])
    detail = "blocks (1,2) and (2,1) of Eq. 6 by autograd, contracted with a random residual"
    return agrees([b for _, b in found], [a.T for a, _ in found], detail)


@claim("sym-claim", "Theorem 10; C.5, Step 4", "WRONG AS PRINTED", uses=[slice_transpose])
def sym_claim(seed: int) -> Evidence:
    r"""$H_{tr}^{(i,j)} = H_{tr}^{(j,i)}$ almost everywhere
    Correct: slice by slice, $\mathrm{vec}_r H^{(j,i)} = (I_{Ld_V}\otimes K_{n_j,n_i})\,\mathrm{vec}_r H^{(i,j)}$, by Schwarz
    off the kinks; the blocks have different shapes if $n_i\neq n_j$. Of the loss, $H^{(j,i)} = (H^{(i,j)})^\top$
    Severity: slip of print"""
    p = point(seed)
    unequal = [(i, j) for i, j in PAIRS if i != j]
    printed, reference = ([p.second("Z", *pair) for pair in pairs] for pairs in (unequal, [(j, i) for i, j in unequal]))
    turned = [
        dense(slice_transpose(Dense(H, "H"), p.X.numel(), p.n(i), p.n(j))) for H, (i, j) in zip(printed, unequal, strict=True)
    ]
    of_loss = max(relative_error(p.second("loss", i, j).T, p.second("loss", j, i)) for i, j in unequal)
    detail = f"the least over all pairs; infinite where the shapes differ; blocks of the loss transposed to {of_loss:.1g}"
    return wrong(printed, reference, detail, corrected=turned)


@claim("sym-nonlinear", "C.5, Step 4", "WRONG AS PRINTED", uses=[AttentionAt])
def sym_nonlinear(seed: int) -> Evidence:
    r"""the only nonlinearities with a second differential are LayerNorm and ReLU; all else is multilinear
    Correct: softmax is left out: $\partial^2A/\partial T^2\neq 0$; the symmetry holds by Schwarz
    Severity: false"""
    p = point(seed)
    reference = p.second("F", "Q", "Q")  # F has no LayerNorm and no ReLU
    return wrong(torch.zeros_like(reference), reference, "Phi_QQ", corrected=dense(p.at.Phi("Q", "Q")))


# The Hessian of the loss: Eq. 7, and Eq. 6 with every piece as printed
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


@claim("eq6-printed", "Theorems 5 and 10, Lemma 2", "WRONG AS PRINTED", uses=[PostNormBlockAt.H_tr])
def eq6_printed(seed: int) -> Evidence:
    r"""Eq. 6 with $\xi_{ij}$, $G_k$, $\Phi_{k\ell}$ as printed gives the blocks $H_{tr}^{(i,j)}$
    Correct: right: (1,1), (2,2), (2,Q), (2,V), (V,V); 9 blocks are wrong, 11 have no formula. Corrected $\xi$, $G_K$, $\Phi$
    give all 25
    Severity: false
    Follows: phi_qq, xi_12, xi_21, xi_1k, g_k"""
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


@claim("eq7", "Sec. 4.2, Eq. 7", "WRONG AS PRINTED", uses=[PostNormBlockAt.loss_hessian])
def eq7(seed: int) -> Evidence:
    r"""$\frac{\partial^2\mathcal{L}(Z)}{\partial W_i\partial W_j} = J_i^\top\frac{2}{Ld_V}J_j + R^{tr}H_{tr}^{(i,j)}$ with
    $R^{tr}_m = \mathrm{vec}_r(Z - \mathrm{Target})^\top\otimes I_m$
    Correct: $\frac{2}{Ld_V}[J_i^\top J_j + (\mathrm{vec}_r(Z - \mathrm{Target})^\top\otimes I_{n_i})H_{tr}^{(i,j)}]$
    Severity: constant"""
    printed = [block for p in points(seed) for block in loss_blocks(p, 1.0)]
    reference = [p.second("loss", i, j) for p in points(seed) for i, j in PAIRS]
    closed = [dense(p.block.loss_hessian(p.target, i, j).total) for p in points(seed) for i, j in PAIRS]
    return wrong(printed, reference, "the least of 25 blocks; corrected: no piece by autograd", corrected=closed)


@claim("eq7-l", "Sec. 4.2, below Eq. 7", "WRONG AS PRINTED", uses=[MeanSquaredErrorAt])
def eq7_l(seed: int) -> Evidence:
    r"""$\mathcal{L}(\cdot) = \|\cdot - \mathrm{Target}\|_2^2$ has second derivative $\frac{2}{Ld_V}$
    Correct: $\frac{2}{Ld_V}I$ belongs to $\frac{1}{Ld_V}\|\cdot - \mathrm{Target}\|_F^2$; this loss has $2I$
    Severity: slip of print"""
    p = point(seed)
    n = p.X.numel()
    reference = hessian_of(lambda Z: (Z - p.target).square().sum(), p.block.Z)
    closed = dense(MeanSquaredErrorAt(p.block.Z, p.target).hessian("Z", "Z"))  # of the mean
    return wrong(2 / n * eye(n), reference, "against autograd", corrected=n * closed)
