"""Theorem 4.2: gradients and sharpness of an attention layer and its norm, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.matrix import Commutation
from derivations.normalization import LayerNormAt
from papers import second as again
from papers.ascent import WorstRatio, worst
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, bounded, loose, small, violated, wrong
from papers.norms import matrix_norm
from papers.notation import dense, eye, if_it_conforms, layer_norm, norm, ones
from papers.registry import claim
from papers.sharpness_disparity.attention_bounds import AttentionGradientNorms, theorem_4_2
from papers.sharpness_disparity.gradient_bounds import NormedInput
from papers.sharpness_disparity.points import AttentionSublayer

VOCABULARY = 9
"""d of the paper, which is not the width D."""
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")


def front(point: AttentionSublayer) -> Tensor:
    """Return (I_n (x) W_O^T W_V^T X_N^T) dA/dM / sqrt(D)."""
    n, D = point.sizes
    return torch.kron(eye(n), point.W_O.T @ point.W_V.T @ point.X_norm.T) @ point.dA / math.sqrt(D)


def printed(point: AttentionSublayer, letter: str) -> Tensor:
    """Return dY/dW as App. B.2 prints it."""
    N, A, D = point.X_norm, point.closed.A, point.sizes[1]
    if letter == "W_V":
        return torch.kron(A @ N, point.W_O.T.contiguous())
    if letter == "W_O":
        return torch.kron(A @ N @ point.W_V, eye(D))
    return front(point) @ torch.kron(N, N @ (point.W_K if letter == "W_Q" else point.W_Q))


def gamma_formula(point: AttentionSublayer, d: int) -> Tensor:
    """Return dY/dgamma as App. B.2 prints it, with I_d."""
    n, N = point.sizes[0], point.X_norm
    K = dense(Commutation(n, n))
    scores = torch.kron(eye(n), N @ point.W_K @ point.W_Q.T) + K @ torch.kron(eye(n), N @ point.W_Q @ point.W_K.T)
    outer = front(point) @ scores + torch.kron(point.closed.A, point.W_O.T @ point.W_V.T)
    return outer @ layer_norm(point.X).reshape(-1).diag() @ torch.kron(ones(n), eye(d))


def jacobian_row(seed: int, letter: str) -> Evidence:
    """Compare a printed Jacobian times dQ/dY, the attention chapter and automatic differentiation."""
    point = AttentionSublayer.draw(seed)
    reference = point.gradient(letter)
    found = [point.q @ printed(point, letter), point.closed_gradient(letter)]
    return agrees(found, [reference, reference], "dQ/dY times the printed matrix and the closed form against autograd")


@claim("b2-wq", "App. B.2, dY/dW_Q", "HOLDS", uses=[AttentionAt.jacobian])
def w_q(seed: int) -> Evidence:
    r"""$(I_n\otimes W_O^\top W_V^\top X_{\mathrm{Norm}}^\top)\frac{\partial A}{\partial
    M}\left(\frac{X_{\mathrm{Norm}}\otimes X_{\mathrm{Norm}}W_K}{\sqrt D}\right)$"""
    return jacobian_row(seed, "W_Q")


@claim("b2-wk", "App. B.2, dY/dW_K", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def w_k(seed: int) -> Evidence:
    r"""$(I_n\otimes W_O^\top W_V^\top X_{\mathrm{Norm}}^\top)\frac{\partial A}{\partial
    M}\left(\frac{X_{\mathrm{Norm}}\otimes X_{\mathrm{Norm}}W_Q}{\sqrt D}\right)$
    Correct: $K_{n,n}$ before the last factor, or $\frac{X_{\mathrm{Norm}}W_Q\otimes X_{\mathrm{Norm}}}{\sqrt D}K_{D,D}$ for
    it: what is printed is $\frac{\partial\,\mathrm{vec}(M^\top)}{\partial W_K}$
    Severity: false"""
    point = AttentionSublayer.draw(seed)
    n, D = point.sizes
    N, reference = point.X_norm, point.gradient("W_K")
    inner = torch.kron(N, N @ point.W_Q)
    corrected = [
        point.q @ front(point) @ dense(Commutation(n, n)) @ inner,
        point.q @ front(point) @ torch.kron(N @ point.W_Q, N) @ dense(Commutation(D, D)),
        point.closed_gradient("W_K"),
    ]
    as_printed = point.q @ printed(point, "W_K")
    return wrong([as_printed] * 3, [reference] * 3, "against autograd", corrected=corrected, above=0.05)


@claim("b2-gamma", "App. B.2, dY/dgamma", "WRONG AS PRINTED", uses=[AttentionAt.jacobian, LayerNormAt])
def gamma(seed: int) -> Evidence:
    r"""$\left(\frac{1}{\sqrt D}(I_n\otimes W_O^\top W_V^\top X_N^\top)\frac{\partial A}{\partial M}\left(I_n\otimes
    X_NW_KW_Q^\top + K_{n,n}(I_n\otimes X_NW_QW_K^\top)\right) + A\otimes W_O^\top
    W_V^\top\right)\mathrm{diag}(\mathrm{vec}(X_{\mathrm{std}}))(1_{n\times1}\otimes I_d)$
    Correct: $I_D$ in place of $I_d$, nothing else: $K_{n,n}$ stands where it belongs
    Severity: slip of print
    Follows: thm4.1-gamma"""
    point = AttentionSublayer.draw(seed)
    reference = point.gradient("gamma")
    corrected = [point.q @ gamma_formula(point, 5), point.closed_gradient("gamma")]
    bad = if_it_conforms(lambda: point.q @ gamma_formula(point, VOCABULARY))
    return wrong([bad] * 2, [reference] * 2, f"D = 5, d = {VOCABULARY}: the factors do not conform", corrected=corrected)


@claim("b2-x-norm", "App. B.2, definition of X_Norm", "WRONG AS PRINTED", uses=[LayerNormAt])
def x_norm(seed: int) -> Evidence:
    r"""$X_{\mathrm{Norm}} = X_{\mathrm{std}}\odot\gamma$
    Correct: $X_{\mathrm{std}}\odot(1_{n\times1}\otimes\gamma)$, as in Theorem 4.1 and App. B.1: $\gamma$ is $1\times D$
    Severity: slip of print"""
    draw = Draw(seed)
    X, gain = draw.normal(4, 5), draw.normal(1, 5)

    def hadamard(A: Tensor, B: Tensor) -> Tensor:
        if A.shape != B.shape:
            raise RuntimeError("a Hadamard product needs equal shapes")
        return A * B

    X_std, reference = layer_norm(X), F.layer_norm(X, (5,), gain[0], eps=0.0)
    bad, corrected = if_it_conforms(lambda: hadamard(X_std, gain)), hadamard(X_std, torch.kron(ones(4), gain))
    second = [again.standardised(X) @ gain[0].diag()]
    return wrong([bad], [reference], "shapes 4 x 5 and 1 x 5", corrected=[corrected], second=second, by="rational numbers")


@claim("ours/attention-euler", "Sharpness Disparity, Theorem 4.2", "HOLDS", uses=[AttentionAt.jacobian])
def euler(seed: int) -> Evidence:
    r"""$\langle W_Q,\nabla\mathcal{Q}\rangle = \langle W_K,\nabla\mathcal{Q}\rangle$, $\langle W_V,\nabla\mathcal{Q}\rangle =
    \langle W_O,\nabla\mathcal{Q}\rangle = \langle\nabla_Y\mathcal{Q}, S\rangle$, and $\langle\gamma,\nabla\mathcal{Q}\rangle$
    is the sum of those of $W_Q$, $W_K$ and $W_V$"""
    point = AttentionSublayer.draw(seed, causal=True)
    products = {x: float(point.gradient(x) @ getattr(point, x).reshape(-1)) for x in (*WEIGHTS, "gamma")}
    output = float(point.q @ point.closed.value.reshape(-1))
    scale = float(point.q.norm() * point.closed.value.norm())
    errors = [
        products["W_Q"] - products["W_K"],
        products["W_V"] - output,
        products["W_O"] - output,
        products["gamma"] - products["W_Q"] - products["W_K"] - products["W_V"],
    ]
    return small([abs(e) / scale for e in errors], "autograd's gradients; errors relative to the product of the norms")


# Theorem 4.2: bounds on the gradients and on the sharpness of an attention layer and its norm
class Constants(NamedTuple):
    """Phi and Psi of App. B.2."""

    phi: float
    psi: float


def constants(point: AttentionSublayer, c: float | None = None, dA: float | None = None) -> Constants:
    """Return Phi and Psi; ``c`` in place of n sqrt(D), ``dA`` where the norm of dA/dM is known."""
    n, D = point.sizes
    c = n * math.sqrt(D) if c is None else c
    slope = norm(point.dA) if dA is None else dA
    product = math.prod(norm(W) for W in point.weights)
    phi = c**3 / math.sqrt(D) * norm(point.q) * slope * product * norm(point.gamma) ** 3
    psi = c * norm(point.q) * norm(point.closed.A) * norm(point.W_V) * norm(point.W_O) * norm(point.gamma)
    return Constants(phi, psi)


def right_side(letter: str, found: Constants) -> float:
    """Return what ||theta|| ||dQ/dtheta|| is bounded by."""
    return {"W_Q": found.phi, "W_K": found.phi, "gamma": 2 * found.phi + found.psi}.get(letter, found.psi)


def end_ratio(point: AttentionSublayer, letter: str, found: Constants) -> float:
    """Return left over right side of an end bound."""
    return norm(point.gradient(letter)) * norm(getattr(point, letter)) / right_side(letter, found)


def attaining(seed: int, D: int = 5) -> AttentionSublayer:
    """Return one token: attention is 1, Phi is 0, and the bounds with Psi and sqrt(n(D-1)) are attained."""
    axis = eye(D)[:1]
    W_V, W_O = axis.T @ axis, axis.T @ Draw(seed).normal(1, D)
    return AttentionSublayer(axis, 2 * axis, eye(D), eye(D), W_V, W_O, W_O[:1].clone())


def sample(seed: int) -> list[AttentionSublayer]:
    """Return generic points of several shapes and scales, half of them causal, and the tight one."""
    shapes = [(2, 3, 1.0), (4, 5, 0.5), (3, 2, 0.2), (6, 4, 0.3)]
    points = [
        AttentionSublayer.draw(10 * seed + k, causal=bool(k % 2), n=n, D=D, std=std) for k in range(4) for n, D, std in shapes
    ]
    return [*points, attaining(seed)]


def end_bound(points: Sequence[AttentionSublayer], *letters: str) -> Evidence:
    """Return the worst ratios of printed end bounds."""
    found = [worst(lambda p, x=x: end_ratio(p, x, constants(p)), points) for x in letters]  # type: ignore[misc]
    return bounded(found, f"{len(points)} points of 4 shapes, with and without a causal mask; {', '.join(letters)}")


@claim("b2-estimate-q", "App. B.2, estimates for W_Q and W_K, first lines", "HOLDS", uses=[matrix_norm])
def estimate_q(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial W_Q}\|_F\le\frac{1}{\sqrt D}\|\frac{\partial\mathcal{Q}}{\partial
    Y}\|_F\|\frac{\partial A}{\partial M}\|_F\|W_K\|_F\|W_V\|_F\|W_O\|_F\|X_{\mathrm{Norm}}\|_F^3$, and with $W_Q$ for $W_K$"""

    def ratio(point: AttentionSublayer, letter: str, other: str) -> float:
        shared = norm(point.q) * norm(point.dA) * norm(point.W_V) * norm(point.W_O) * norm(point.X_norm) ** 3
        return norm(point.gradient(letter)) * math.sqrt(point.sizes[1]) / (shared * norm(getattr(point, other)))

    points = [*sample(seed)[:-1], opposite(seed)]
    found = [worst(lambda p, a=a, b=b: ratio(p, a, b), points) for a, b in (("W_Q", "W_K"), ("W_K", "W_Q"))]  # type: ignore[misc]
    return bounded(found, f"{len(points)} points; W_Q, W_K")


