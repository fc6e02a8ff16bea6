"""LayerNorm: Theorems 2, 3 and 8, C.2 and C.3, and the bounds of Lemma 4."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.layernorm_theorems import LayerNormTheorems, theorem2_jacobian, theorem3_hessian
from derivations.normalization import LayerNormAt
from papers.ascent import worst
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.curvature_gap.block_printed import lemma_4_hessian_printed, lemma_4_jacobian_printed, sigma_min_printed
from papers.drawing import Draw
from papers.evidence import agrees, assumed, loose, relative_error, violated, wrong
from papers.notation import basis_pairs, dense, eye, if_it_conforms, kron, layer_norm, ones, spectral, turn, vec_eye
from papers.registry import claim, claims_of

GENERIC, EQUAL = (3, 4), (3, 3)
"""L x d_V."""


def centred(X: Tensor) -> Tensor:
    """Return M."""
    return X - X.mean(1, keepdim=True)


def scales(X: Tensor) -> Tensor:
    """Return sigma, a column."""
    return centred(X).square().mean(1, keepdim=True).sqrt()


def inverse_scales(X: Tensor) -> Tensor:
    """Return P."""
    return torch.diag(1 / scales(X)[:, 0])


def tokens(seed: int, shape: tuple[int, int] = GENERIC) -> Tensor:
    """Return the X of a seed."""
    return Draw(seed).normal(*shape)


@claim("thm2", "Theorem 2; C.2", "HOLDS", uses=[theorem2_jacobian, LayerNormAt])
def thm2(seed: int) -> Evidence:
    r"""$\partial\mathrm{LN}/\partial X = (P\otimes I_{d_V})(I_{Ld_V} - \frac{1}{d_V}(I_L\otimes 1_{d_V\times d_V})) +
    (I_L\otimes M^\top)\,\partial P/\partial X$
    Correct: shorter: $(P\otimes I)(I_L\otimes C - \frac{1}{d_V}VV^\top)$, $V = \mathrm{blockdiag}(\hat x_i)$"""
    X = tokens(seed)
    L, d = X.shape
    P, dP = inverse_scales(X), jacobian_of(inverse_scales, X)
    printed = kron(P, eye(d)) @ (eye(L * d) - kron(eye(L), ones(d, d)) / d) + kron(eye(L), centred(X).T) @ dP
    closed = [dense(theorem2_jacobian(X)), dense(LayerNormAt(X).jacobian("X"))]
    return agrees([printed, *closed], [jacobian_of(layer_norm, X)] * 3, "as printed, Theorem 8 expanded, the shorter form")


@claim("thm8-dp", "Theorem 8", "HOLDS", uses=[LayerNormTheorems])
def thm8_dp(seed: int) -> Evidence:
    r"""$\frac{\partial P}{\partial X} = \frac{1}{\sqrt{d_V}}(-D^{-1}\otimes
    D^{-\top})E\,[\mathrm{diag}^{-1}(\mathrm{vec}_r^{1/2}(M^{\circ 2}1))(I_L\otimes 1^\top)\mathrm{diag}(\mathrm{vec}_r
    M)\frac{\partial M}{\partial X}]$"""
    X = tokens(seed)
    return agrees(dense(LayerNormTheorems(X).dP), jacobian_of(inverse_scales, X), "against autograd")


@claim("thm8-tau", "C.2, proof", "HOLDS UNDER ASSUMPTION", uses=[LayerNormTheorems])
def thm8_tau(seed: int) -> Evidence:
    r"""$\tau = Q\,1_L$ with $Q = M^{\circ 2}$
    Needs: $L = d_V$; the next line has $1_{d_V}$
    Correct: $\tau = Q\,1_{d_V}$"""
    square, wide = tokens(seed, EQUAL), tokens(seed)

    def printed(X: Tensor) -> Tensor:
        return centred(X).square() @ ones(X.shape[0])

    references = [3 * scales(square).square(), 4 * scales(wide).square()]
    holds = agrees([printed(square), LayerNormTheorems(wide).norms ** 2], references, "L = d_V = 3; corrected at L = 3, d_V = 4")
    return assumed(holds, relative_error(if_it_conforms(printed, wide), references[1]), above=1.0)


# The letters of Theorem 3 as tensors, and two ways to compare their printed derivatives with autograd
AUTOGRAD = "against autograd"


class Pieces:
    """Theorem 3's letters at X as tensors, each a function of X as C.3 defines it, for autograd to differentiate."""

    def __init__(self, X: Tensor) -> None:
        self.X, (self.L, self.d) = X, X.shape
        self.n = self.L * self.d
        self.closed = LayerNormTheorems(X)

    def reference(self, letter: str) -> Tensor:
        """Return d(letter)/dX by autograd."""
        return jacobian_of(getattr(self, letter), self.X)

    def P(self, X: Tensor) -> Tensor:
        """diag^{-1}(sigma)."""
        return inverse_scales(X)

    def D(self, X: Tensor) -> Tensor:
        """diag(sigma)."""
        return torch.diag(scales(X)[:, 0])

    def dP(self, X: Tensor) -> Tensor:
        """A_1 B_1 / sqrt(d), which is dP/dX (Theorem 8)."""
        return self.A1(X) @ self.B1(X) / self.d**0.5

    def A1(self, X: Tensor) -> Tensor:
        """-D^{-1} (x) D^{-T}."""
        return -kron(self.P(X), self.P(X).T)

    def B1(self, X: Tensor) -> Tensor:
        """E A_2 B_2."""
        return basis_pairs(self.L) @ self.A2(X) @ self.B2(X)

    def A2(self, X: Tensor) -> Tensor:
        """diag^{-1}(vec_r^{1/2}(M^{o2} 1))."""
        return torch.diag(1 / centred(X).norm(dim=1))

    def B2(self, X: Tensor) -> Tensor:
        """J A_3 B_3."""
        return kron(eye(self.L), ones(1, self.d)) @ self.A3(X) @ self.dM

    def A3(self, X: Tensor) -> Tensor:
        """diag(vec_r M)."""
        return torch.diag(centred(X).reshape(-1))

    @property
    def dM(self) -> Tensor:
        """B_3 = dM/dX, a constant."""
        return kron(eye(self.L), eye(self.d) - ones(self.d, self.d) / self.d)


