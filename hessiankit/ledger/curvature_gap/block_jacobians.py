"""First derivatives of the block: Lemmas 1 and 3, Theorems 4 and 9, and the definitions of Theorem 10."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.softmax import SoftmaxAt
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, eye, if_it_conforms, kron, ones, turn
from hessiankit.ledger.curvature_gap.point import ATTENTION, WEIGHTS, BlockPoint, point, points
from hessiankit.ledger.evidence import agrees, assumed, relative_error, wrong
from hessiankit.ledger.registry import claim

Build = Callable[[BlockPoint], Tensor]


def same(seed: int, *builds: Build, reference: Build, detail: str = "against autograd") -> Evidence:
    """Compare matrices with a reference at generic and at equal sizes."""
    found = [build(p) for p in points(seed) for build in builds]
    return agrees(found, [reference(p) for p in points(seed) for _ in builds], detail)


def misprint(seed: int, printed: Build, closed: Build, reference: Build, detail: str = "") -> Evidence:
    """Show that a printed matrix is off at generic and at equal sizes, and the closed form at neither."""
    references, closed_forms = [reference(p) for p in points(seed)], [closed(p) for p in points(seed)]
    as_printed = [if_it_conforms(printed, p) for p in points(seed)]
    errors = [relative_error(a, b) for a, b in zip(as_printed, references, strict=True)]
    text = "at generic sizes " + ", at equal sizes ".join("does not conform" if e == math.inf else f"{e:.2g}" for e in errors)
    return wrong(as_printed, references, "; ".join(filter(None, (text, detail))), corrected=closed_forms)


@claim("curvature-gap/thm4", "Theorem 4", "HOLDS", uses=[PostNormBlockAt.jacobian])
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


@claim("curvature-gap/thm9-b1", "Theorem 9, four times", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_b1(seed: int) -> Evidence:
    r"""$\partial S/\partial W_1 = (I_L\otimes W_2^\top)\,\mathrm{diag}(\mathrm{vec}_r 1_{X>0})\,(Y\otimes I_{d_{ff}})$

    Correct: $1_{YW_1>0}$ in place of $1_{X>0}$, as Theorem 10 has
    """

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ tokens_indicator(p) @ kron(p.block.Y, eye(p.sizes.d_ff))

    return misprint(seed, printed, lambda p: dense(p.block.B("1")), lambda p: p.first("S", "1"))


@claim("curvature-gap/thm9-b1line", "Theorem 9, proof, i = 1", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_b1line(seed: int) -> Evidence:
    r"""$\partial S/\partial W_1 = (I_L\otimes W_2^\top)\frac{\partial\sigma(YW_1)}{\partial YW_1}(I_L\otimes W_1^\top)$

    Correct: the last factor is $\partial(YW_1)/\partial W_1 = Y\otimes I_{d_{ff}}$; the printed one is
    $\partial(YW_1)/\partial Y$
    """

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ dense(p.block.D_sigma) @ lifted(p, "1")

    return misprint(seed, printed, lambda p: dense(p.block.B("1")), lambda p: p.first("S", "1"))


@claim("curvature-gap/thm9-jsy", "Theorem 9", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def thm9_jsy(seed: int) -> Evidence:
    r"""$\partial S/\partial Y = (I_L\otimes W_2^\top)\,\mathrm{diag}(\mathrm{vec}_r 1_{X>0})\,(I_L\otimes W_1^\top) + I$

    Correct: $1_{YW_1>0}$ in place of $1_{X>0}$
    """

    def printed(p: BlockPoint) -> Tensor:
        return lifted(p, "2") @ tokens_indicator(p) @ lifted(p, "1") + eye(p.X.numel())

    return misprint(seed, printed, lambda p: dense(p.block.J_SY), of_S_in_Y)


def printed_G_K(p: BlockPoint) -> Tensor:
    """Return dF/dW_K with K_{d_V,d_K} as printed."""
    L, d_V, d_K, _ = p.sizes
    front = kron(eye(L), (p.X @ p.weights["V"]).T) @ dense(p.at.dA)
    return front @ kron(p.X @ p.weights["Q"], p.X) @ turn(d_V, d_K) / math.sqrt(d_K)


@claim("curvature-gap/g_k", "C.4", "HOLDS UNDER ASSUMPTION", uses=[AttentionAt])
def g_k(seed: int) -> Evidence:
    r"""$\partial F/\partial W_K = (I_L\otimes W_V^\top X^\top)\,\frac{\partial A}{\partial M}\,(XW_Q\otimes X)K_{d_V
    d_K}/\sqrt{d_K}$

    Needs: $d_K = d_V$

    Correct: $K_{d_K,d_V}$, as Lemma 2 and C.1 have
    """
    generic, equal = points(seed)
    references = [equal.first("F", "K"), generic.first("F", "K")]
    holds = agrees([printed_G_K(equal), dense(generic.at.G_K)], references, "d_K = d_V = 3; corrected at generic sizes")
    return assumed(holds, relative_error(printed_G_K(generic), references[1]), above=0.1)


@claim("curvature-gap/da-dm-unif", "C.4 and C.1", "HOLDS UNDER ASSUMPTION", uses=[SoftmaxAt])
def da_dm_unif(seed: int) -> Evidence:
    r"""$\partial A/\partial M = \frac1n I_L\otimes(I_L - \frac1L 1_{L\times L})$ under uniform attention

    Needs: $n = L$ ($n$ is not defined), and attention is uniform, which C.1 does not repeat

    Correct: $\mathrm{blockdiag}(\mathrm{diag}(A_i) - A_iA_i^\top)$
    """
    L = 3
    printed = kron(eye(L), eye(L) - ones(L, L) / L) / L
    generic, uniform = point(seed), point(seed, uniform=True)
    references = [jacobian_of(lambda T: T.softmax(1), p.at.T) for p in (uniform, generic)]
    holds = agrees([printed, dense(generic.at.dA)], references, "uniform attention; the general form elsewhere")
    return assumed(holds, relative_error(printed, references[1]), above=0.1)


# The definitions of Theorem 10 -----------------------------------------------------------------------------------------


@claim("curvature-gap/g-clash", "Theorem 10, 'from Theorem 4'", "WRONG AS PRINTED", uses=[PostNormBlockAt.G])
def g_clash(seed: int) -> Evidence:
    r"""$B_k = J_{SY}J_Y G_k$ with the $G_k = \partial Y/\partial W_k$ of Theorem 4

    Correct: $G_k = \partial F/\partial W_k$, as Theorem 10 defines it; $J_Y$ would enter twice
    """
    return misprint(
        seed,
        lambda p: dense(p.block.J_SY @ p.block.J_Y) @ p.first("Y", "V"),
        lambda p: dense(p.block.J_SY @ p.block.J_Y @ p.block.G("V")),
        lambda p: p.first("S", "V"),
        "for W_V",
    )