@claim("b2-estimate-gamma", "App. B.2, estimate for gamma, first line", "WRONG AS PRINTED", uses=[matrix_norm])
def estimate_gamma(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial\gamma}\|_F\le\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\sqrt
    n\,\|X_{\mathrm{std}}\|_F\left(\frac{2}{\sqrt D}\|(I_n\otimes P)\frac{\partial A}{\partial M}(I_n\otimes
    X_NW_KW_Q^\top)\|_F + \|A\otimes W_O^\top W_V^\top\|_F\right)$
    Correct: the two terms of the scores have different norms: $\|\ldots(I_n\otimes X_NW_KW_Q^\top)\|_F + \|\ldots
    K_{n,n}(I_n\otimes X_NW_QW_K^\top)\|_F$ in place of twice the first; the second line and the final bound hold
    Severity: constant"""
    point = AttentionSublayer.draw(seed)
    n, D = point.sizes
    kernel = torch.linalg.svd(point.X_norm)[2][n:]  # directions that no token has: X_N W_K = 0 for W_K made of them
    point = replace(point, W_K=kernel.T @ Draw(seed + 1).normal(len(kernel), D), W_Q=1e4 * point.W_Q)
    N, K = point.X_norm, dense(Commutation(n, n))
    first = front(point) @ torch.kron(eye(n), N @ point.W_K @ point.W_Q.T)
    second = front(point) @ K @ torch.kron(eye(n), N @ point.W_Q @ point.W_K.T)
    third = norm(torch.kron(point.closed.A, point.W_O.T @ point.W_V.T))
    left = norm(point.gradient("gamma"))
    scale = norm(point.q) * math.sqrt(n) * norm(layer_norm(point.X))
    printed, corrected = scale * (2 * norm(first) + third), scale * (norm(first) + norm(second) + third)
    end = end_ratio(point, "gamma", constants(point))
    detail = f"X_N W_K = 0 and W_Q large; left over right side of the end bound there {end:.2g}"
    return violated([left, end], [printed, 1.0], detail, corrected=[corrected, 1.0])


@claim("thm4.2-bound-qk", "App. B.2, end bounds of Theorem 4.2", "HOLDS")
def bound_qk(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial W_\bullet}\|_F\le\frac{\Phi}{\|W_\bullet\|_F}$ for $W_K$, $W_Q$; $\Phi =
    \frac{(n\sqrt D)^3}{\sqrt D}\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\frac{\partial A}{\partial
    M}\|_F\|W_K\|_F\|W_Q\|_F\|W_V\|_F\|W_O\|_F\|\gamma\|_F^3$"""
    return end_bound([*sample(seed)[:-1], opposite(seed, 64)], "W_Q", "W_K")