def holds(seed: int, printed: Callable[[Pieces], Tensor], letter: str, *, closed: str = "") -> Evidence:
    """Compare a printed derivative, and the closed form where there is one, with autograd at both sizes."""
    found, references = [], []
    for shape in (GENERIC, EQUAL):
        at = Pieces(tokens(seed, shape))
        reference = at.reference(letter)
        found.append(printed(at))
        references.append(reference)
        if closed:
            found.append(dense(getattr(at.closed, closed)))
            references.append(reference)
    return agrees(found, references, f"{AUTOGRAD}, L = d_V and not")


def misprint(
    seed: int, printed: Callable[[Pieces], Tensor], closed: Callable[[Pieces], Tensor], reference: Callable[[Pieces], Tensor]
) -> Evidence:
    """Show that a printed derivative is off at both sizes, and the corrected one is not."""
    pieces = [Pieces(tokens(seed, shape)) for shape in (GENERIC, EQUAL)]
    as_printed, references = [if_it_conforms(printed, at) for at in pieces], [reference(at) for at in pieces]
    detail = "the smaller of the errors at (L, d_V) = (3, 4) and (3, 3)"
    return wrong(as_printed, references, detail, corrected=[closed(at) for at in pieces])


# LayerNorm's Hessian: Theorem 3, C.3, and the two derivatives of Lemma 4
@claim("thm3-skel", "Theorem 3; C.3", "HOLDS", uses=[theorem3_hessian])
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


@claim("thm3-dpkron", "C.3", "HOLDS UNDER ASSUMPTION", uses=[LayerNormTheorems])
def thm3_dpkron(seed: int) -> Evidence:
    r"""$\partial(P\otimes I_{d_V})/\partial X = (I_L\otimes K_{L,L}\otimes I_L)(I_{L^2}\otimes\mathrm{vec}_r I_L)\,\partial
    P/\partial X$
    Needs: $L = d_V$: it differentiates $P\otimes I_L$
    Correct: $(I_L\otimes K_{d_V,L}\otimes I_{d_V})(I_{L^2}\otimes\mathrm{vec}_r I_{d_V})\,\partial P/\partial X$, as Lemma 4
    has"""
    square, wide = Pieces(tokens(seed, EQUAL)), Pieces(tokens(seed))
    references = [jacobian_of(lambda X, at=at: kron(at.P(X), eye(at.d)), at.X) for at in (square, wide)]
    found = agrees([printed_dPkron(square), dense(wide.closed.dPkron)], references, "L = d_V = 3; corrected at (3, 4)")
    return assumed(found, relative_error(printed_dPkron(wide), references[1]), above=1.0)


def printed_dA3(at: Pieces) -> Tensor:
    """Return (e_1 (x) e_1 ... e_L (x) e_L) I dM/dX."""
    return basis_pairs(at.n)[:, : at.L] @ eye(at.n) @ at.dM


