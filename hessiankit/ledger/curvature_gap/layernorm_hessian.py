"""LayerNorm's Hessian: Theorem 3, C.3, and the two derivatives of Lemma 4."""

from __future__ import annotations

from torch import Tensor

from derivations.layernorm_theorems import LayerNormTheorems, theorem3_hessian
from derivations.normalization import LayerNormAt
from hessiankit.ledger.autodiff import hessian_of, jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.layernorm import EQUAL, GENERIC, centred, tokens
from hessiankit.ledger.curvature_gap.layernorm_pieces import AUTOGRAD, Pieces, holds, misprint
from hessiankit.ledger.curvature_gap.notation import basis_pairs, dense, eye, kron, turn, vec_eye
from hessiankit.ledger.curvature_gap.point import layer_norm
from hessiankit.ledger.evidence import agrees, assumed, relative_error
from hessiankit.ledger.registry import claim


@claim("curvature-gap/thm3-skel", "Theorem 3; C.3", "HOLDS", uses=[theorem3_hessian])
def thm3_skel(seed: int) -> Evidence:
    r"""$\partial^2\mathrm{LN} = ((P\otimes I)\otimes I)\partial^2 M + (I\otimes G^\top)\partial(P\otimes I_{d_V}) +
    ((I_L\otimes M^\top)\otimes I)\partial^2 P + (I\otimes H^\top)\partial(I_L\otimes M^\top)$, pieces exact"""
    found, references = [], []
    for shape in (GENERIC, EQUAL):
        at = Pieces(tokens(seed, shape))
        found += [skeleton(at, dense(at.closed.dPkron), dense(at.closed.d2P)), dense(LayerNormAt(at.X).hessian("X", "X"))]
        references += [hessian_of(layer_norm, at.X)] * 2
    return agrees(found, references, f"the four terms, and the shorter form, {AUTOGRAD}")


def skeleton(at: Pieces, dPkron: Tensor, d2P: Tensor) -> Tensor:
    """Return the four terms of Theorem 3 with given d(P (x) I)/dX and d2P/dX2."""
    IMT = jacobian_of(lambda X: kron(eye(at.L), centred(X).T), at.X)
    H = dense(at.closed.dP)
    front = kron(eye(at.L), centred(at.X).T, eye(at.n))
    return kron(eye(at.n), at.dM.T) @ dPkron + front @ d2P + kron(eye(at.n), H.T) @ IMT


def printed_dPkron(at: Pieces) -> Tensor:
    """Return (I_L (x) K_{L,L} (x) I_L)(I_{L^2} (x) vec_r I_L) dP/dX."""
    L = at.L
    return kron(eye(L), turn(L, L), eye(L)) @ kron(eye(L * L), vec_eye(L)) @ at.reference("P")


@claim("curvature-gap/thm3-dpkron", "C.3", "HOLDS UNDER ASSUMPTION", uses=[LayerNormTheorems])
def thm3_dpkron(seed: int) -> Evidence:
    r"""$\partial(P\otimes I_{d_V})/\partial X = (I_L\otimes K_{L,L}\otimes I_L)(I_{L^2}\otimes\mathrm{vec}_r I_L)\,\partial
    P/\partial X$

    Needs: $L = d_V$: it differentiates $P\otimes I_L$

    Correct: $(I_L\otimes K_{d_V,L}\otimes I_{d_V})(I_{L^2}\otimes\mathrm{vec}_r I_{d_V})\,\partial P/\partial X$, as Lemma 4
    has
    """
    square, wide = Pieces(tokens(seed, EQUAL)), Pieces(tokens(seed))
    references = [jacobian_of(lambda X, at=at: kron(at.P(X), eye(at.d)), at.X) for at in (square, wide)]
    found = agrees([printed_dPkron(square), dense(wide.closed.dPkron)], references, "L = d_V = 3; corrected at (3, 4)")
    return assumed(found, relative_error(printed_dPkron(wide), references[1]), above=1.0)


@claim("curvature-gap/thm3-dd", "C.3", "WRONG AS PRINTED", uses=[LayerNormTheorems])
def thm3_dd(seed: int) -> Evidence:
    r"""$\partial D/\partial X = E\,[\mathrm{diag}^{-1}(\mathrm{vec}_r^{1/2}(M^{\circ 2}1))(I_L\otimes
    1^\top)\mathrm{diag}(\mathrm{vec}_r M)\,\partial M/\partial X]$

    Correct: times $1/\sqrt{d_V}$
    """
    return misprint(seed, lambda at: at.B1(at.X), lambda at: dense(at.closed.dD), lambda at: at.reference("D"))


def printed_d2P(at: Pieces, dA1: Tensor) -> Tensor:
    """Return d2P/dX2 as printed: 1/sqrt(d) in front of the first of its two terms."""
    A1, B1 = at.A1(at.X), at.B1(at.X)
    return kron(A1, eye(at.n)) @ at.reference("B1") / at.d**0.5 + kron(eye(at.L**2), B1.T) @ dA1