@claim("thm4.2-bound-vo", "App. B.2, end bounds of Theorem 4.2", "HOLDS")
def bound_vo(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial W_\bullet}\|_F\le\frac{\Psi}{\|W_\bullet\|_F}$ for $W_V$, $W_O$; $\Psi = n\sqrt
    D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|A\|_F\|W_V\|_F\|W_O\|_F\|\gamma\|_F$"""
    return end_bound([*sample(seed), attaining(seed, 128)], "W_V", "W_O")


@claim("thm4.2-bound-gamma", "App. B.2, end bounds of Theorem 4.2", "HOLDS")
def bound_gamma(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial\gamma}\|_F\le\frac{2\Phi+\Psi}{\|\gamma\|_F}$"""
    return bounded(by_leading_term(seed, 1, lambda c: 2 * c.phi + c.psi), "points where 2 Phi > Psi; others")


def by_leading_term(seed: int, power: int, right: Callable[[Constants], float]) -> list[WorstRatio]:
    """Return the worst ratios of a bound on dQ/dgamma, where 2 Phi leads, and where Psi does."""

    def ratio(point: AttentionSublayer, leads: bool) -> float:
        c = constants(point)
        return (norm(point.gradient("gamma")) * norm(point.gamma)) ** power / right(c) if (2 * c.phi > c.psi) == leads else 0.0

    points = [*sample(seed), attaining(seed, 128)]
    return [worst(lambda p, x=x: ratio(p, x), points) for x in (True, False)]  # type: ignore[misc]