def printed_d2P(at: Pieces, dA1: Tensor) -> Tensor:
    """Return d2P/dX2 as printed: 1/sqrt(d) in front of the first of its two terms."""
    A1, B1 = at.A1(at.X), at.B1(at.X)
    return kron(A1, eye(at.n)) @ at.reference("B1") / at.d**0.5 + kron(eye(at.L**2), B1.T) @ dA1


@claim("thm3-da2", r"C.3, needed for $\partial B_1/\partial X$", "OMITTED", uses=[LayerNormTheorems])
def thm3_da2(seed: int) -> Evidence:
    r"""$\partial A_2/\partial X = -(A_2\otimes A_2)\,E A_2 B_2$"""
    return holds(seed, lambda at: dense(at.closed.dA2), "A2")


claims_of(
    __name__, misprint, "WRONG AS PRINTED", [LayerNormTheorems],
    ("thm3-dd", "C.3", lambda at: at.B1(at.X), lambda at: dense(at.closed.dD), lambda at: at.reference("D"), r"""
     $\partial D/\partial X = E\,[\mathrm{diag}^{-1}(\mathrm{vec}_r^{1/2}(M^{\circ 2}1))(I_L\otimes
     1^\top)\mathrm{diag}(\mathrm{vec}_r M)\,\partial M/\partial X]$
     Correct: times $1/\sqrt{d_V}$
     Severity: constant"""),
    ("thm3-d2p", "C.3, twice",
     lambda at: printed_d2P(at, at.reference("A1")), lambda at: dense(at.closed.d2P), lambda at: at.reference("dP"), r"""
     $\frac{\partial^2 P}{\partial X^2} = \frac{1}{\sqrt{d_V}}(A_1\otimes I)\frac{\partial B_1}{\partial X} +
     (I_{L^2}\otimes B_1^\top)\frac{\partial A_1}{\partial X}$, pieces exact
     Correct: $\frac{1}{\sqrt{d_V}}$ multiplies both terms
     Severity: slip of print"""),
    ("thm3-da3", "C.3",
     printed_dA3, lambda at: dense(at.closed.dA3), lambda at: at.reference("A3"), r"""
     $\partial A_3/\partial X = (e_1\otimes e_1\ \dots\ e_L\otimes e_L)\,I_{Ld_V}\,\partial M/\partial X$ with
     $e_i\in\mathbb{R}^{Ld_V}$
     Correct: $(e_1\otimes e_1\ \dots\ e_{Ld_V}\otimes e_{Ld_V})\,\partial M/\partial X$
     Severity: slip of print"""),
)  # fmt: skip


def printed_inner_d2P(at: Pieces) -> Tensor:
    """Return d2P/dX2 from printed pieces: the misprinted dD/dX inside dA_1/dX; dA_3/dX is forgiven, it does not conform."""
    L, P, dD = at.L, at.P(at.X), at.B1(at.X)
    slope = kron(P, P.T) @ dD
    vec_P = P.reshape(-1, 1)
    inner = kron(eye(L * L), vec_P) @ slope + kron(-vec_P, eye(L * L)) @ -turn(L, L) @ slope
    return printed_d2P(at, kron(eye(L), turn(L, L), eye(L)) @ inner)


@claim("thm3-full", "Theorem 3; C.3", "WRONG AS PRINTED", uses=[theorem3_hessian])
def thm3_full(seed: int) -> Evidence:
    r"""the Hessian of LayerNorm, assembled from the pieces as printed
    Correct: $\frac{\partial^2\mathrm{LN}}{\partial X^2} = (I\otimes G^\top)\frac{\partial(P\otimes I_{d_V})}{\partial X} +
    (I_L\otimes M^\top\otimes I)\frac{\partial^2P}{\partial X^2} + (I\otimes H^\top)\frac{\partial(I_L\otimes M^\top)}{\partial
    X}$ with $\frac{\partial(P\otimes I_{d_V})}{\partial X} = (I_L\otimes K_{d_V,L}\otimes I_{d_V})
    (I_{L^2}\otimes\mathrm{vec}_r I_{d_V})\frac{\partial P}{\partial X}$,
    $\frac{\partial^2P}{\partial X^2} = \frac{1}{\sqrt{d_V}}[(A_1\otimes I)\frac{\partial B_1}{\partial X} +
    (I_{L^2}\otimes B_1^\top)\frac{\partial A_1}{\partial X}]$ and $\frac{\partial D}{\partial X} =
    \frac{1}{\sqrt{d_V}}E\,\mathrm{diag}^{-1}(\mathrm{vec}_r^{1/2}(M^{\circ 2}1))(I_L\otimes 1^\top)
    \mathrm{diag}(\mathrm{vec}_r M)\frac{\partial M}{\partial X}$
    Severity: constant
    Follows: thm3-dd, thm3-d2p, thm3-da3, thm3-dpkron"""
    return misprint(
        seed,
        lambda at: skeleton(at, printed_dPkron(at), printed_inner_d2P(at)),
        lambda at: dense(theorem3_hessian(at.X)),
        lambda at: hessian_of(layer_norm, at.X),
    )