@claim("curvature-gap/thm3-d2p", "C.3, twice", "WRONG AS PRINTED", uses=[LayerNormTheorems])
def thm3_d2p(seed: int) -> Evidence:
    r"""$\frac{\partial^2 P}{\partial X^2} = \frac{1}{\sqrt{d_V}}(A_1\otimes I)\frac{\partial B_1}{\partial X} +
    (I_{L^2}\otimes B_1^\top)\frac{\partial A_1}{\partial X}$, pieces exact

    Correct: $\frac{1}{\sqrt{d_V}}$ multiplies both terms
    """
    return misprint(
        seed, lambda at: printed_d2P(at, at.reference("A1")), lambda at: dense(at.closed.d2P), lambda at: at.reference("dP")
    )


@claim("curvature-gap/thm3-da2", r"C.3, needed for $\partial B_1/\partial X$", "OMITTED", uses=[LayerNormTheorems])
def thm3_da2(seed: int) -> Evidence:
    r"""$\partial A_2/\partial X = -(A_2\otimes A_2)\,E A_2 B_2$"""
    return holds(seed, lambda at: dense(at.closed.dA2), "A2")


@claim("curvature-gap/thm3-da3", "C.3", "WRONG AS PRINTED", uses=[LayerNormTheorems])
def thm3_da3(seed: int) -> Evidence:
    r"""$\partial A_3/\partial X = (e_1\otimes e_1\ \dots\ e_L\otimes e_L)\,I_{Ld_V}\,\partial M/\partial X$ with
    $e_i\in\mathbb{R}^{Ld_V}$

    Correct: $(e_1\otimes e_1\ \dots\ e_{Ld_V}\otimes e_{Ld_V})\,\partial M/\partial X$
    """
    return misprint(
        seed,
        lambda at: basis_pairs(at.n)[:, : at.L] @ eye(at.n) @ at.dM,
        lambda at: dense(at.closed.dA3),
        lambda at: at.reference("A3"),
    )


def printed_inner_d2P(at: Pieces) -> Tensor:
    """Return d2P/dX2 from printed pieces: the misprinted dD/dX inside dA_1/dX; dA_3/dX is forgiven, it does not conform."""
    L, P, dD = at.L, at.P(at.X), at.B1(at.X)
    slope = kron(P, P.T) @ dD
    vec_P = P.reshape(-1, 1)
    inner = kron(eye(L * L), vec_P) @ slope + kron(-vec_P, eye(L * L)) @ -turn(L, L) @ slope
    return printed_d2P(at, kron(eye(L), turn(L, L), eye(L)) @ inner)


@claim("curvature-gap/thm3-full", "Theorem 3; C.3", "WRONG AS PRINTED", uses=[theorem3_hessian])
def thm3_full(seed: int) -> Evidence:
    """the Hessian of LayerNorm, assembled from the pieces as printed

    Correct: Theorem 3 with the corrected pieces
    """
    return misprint(
        seed,
        lambda at: skeleton(at, printed_dPkron(at), printed_inner_d2P(at)),
        lambda at: dense(theorem3_hessian(at.X)),
        lambda at: hessian_of(layer_norm, at.X),
    )


@claim("curvature-gap/thm3-full2", "Theorem 3; C.3", "WRONG AS PRINTED", uses=[theorem3_hessian, LayerNormAt])
def thm3_full2(seed: int) -> Evidence:
    r"""the same with $\partial(P\otimes I_{d_V})/\partial X$ repaired, as Lemma 4 has it

    Correct: also the two factors $1/\sqrt{d_V}$; shorter: $\sum_i s_i^{-2}(e_i\otimes I\otimes e_i\otimes
    I)\,h_i\,(e_i^\top\otimes I)$ with $h_i = -\frac1d(\mathrm{vec}_r(C)\hat x^\top + C\otimes\hat x + \hat x\otimes C) +
    \frac{3}{d^2}(\hat x\otimes\hat x)\hat x^\top$
    """
    return misprint(
        seed,
        lambda at: skeleton(at, dense(at.closed.dPkron), printed_inner_d2P(at)),
        lambda at: dense(LayerNormAt(at.X).hessian("X", "X")),
        lambda at: hessian_of(layer_norm, at.X),
    )


@claim("curvature-gap/l4-dimt", "Lemma 4, proof (iii)", "WRONG AS PRINTED", uses=[LayerNormTheorems])
def l4_dimt(seed: int) -> Evidence:
    r"""$\partial(I_m\otimes M^\top)/\partial X = (I_m\otimes K_{n,m}\otimes I_m)(\mathrm{vec}_r I_m\otimes I_{mn})\,\partial
    M/\partial X$

    Correct: with $K_{n,m}$ before $\partial M/\partial X$, as C.3 has it; the norm is the same
    """

    def printed(at: Pieces) -> Tensor:
        return kron(eye(at.L), turn(at.d, at.L), eye(at.L)) @ kron(vec_eye(at.L), eye(at.n)) @ at.dM

    return misprint(
        seed,
        printed,
        lambda at: dense(at.closed.dIMT),
        lambda at: jacobian_of(lambda X: kron(eye(at.L), centred(X).T), at.X),
    )