@claim("ours/thm4.2-sharper", "Sharpness Disparity, Theorem 4.2", "HOLDS")
def sharper(seed: int) -> Evidence:
    r"""the end bounds hold with $\sqrt{n(D-1)}$ in place of $n\sqrt D$; those of $W_V$, $W_O$ and $\gamma$ are then attained
    by one token"""
    found = []
    for point in sample(seed)[:-1]:
        n, D = point.sizes
        c = constants(point, NormedInput.a_priori(n, D, 1.0).x)
        found += [end_ratio(point, letter, c) for letter in (*WEIGHTS, "gamma")]
    point = attaining(seed)
    c = constants(point, NormedInput.a_priori(*point.sizes, 1.0).x)
    tight = [end_ratio(point, letter, c) for letter in ("W_V", "W_O", "gamma")]
    return bounded([*found, *tight], f"{len(found)} ratios; at one token {min(tight):.12f} or more", attained=1 - 1e-9)


def opposite(seed: int, D: int = 5) -> AttentionSublayer:
    """Return two opposite tokens that see both equally, and dQ/dY of opposite rows along W_O: W_Q's bound is attained."""
    axis = eye(D)[:1]
    X, W_V, W_O = torch.cat([axis, ones(D).T / D - axis]), axis.T @ axis, axis.T @ Draw(seed).normal(1, D)
    W_Q = axis.T @ eye(D)[1:2]  # at right angles to W_K
    return AttentionSublayer(X, 2 * axis, W_Q, axis.T @ axis, W_V, W_O, torch.cat([W_O[0], -W_O[0]])[None])