@claim("thm3-full2", "Theorem 3; C.3", "WRONG AS PRINTED", uses=[theorem3_hessian, LayerNormAt])
def thm3_full2(seed: int) -> Evidence:
    r"""the same with $\partial(P\otimes I_{d_V})/\partial X$ repaired, as Lemma 4 has it
    Correct: also the two factors $1/\sqrt{d_V}$; shorter: $\sum_i s_i^{-2}(e_i\otimes I\otimes e_i\otimes
    I)\,h_i\,(e_i^\top\otimes I)$ with $h_i = -\frac1d(\mathrm{vec}_r(C)\hat x^\top + C\otimes\hat x + \hat x\otimes C) +
    \frac{3}{d^2}(\hat x\otimes\hat x)\hat x^\top$
    Severity: constant
    Follows: thm3-dd, thm3-d2p"""
    return misprint(
        seed,
        lambda at: skeleton(at, dense(at.closed.dPkron), printed_inner_d2P(at)),
        lambda at: dense(LayerNormAt(at.X).hessian("X", "X")),
        lambda at: hessian_of(layer_norm, at.X),
    )


@claim("l4-dimt", "Lemma 4, proof (iii)", "WRONG AS PRINTED", uses=[LayerNormTheorems])
def l4_dimt(seed: int) -> Evidence:
    r"""$\partial(I_m\otimes M^\top)/\partial X = (I_m\otimes K_{n,m}\otimes I_m)(\mathrm{vec}_r I_m\otimes I_{mn})\,\partial
    M/\partial X$
    Correct: with $K_{n,m}$ before $\partial M/\partial X$, as C.3 has it; the norm is the same
    Severity: slip of print"""

    def printed(at: Pieces) -> Tensor:
        return kron(eye(at.L), turn(at.d, at.L), eye(at.L)) @ kron(vec_eye(at.L), eye(at.n)) @ at.dM

    return misprint(
        seed, printed, lambda at: dense(at.closed.dIMT), lambda at: jacobian_of(lambda X: kron(eye(at.L), centred(X).T), at.X)
    )


# Bounds on LayerNorm and on what it returns: Lemma 4 and Proposition 10
def two_entries(n: int, scale: float = 1.0) -> Tensor:
    """Return the row (1, -1, 0, ...)."""
    row = torch.zeros(1, n, dtype=torch.float64)
    row[0, 0], row[0, 1] = scale, -scale
    return row


def lemma_ratios(X: Tensor, reading: str) -> tuple[float, float]:
    """Return left over right side of Eqs. 28 and 29."""
    (left, right), (bent, bent_right) = lemma_sides(X, reading)
    return left / right, bent / bent_right


