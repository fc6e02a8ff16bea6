"""Second derivatives of the block: Theorems 5 and 10."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from derivations.feedforward import FeedForwardAt
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.block_jacobians import lifted, misprint
from hessiankit.ledger.curvature_gap.notation import dense, eye, if_it_conforms, kron, turn, vec_eye
from hessiankit.ledger.curvature_gap.point import ATTENTION, ATTENTION_PAIRS, PAIRS, BlockPoint, BlockSizes, point, points
from hessiankit.ledger.evidence import agrees, assumed, relative_error
from hessiankit.ledger.registry import claim


def blocks(seed: int, pairs: Sequence[tuple[str, str]], detail: str = "against autograd") -> Evidence:
    """Compare xi_ij, corrected and completed, with autograd for given pairs, at generic and at equal sizes."""
    found = [dense(p.block.xi(i, j)) for p in points(seed) for i, j in pairs]
    return agrees(found, [p.second("S", i, j) for p in points(seed) for i, j in pairs], detail)


@claim("curvature-gap/eq6", "Theorem 5, Eq. 6; Theorem 10, Eq. 12", "HOLDS", uses=[PostNormBlockAt.H_tr])
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


@claim("curvature-gap/eq6-closed", "Theorem 5, Eq. 6", "OMITTED", uses=[PostNormBlockAt.H_tr])
def eq6_closed(seed: int) -> Evidence:
    r"""all 25 blocks $H_{tr}^{(i,j)}$ in closed form, with the corrected and the missing $\xi_{ij}$, $G_K$, $\Phi_{k\ell}$

    Correct: of the 25 blocks, 5 are right in print, 9 wrong at generic sizes, 11 without a formula
    """
    found = [dense(p.block.H_tr(i, j)) for p in points(seed) for i, j in PAIRS]
    return agrees(found, [p.second("Z", i, j) for p in points(seed) for i, j in PAIRS], "no piece by autograd, against autograd")


# Pairs of feed-forward weights -----------------------------------------------------------------------------------------


def printed_xi_12(p: BlockPoint) -> Tensor:
    """Return the matrix printed as xi_12."""
    L, d_V, _, d_ff = p.sizes
    inner = dense(p.block.D_sigma) @ kron(p.block.Y, eye(d_ff))
    return kron(eye(L), turn(d_V, d_ff), eye(d_V)) @ kron(eye(L * d_ff), vec_eye(d_V)) @ inner


@claim("curvature-gap/xi_12", "Theorem 10", "WRONG AS PRINTED", uses=[FeedForwardAt.hessian])
def xi_12(seed: int) -> Evidence:
    r"""$\xi_{12} = (I_L\otimes K_{d_V,d_{ff}}\otimes I_{d_V})(I_{Ld_{ff}}\otimes\mathrm{vec}_r I_{d_V})\,D_\sigma(Y\otimes
    I_{d_{ff}})$

    Correct: $(I_{Ld_V}\otimes[(Y\otimes I_{d_{ff}})^\top D_\sigma])(I_L\otimes K_{d_V,L}\otimes I_{d_{ff}})(\mathrm{vec}_r
    I_L\otimes I_{d_Vd_{ff}})K_{d_V,d_{ff}}$; the printed matrix is $\xi_{21} = \partial B_2/\partial W_1$
    """
    return misprint(seed, printed_xi_12, lambda p: dense(p.block.xi("1", "2")), lambda p: p.second("S", "1", "2"))


def printed_xi_21(p: BlockPoint) -> Tensor:
    """Return the product printed as xi_21; it does not conform at any size."""
    L, d_V, _, d_ff = p.sizes
    front = lifted(p, "2") @ dense(p.block.D_sigma)
    return front @ kron(eye(L), turn(d_ff, d_V), eye(d_ff)) @ kron(eye(L * d_V), vec_eye(d_ff))


@claim("curvature-gap/xi_21", "Theorem 10", "WRONG AS PRINTED", uses=[FeedForwardAt.hessian])
def xi_21(seed: int) -> Evidence:
    r"""$\xi_{21} = (I_L\otimes W_2^\top)D_\sigma(I_L\otimes K_{d_{ff},d_V}\otimes I_{d_{ff}})(I_{Ld_V}\otimes\mathrm{vec}_r
    I_{d_{ff}})$

    Correct: what is printed as $\xi_{12}$; the product has inner sizes $Ld_{ff}$ and $Ld_Vd_{ff}^2$ and is no derivative
    """
    return misprint(seed, printed_xi_21, lambda p: dense(p.block.xi("2", "1")), lambda p: p.second("S", "2", "1"))


def lift_of_W_2(p: BlockPoint) -> Tensor:
    """Return d(I_L (x) W_2^T)/dW_2 by autograd."""
    return jacobian_of(lambda W: kron(eye(p.sizes.L), W.T), p.weights["2"])


@claim("curvature-gap/xi_21-step2", "Theorem 10, proof", "HOLDS UNDER ASSUMPTION", uses=[FeedForwardAt.hessian])
def xi_21_step2(seed: int) -> Evidence:
    r"""$\frac{\partial(I_L\otimes W_2^\top)}{\partial W_2} = (I_L\otimes K_{d_V,L}\otimes I_{d_{ff}})(\mathrm{vec}_r
    I_L\otimes I_{d_Vd_{ff}})K_{d_{ff},d_V}$

    Needs: $d_{ff} = d_V$

    Correct: $K_{d_V,d_{ff}}$, since $W_2$ has shape $d_{ff}\times d_V$
    """

    def product(p: BlockPoint, last: Tensor) -> Tensor:
        L, d_V, _, d_ff = p.sizes
        return kron(eye(L), turn(d_V, L), eye(d_ff)) @ kron(vec_eye(L), eye(d_V * d_ff)) @ last

    generic, equal = points(seed)
    d_V, d_ff = generic.sizes.d_V, generic.sizes.d_ff
    found = [product(equal, turn(3, 3)), product(generic, turn(d_V, d_ff))]
    holds = agrees(found, [lift_of_W_2(equal), lift_of_W_2(generic)], "d_ff = d_V = 3; corrected at generic sizes")
    return assumed(holds, relative_error(product(generic, turn(d_ff, d_V)), lift_of_W_2(generic)), above=0.5)


# Pairs of a feed-forward and an attention weight ------------------------------------------------------------------------


def printed_xi_1k(p: BlockPoint, k: str) -> Tensor:
    """Return xi_1k with I_{n_k} as printed, J_Y and G_k exact."""
    L, d_V, _, d_ff = p.sizes
    front = kron(lifted(p, "2") @ dense(p.block.D_sigma), eye(p.n(k)))
    inner = kron(eye(L), turn(d_ff, d_V), eye(d_ff)) @ kron(eye(L * d_V), vec_eye(d_ff))
    return front @ inner @ p.first("Y", k)


@claim("curvature-gap/xi_1k", "Theorem 10", "HOLDS UNDER ASSUMPTION", uses=[PostNormBlockAt.xi])
def xi_1k(seed: int) -> Evidence:
    r"""$\xi_{1k} = ((I_L\otimes W_2^\top)D_\sigma\otimes I_{n_k})(I_L\otimes K_{d_{ff},d_V}\otimes
    I_{d_{ff}})(I_{Ld_V}\otimes\mathrm{vec}_r I_{d_{ff}})\,J_YG_k$

    Needs: $n_k = n_1$: $d_{ff} = d_K$ for $Q$ and $K$, $d_{ff} = d_V$ for $V$

    Correct: $I_{n_1}$ in place of $I_{n_k}$
    """
    generic, narrow, equal = point(seed), point(seed, BlockSizes(3, 4, 2, 2)), point(seed, BlockSizes(3, 3, 3, 3))
    cases = [(narrow, "K"), (narrow, "Q"), (equal, "V")]
    found = [printed_xi_1k(p, k) for p, k in cases] + [dense(generic.block.xi("1", k)) for k in ATTENTION]
    references = [p.second("S", "1", k) for p, k in (*cases, *((generic, k) for k in ATTENTION))]
    fails = [relative_error(if_it_conforms(printed_xi_1k, generic, k), generic.second("S", "1", k)) for k in ATTENTION]
    return assumed(agrees(found, references, "n_k = n_1; corrected at generic sizes"), fails, above=1.0)


@claim("curvature-gap/xi_2k", "Theorem 10", "HOLDS", uses=[PostNormBlockAt.xi])
def xi_2k(seed: int) -> Evidence:
    r"""$\xi_{2k} = (I_L\otimes K_{d_V,d_{ff}}\otimes I_{d_V})(I_{Ld_{ff}}\otimes\mathrm{vec}_r I_{d_V})\,D_\sigma(I_L\otimes
    W_1^\top)J_YG_k$"""
    return blocks(seed, [("2", k) for k in ATTENTION], "k = K, Q, V, against autograd")


@claim("curvature-gap/xi_k1", "Theorem 10, 'for all pairs'", "OMITTED", uses=[PostNormBlockAt.xi])
def xi_k1(seed: int) -> Evidence:
    r"""$\xi_{k1} = (I_{Ld_V}\otimes(J_YG_k)^\top)((I_L\otimes W_2^\top)D_\sigma\otimes I_{Ld_V})(I_L\otimes
    K_{d_{ff},L}\otimes I_{d_V})(\mathrm{vec}_r I_L\otimes I_{d_Vd_{ff}})K_{d_{ff},d_V}$"""
    return blocks(seed, [(k, "1") for k in ATTENTION], "k = K, Q, V, against autograd")


@claim("curvature-gap/xi_k2", "Theorem 10, 'for all pairs'", "OMITTED", uses=[PostNormBlockAt.xi])
def xi_k2(seed: int) -> Evidence:
    r"""$\xi_{k2} = (I_{Ld_V}\otimes(J_YG_k)^\top(I_L\otimes W_1)D_\sigma)(I_L\otimes K_{d_V,L}\otimes
    I_{d_{ff}})(\mathrm{vec}_r I_L\otimes I_{d_Vd_{ff}})K_{d_V,d_{ff}}$"""
    return blocks(seed, [(k, "2") for k in ATTENTION], "k = K, Q, V, against autograd")


@claim("curvature-gap/xi_kl", "Theorem 10", "HOLDS", uses=[PostNormBlockAt.xi])
def xi_kl(seed: int) -> Evidence:
    r"""$\xi_{k\ell} = (J_{SY}\otimes I_{n_k})[(I_{Ld_V}\otimes G_k^\top)H_YG_\ell + (J_Y\otimes I_{n_k})\Phi_{k\ell}]$

    Correct: for ReLU, with exact $\Phi$
    """
    return blocks(seed, ATTENTION_PAIRS, "nine pairs, against autograd")