@claim("ours/thm4.2-any-length", "Sharpness Disparity, Theorem 4.2", "HOLDS", uses=[theorem_4_2])
def any_length(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial W_Q}\|_F\le\frac{\sqrt n\,(D-1)^{3/2}\|\gamma\|^3}{\sqrt
    D}\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|W_K\|_2\|W_V\|_2\|W_O\|_2$, and with $W_Q$ for $W_K$: no covariance of
    tokens is above the square of the longest one. $\Phi$ has $n^3$ and $\|\frac{\partial A}{\partial M}\|_F$ there; attained
    by two opposite tokens"""
    found = []
    tight = opposite(seed)
    for point in [*sample(seed)[:-1], tight]:
        inputs = NormedInput.a_priori(*point.sizes, norm(point.gamma))
        q, k, v, o = (matrix_norm(W) for W in point.weights)
        upper = theorem_4_2(AttentionGradientNorms(inputs, norm(point.q), point.sizes[1], (q,), (k,), (v,), o)).upper
        letters = ("W_Q",) if point is tight else (*WEIGHTS, "gamma")
        found += [norm(point.gradient(letter)) / upper[letter] for letter in letters]
    return bounded(
        found, f"{len(found)} ratios: 4 shapes, with and without a causal mask; two opposite tokens", attained=1 - 1e-9
    )


@claim("thm4.2-s-gamma", "Theorem 4.2, bounds on S", "HOLDS")
def s_gamma(seed: int) -> Evidence:
    r"""$\mathcal{S}(\gamma) = O\left(\frac{\Phi^2+\Psi^2}{D\,\|\gamma\|_F^2}\right)$"""
    found = by_leading_term(seed, 2, lambda c: 5 * (c.phi**2 + c.psi**2))
    return bounded(found, "S D ||gamma||^2 over 5 (Phi^2 + Psi^2), where 2 Phi > Psi; elsewhere")


@claim("thm4.2-support", "Sec. 4.2, after Theorem 4.2", "DOES NOT FOLLOW")
def support(seed: int) -> Evidence:
    r"""since $D^2\|W_\bullet\|_F^2\gg D\,\|\gamma\|_F^2$, the theorem supports
    $\mathcal{S}(\mathrm{QK}),\mathcal{S}(\mathrm{VO})\ll\mathcal{S}(\mathrm{Norm})$
    Correct: the bounds hold on each gradient and leave the order open"""
    point = AttentionSublayer.draw(seed)
    n, D = point.sizes
    to_gamma = torch.stack([replace(point, q=row[None]).gradient("gamma")[0] for row in eye(n * D)])
    kernel = torch.linalg.svd(to_gamma.T)[2][D:]  # directions dQ/dY that do not feel gamma
    point = replace(point, q=Draw(seed + 1).normal(1, len(kernel)) @ kernel + 1e-3 * point.q / norm(point.q))
    of_gamma, c = norm(point.gradient("gamma")) ** 2 / D, constants(point)
    least = min(norm(point.gradient(letter)) ** 2 / D**2 for letter in WEIGHTS)
    larger = min(D**2 * norm(W) ** 2 for W in point.weights) / (D * norm(point.gamma) ** 2)
    detail = (
        f"least S of the four weights over S(gamma) where D^2 ||W||^2 / (D ||gamma||^2) is {larger:.3g} or more; the bounds there"
    )
    of_bounds = [end_ratio(point, x, c) for x in (*WEIGHTS, "gamma")]
    return violated([least / of_gamma, *of_bounds], [1.0] * 6, detail, corrected=[math.inf, *[1.0] * 5], above=10)


@claim("thm4.2-qk-vo", "Sec. 4.2, after Theorem 4.2", "HOLDS")
def qk_vo(seed: int) -> Evidence:
    r"""the theorem does not establish $\mathcal{S}(\mathrm{QK}) < \mathcal{S}(\mathrm{VO})$"""
    point = AttentionSublayer.draw(seed, std=0.3)
    c = constants(point)
    of_bounds = (c.psi / norm(point.W_V)) / (c.phi / norm(point.W_Q))
    return bounded(of_bounds, "the bound on W_V over that on W_Q: the theorem's right sides stand in the other order")


@claim("thm4.2-looseness", "Theorem 4.2, as bounds on measured gradients", "LOOSE")
def looseness(seed: int) -> Evidence:
    r"""$\Phi/\|\theta\|_F$ and $(2\Phi+\Psi)/\|\theta\|_F$ bound the gradients at a width and an initialisation in use"""
    draw, n, D = Draw(seed), 64, 64
    X, (W_Q, W_K, W_V, W_O) = draw.normal(n, D), (draw.normal(D, D, std=0.02) for _ in range(4))
    point = AttentionSublayer(X, ones(D).T, W_Q, W_K, W_V, W_O, draw.normal(1, n * D), True)
    squares = [(a.diag() - torch.outer(a, a)).square().sum() for a in point.closed.A]
    c = constants(point, dA=math.sqrt(float(sum(squares))))
    found = {letter: end_ratio(point, letter, c) for letter in ("W_Q", "W_K", "gamma")}
    return loose(found.values(), "n = D = 64, causal, standard deviation 0.02; S is looser by the square", factor=1e9)