def lemma_sides(X: Tensor, reading: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the left sides of Eqs. 28 and 29 by autograd and their right sides."""
    sigma, x = sigma_min_printed(X, reading=reading), spectral(X)
    jacobian, hessian = spectral(jacobian_of(layer_norm, X)), spectral(hessian_of(layer_norm, X))
    return (jacobian, lemma_4_jacobian_printed(x, sigma, X.shape[1])), (hessian, lemma_4_hessian_printed(x, sigma, *X.shape))


def rows(seed: int) -> list[Tensor]:
    """Return inputs of a norm: different sizes and scales, the last a single balanced row, where the bounds are closest."""
    draw = Draw(seed)
    found = [10 ** float(draw.uniform(1, low=-2, high=2)) * draw.normal(L, n) for L in (1, 2, 3) for n in (3, 4, 6)]
    return [*found, torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)]


@claim("lemma4-28", "Lemma 4, Eq. 28", "WRONG AS PRINTED", uses=[lemma_4_jacobian_printed, norm_jacobian_norm])
def lemma4_28(seed: int) -> Evidence:
    r"""$\|J_{LN}\|_2\le\frac{1}{\sigma_{\min}} + \frac{\|X\|_2^2}{\sqrt n\,\sigma_{\min}^3}$ with $\sigma_{\min} =
    \min_i\|M_i\|_2$
    Correct: $\|J_{LN}\|_2 = 1/\min_i\sigma_i$ for $n\ge3$
    Severity: constant"""
    inputs = [two_entries(8), *rows(seed)]
    left, printed = zip(*(lemma_sides(X, "stated")[0] for X in inputs), strict=True)
    corrected = [norm_jacobian_norm(X) for X in inputs]
    return violated(left, printed, "X = (1, -1, 0, ..., 0), n = 8, first", corrected=corrected, above=2, at={"X": inputs[0]})


@claim("lemma4-29m", "Lemma 4, Eq. 29", "WRONG AS PRINTED", uses=[lemma_4_hessian_printed, norm_hessian_norm])
def lemma4_29m(seed: int) -> Evidence:
    r"""$\|H_{LN}\|_2\le\frac{\|X\|}{\sigma_{\min}^3}(1 + \sqrt{m/n}) + \frac{\|X\|^2}{\sqrt n\sigma_{\min}^3} +
    \frac{3\|X\|^3}{n\sigma_{\min}^5}$, $\sigma_{\min} = \min_i\|M_i\|_2$
    Correct: $\|H_{LN}\|_2 = \sqrt{\max(n-2,2)/n}\,/\min_i\sigma_i^2$ for $n\ge3$
    Severity: constant
    Follows: lemma4-28"""
    inputs = [two_entries(8, 1e-3), *rows(seed)]
    left, printed = zip(*(lemma_sides(X, "stated")[1] for X in inputs), strict=True)
    corrected = [norm_hessian_norm(X) for X in inputs]
    return violated(
        left, printed, "X = (1, -1, 0, ..., 0) / 1000, n = 8, first", corrected=corrected, above=3.9, at={"X": inputs[0]}
    )


@claim("lemma4-28-proof", "Lemma 4, Eq. 28, as its proof reads it", "LOOSE", uses=[lemma_4_jacobian_printed])
def lemma4_28_proof(seed: int) -> Evidence:
    r"""Eq. 28 with $\sigma_{\min} = \min_i\sigma_i = \min_i\|M_i\|_2/\sqrt n$
    Correct: the right side is at least $(1 + \sqrt n)/\min_i\sigma_i$"""
    found = worst(lambda X: lemma_ratios(X, "proof")[0], rows(seed))
    return loose(found, "ten inputs and an ascent", factor=1 + math.sqrt(3))


@claim("lemma4-29", "Lemma 4, Eq. 29, as its proof reads it", "LOOSE", uses=[lemma_4_hessian_printed])
def lemma4_29(seed: int) -> Evidence:
    r"""Eq. 29 with $\sigma_{\min} = \min_i\sigma_i$
    Correct: the right side is at least $4\sqrt n/\min_i\sigma_i^2$; its middle term has the wrong degree in $X$ and is
    not needed"""
    found = worst(lambda X: lemma_ratios(X, "proof")[1], rows(seed))
    return loose(found, "ten inputs and an ascent", factor=4 * math.sqrt(3))


@claim("lemma4-29-degree", "Lemma 4, Eq. 29, middle term", "LOOSE", uses=[lemma_4_hessian_printed])
def lemma4_29_degree(seed: int) -> Evidence:
    r"""the term $\|X\|_2^2/(\sqrt n\,\sigma_{\min}^3)$ of the bound on $\|H_{LN}\|_2$
    Correct: $H_{LN}(cX) = c^{-2}H_{LN}(X)$, like the other terms; this term scales with $c^{-1}$, is not needed, and makes the
    bound loose at large $X$"""
    X, c = Draw(seed).normal(3, 4), 100.0

    def terms(X: Tensor) -> tuple[float, float]:
        x, sigma = spectral(X), sigma_min_printed(X, reading="proof")
        middle = x**2 / (math.sqrt(X.shape[1]) * sigma**3)
        return middle, lemma_4_hessian_printed(x, sigma, *X.shape) - middle

    (middle, rest), (scaled_middle, scaled_rest) = terms(X), terms(c * X)
    exponents = [math.log(after / before) / math.log(c) for before, after in ((middle, scaled_middle), (rest, scaled_rest))]
    detail = f"100 X in place of X: the term has degree {exponents[0]:.0f}, the others {exponents[1]:.0f}; with it"
    return loose(spectral(hessian_of(layer_norm, c * X)) / (scaled_middle + scaled_rest), detail, factor=c)
