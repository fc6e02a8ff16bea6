"""Theorem 4.1: gradients and sharpness of a feed-forward network and its norm, and their bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from derivations.activation import ActivationAt
from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt
from hessiankit.blocks import TransformerBlock, initialise
from papers import second as again
from papers.ascent import worst
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, loose, relative_error, small, violated, wrong
from papers.norms import matrix_norm
from papers.notation import dense, eye, if_it_conforms, layer_norm, norm, ones
from papers.registry import claim
from papers.sharpness_disparity.gradient_bounds import NormedInput
from papers.sharpness_disparity.points import FeedForwardPoint

VOCABULARY = 9
"""d of the paper, which is not the width D."""
KINKED = ("relu", "leaky_relu")


@claim("thm4.1-w1", "Theorem 4.1; App. B.1", "HOLDS", uses=[FeedForwardAt.jacobian])
def w1(seed: int) -> Evidence:
    r"""$\frac{\partial\mathcal{Q}}{\partial W_1} = \frac{\partial\mathcal{Q}}{\partial Y}(I_n\otimes W_2^\top)\frac{\partial
    A}{\partial M}(X_{\mathrm{Norm}}\otimes I_M)$"""
    found, references = [], []
    for activation in KINKED:
        point = FeedForwardPoint.draw(seed, activation)
        n, _, M = point.sizes
        inner = torch.kron(eye(n), point.W_2.T.contiguous()) @ point.dA @ torch.kron(point.X_norm, eye(M))
        found += [point.q @ inner, point.closed_gradient("W_1")]
        references += [point.gradient("W_1")] * 2
    return agrees(found, references, "as printed and the closed form against autograd, ReLU and Leaky ReLU")


@claim("thm4.1-w2", "Theorem 4.1", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def w2(seed: int) -> Evidence:
    r"""$\frac{\partial\mathcal{Q}}{\partial W_2} = \frac{\partial\mathcal{Q}}{\partial
    Y}\left(X_{\mathrm{Norm}}W_1\odot\frac{\partial A}{\partial M}\right)\otimes I_d$
    Correct: $\frac{\partial\mathcal{Q}}{\partial Y}(A\otimes I_D)$: the Hadamard product is of an $n\times M$ with an
    $nM\times nM$ matrix, and $I_d$ has the size of the vocabulary
    Severity: slip of print"""
    point = FeedForwardPoint.draw(seed)
    n, D, M = point.sizes
    reference, U, slopes = point.gradient("W_2"), point.X_norm @ point.W_1, point.dA.diagonal().reshape(n, M)
    readings = {
        "as printed": lambda: point.q @ torch.kron(U * point.dA, eye(VOCABULARY)),
        "sigma' in place of dA/dM": lambda: point.q @ torch.kron(U * slopes, eye(VOCABULARY)),
        "the product with dQ/dY first": lambda: torch.kron(point.q @ (U * slopes), eye(D)),
    }
    printed, closed = [if_it_conforms(formula) for formula in readings.values()], point.closed_gradient("W_2")
    return wrong(printed, [reference] * 3, "no reading conforms: " + ", ".join(readings), corrected=[closed] * 3)


@claim("b1-w2", "App. B.1, dY/dW_2", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian, ActivationAt])
def b1_w2(seed: int) -> Evidence:
    r"""$\frac{\partial Y}{\partial W_2} = A\otimes I_D$ $= (X_{\mathrm{Norm}}W_1\odot\frac{\partial A}{\partial M})\otimes
    I_D$
    Correct: $A\otimes I_D$, the first equation, holds for every $\sigma$; the second with the $n\times M$ matrix $\sigma'(M)$
    for $\frac{\partial A}{\partial M}$
    Severity: slip of print
    Follows: thm4.1-w2"""
    point = FeedForwardPoint.draw(seed, "leaky_relu")
    _, D, _ = point.sizes
    U = point.X_norm @ point.W_1
    reference = dense(point.closed.jacobian("W_2"))
    autograd = jacobian_of(lambda W_2: F.leaky_relu(U) @ W_2, point.W_2)
    printed = if_it_conforms(lambda: torch.kron(U * point.dA, eye(D)))
    corrected = [reference, torch.kron(U * ActivationAt("leaky_relu", U).first, eye(D))]
    return wrong([printed] * 2, [autograd] * 2, "the Hadamard product does not conform", corrected=corrected)


@claim("thm4.1-gamma", "Theorem 4.1", "WRONG AS PRINTED", uses=[LayerNormAt, FeedForwardAt.jacobian])
def gamma(seed: int) -> Evidence:
    r"""$\frac{\partial\mathcal{Q}}{\partial\gamma} = \frac{\partial\mathcal{Q}}{\partial Y}(I_n\otimes
    W_2^\top)\frac{\partial A}{\partial M}(I_n\otimes
    W_1^\top)\,\mathrm{diag}(\mathrm{vec}(X_{\mathrm{std}}))(1_{n\times1}\otimes I_d)$
    Correct: $I_D$ in place of $I_d$, as in App. B.1: $d$ is the vocabulary size
    Severity: slip of print"""
    point, reference = FeedForwardPoint.draw(seed), FeedForwardPoint.draw(seed).gradient("gamma")
    printed = if_it_conforms(lambda: gamma_formula(point, VOCABULARY))
    corrected, detail = [gamma_formula(point, 5), point.closed_gradient("gamma")], f"D = 5, d = {VOCABULARY}: does not conform"
    return wrong([printed] * 2, [reference] * 2, detail, corrected=corrected)


def gamma_formula(point: FeedForwardPoint, d: int) -> torch.Tensor:
    """Return the theorem's row for gamma, with I_d."""
    n = point.sizes[0]
    outer = torch.kron(eye(n), point.W_2.T.contiguous()) @ point.dA @ torch.kron(eye(n), point.W_1.T.contiguous())
    return point.q @ outer @ layer_norm(point.X).reshape(-1).diag() @ torch.kron(ones(n), eye(d))


@claim("b1-residual", "App. B.1, first line", "WRONG AS PRINTED", uses=[FeedForwardAt])
def b1_residual(seed: int) -> Evidence:
    """'the transformation from $X^{(l-1)}$ to $X^{(l-1/2)}$'
    Correct: from $X^{(l-1/2)}$ to $X^{(l)}$, as the display below it has it
    Severity: slip of print"""
    block = TransformerBlock(5, 7, placement="pre", output_projection=True).double()
    initialise(block, seed=seed)
    X = Draw(seed).normal(4, 5)
    Y = X + block.attention(F.layer_norm(X, (5,), eps=1e-5))
    network = block.feedforward

    def through(Z: torch.Tensor) -> torch.Tensor:
        N = F.layer_norm(Z, (5,), eps=1e-5)
        return Z + FeedForwardAt(N, network.W_1.detach(), network.W_2.detach(), residual=False).value

    W = {name.split(".")[-1]: p for name, p in block.named_parameters() if "norm" not in name}
    second = again.block(X, W, 1, norms="af", norm=lambda Z: F.layer_norm(Z, (5,), eps=1e-5))
    detail = "the display applied to the two inputs"
    return wrong(through(X), block(X), detail, corrected=through(Y.detach()), second=second, by="torch's attention and norms")


@claim("thm4.1-activation", "App. B.1, 'it holds that'", "HOLDS UNDER ASSUMPTION", uses=[ActivationAt])
def activation(seed: int) -> Evidence:
    r"""$\sigma(z) = z\,\sigma'(z)$
    Needs: ReLU and Leaky ReLU; GPT-2 has GELU, LLaMA a gate with SiLU
    Correct: $\frac{\partial Y}{\partial W_2} = A\otimes I_D$ needs no such identity"""
    U = Draw(seed).normal(4, 7)
    errors = {
        kind: relative_error(U * ActivationAt(kind, U).first, ActivationAt(kind, U).value) for kind in (*KINKED, "gelu", "silu")
    }
    holds = small([errors[kind] for kind in KINKED], "ReLU and Leaky ReLU")
    return assumed(holds, max(errors["gelu"], errors["silu"]), above=0.05)


@claim("ours/ffn-euler", "Sharpness Disparity, Theorem 4.1", "HOLDS", uses=[FeedForwardAt.jacobian])
def euler(seed: int) -> Evidence:
    r"""for (Leaky) ReLU $\langle W_1, \nabla_{W_1}\mathcal{Q}\rangle = \langle W_2, \nabla_{W_2}\mathcal{Q}\rangle =
    \langle\gamma, \nabla_\gamma\mathcal{Q}\rangle = \langle\nabla_Y\mathcal{Q}, F\rangle$, $F$ the network's output: so
    $\|\nabla_\theta\mathcal{Q}\|\ge|\langle\nabla_Y\mathcal{Q}, F\rangle|/\|\theta\|$"""
    point = FeedForwardPoint.draw(seed, "leaky_relu")
    found = torch.stack([point.gradient(x) @ getattr(point, x).reshape(-1) for x in ("W_1", "W_2", "gamma")])
    scale = point.q.norm() * point.closed.value.norm()
    expected = (point.q @ point.closed.value.reshape(-1)).expand_as(found)
    return small((found - expected).abs() / scale, "autograd's gradients; errors relative to the product of the norms")


# Theorem 4.1: bounds on the gradients and on the sharpness of a feed-forward network and its norm
LETTERS = ("W_1", "W_2", "gamma")


def psi(point: FeedForwardPoint, constant: float | None = None) -> float:
    r"""Return Psi of Theorem 4.1 as printed; ``constant`` in place of n sqrt(D)."""
    n, D, _ = point.sizes
    c = n * math.sqrt(D) if constant is None else constant
    return c * norm(point.q) * norm(point.dA) * norm(point.W_1) * norm(point.W_2) * norm(point.gamma)


def end_ratio(point: FeedForwardPoint, letter: str, constant: float | None = None) -> float:
    """Return left over right side of ||dQ/dtheta|| <= Psi / ||theta||."""
    return norm(point.gradient(letter)) * norm(getattr(point, letter)) / psi(point, constant)


def attaining(seed: int, D: int = 5) -> FeedForwardPoint:
    """Return one token, X, gamma and W_1 along one axis, M = 1 and dQ/dY along W_2: the bounds with sqrt(n(D-1)) are attained."""
    draw = Draw(seed)
    axis = eye(D)[:1]
    W_2 = draw.normal(1, D)
    return FeedForwardPoint(axis, 2 * axis, 3 * axis.T, W_2, W_2.clone())


def sample(seed: int) -> list[FeedForwardPoint]:
    """Return generic points of several shapes, and the one that attains the sharp bounds."""
    shapes = [(1, 3, 1), (2, 4, 3), (4, 5, 7), (7, 3, 2)]
    drawn = [FeedForwardPoint.draw(10 * seed + k, "leaky_relu", *shape) for k in range(4) for shape in shapes]
    return [*drawn, attaining(seed)]


@claim("b1-x-std", "App. B.1, norm of X_std", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt])
def x_std(seed: int) -> Evidence:
    r"""$\|X_{\mathrm{std}}\|_F = \sqrt{nD}$
    Needs: $\epsilon = 0$ and no constant row; with $\epsilon$ it is smaller"""
    X = Draw(seed).normal(4, 5)
    holds = agrees(LayerNormAt(X).value.norm(), math.sqrt(20), "n = 4, D = 5")
    return assumed(holds, 1 - norm(LayerNormAt(X, eps=0.1).value) / math.sqrt(20), above=1e-3)


@claim("b1-x-norm", "App. B.1, norm of X_Norm", "LOOSE", uses=[LayerNormAt])
def x_norm(seed: int) -> Evidence:
    r"""$\|X_{\mathrm{Norm}}\|_F\le n\sqrt D\,\|\gamma\|_F$
    Correct: $\sqrt{n(D-1)}\,\|\gamma\|_F$, attained by one-hot rows and gain; $\sqrt{nD}\,\|\gamma\|_F$ for RMSNorm"""
    draw, n, D = Draw(seed), 9, 5
    axis = eye(D)[:1]
    cases = [(draw.normal(n, D), draw.normal(D)) for _ in range(20)] + [(axis.expand(n, D), axis[0])]
    found = [norm(LayerNormAt(X, gain).value) / (n * math.sqrt(D) * norm(gain)) for X, gain in cases]
    return loose(found, "n = 9, 20 generic points and the one that attains the sharp bound", factor=math.sqrt(n))


@claim("b1-w2-estimate-kronecker", "App. B.1, estimate for W_2, second line", "WRONG AS PRINTED", uses=[matrix_norm])
def kronecker_estimate(seed: int) -> Evidence:
    r"""$\|B\otimes I_D\|_F\le\|B\|_F\|I_D\|_2$
    Correct: $\|B\otimes I_D\|_F = \sqrt D\,\|B\|_F$; the end bound survives through $\|\frac{\partial\mathcal{Q}}{\partial
    Y}(A\otimes I_D)\|\le\|\frac{\partial\mathcal{Q}}{\partial Y}\|\,\|A\|_2$
    Severity: constant"""
    point = FeedForwardPoint.draw(seed)
    A, D = point.closed.sigma.value, point.sizes[1]
    left, printed, corrected = norm(torch.kron(A, eye(D))), norm(A) * matrix_norm(eye(D)), math.sqrt(D) * norm(A)
    whole, survives = norm(point.gradient("W_2")), norm(point.q) * matrix_norm(A)
    detail = "D = 5, sqrt(D) = 2.236; ||dQ/dY (A x I)|| and its bound, which survives"
    return violated([left, whole], [printed, survives], detail, corrected=[corrected, survives])


@claim("b1-w2-estimate-jacobian", "App. B.1, estimate for W_2, first to second line", "WRONG AS PRINTED", uses=[matrix_norm])
def jacobian_estimate(seed: int) -> Evidence:
    r"""$\|\frac{\partial Y}{\partial W_2}\|_F\le\|\frac{\partial A}{\partial M}\|_F\|X_{\mathrm{Norm}}W_1\|_F$
    Correct: true for the spectral norm $\|\frac{\partial Y}{\partial W_2}\|_2 = \|A\|_2$
    Severity: constant
    Follows: b1-w2-estimate-kronecker"""
    point = attaining(seed, D=64)
    J = jacobian_of(lambda W_2: torch.relu(point.X_norm @ point.W_1) @ W_2, point.W_2)
    right = norm(point.dA) * norm(point.X_norm @ point.W_1)
    detail = "n = 1, M = 1, D = 64, sqrt(D) = 8: the Frobenius norm and the spectral norm"
    return violated([norm(J), matrix_norm(J)], [right, right], detail, corrected=[8 * right, right])


@claim("b1-gamma-estimate-kronecker", "App. B.1, estimate for gamma, fourth line", "WRONG AS PRINTED", uses=[matrix_norm])
def gamma_kronecker(seed: int) -> Evidence:
    r"""$\|I_n\otimes W\|_F\le\|I_n\|_2\|W\|_F$
    Correct: $\|I_n\otimes W\|_F = \sqrt n\,\|W\|_F$; with $\|I_n\otimes W\|_2 = \|W\|_2$ the end bound survives
    Severity: constant
    Follows: b1-w2-estimate-kronecker"""
    W = Draw(seed).normal(5, 7)
    big = torch.kron(eye(4), W)
    exact = math.sqrt(sum(float(w) ** 2 for row in W for w in row) * 4)
    return violated(norm(big), norm(W), "n = 4, sqrt(n) = 2", corrected=2 * norm(W), second=exact, by="the sum over the entries")


@claim("b1-gamma-estimate-ones", "App. B.1, estimate for gamma, last lines", "WRONG AS PRINTED", uses=[matrix_norm])
def gamma_ones(seed: int) -> Evidence:
    r"""$\|1_{n\times1}\otimes I_D\|_F\le\|1_{n\times1}\|_F\|I_D\|_2$
    Correct: $\|1_{n\times1}\otimes I_D\|_F = \sqrt{nD}$; its spectral norm is $\sqrt n$
    Severity: constant
    Follows: b1-w2-estimate-kronecker"""
    big = torch.kron(ones(4), eye(5))
    detail = "n = 4, D = 5: sqrt(20) against sqrt(4)"
    exact = math.sqrt(sum(int(x) for x in big.reshape(-1)))
    return violated(
        norm(big), norm(ones(4)), detail, corrected=math.sqrt(20), second=exact, by="the number of ones", at={"1 x I": big}
    )


@claim("b1-gamma-jacobian", "App. B.1, estimate for gamma", "LOOSE", uses=[LayerNormAt])
def gamma_jacobian(seed: int) -> Evidence:
    r"""$\|\mathrm{diag}(\mathrm{vec}(X_{\mathrm{std}}))(1_{n\times1}\otimes I_D)\|_F\le n\sqrt D$
    Correct: it is $\sqrt{nD}$"""
    X, gain = Draw(seed).normal(9, 5), ones(5)[:, 0]
    found = norm(dense(LayerNormAt(X, gain).jacobian("gamma"))) / (9 * math.sqrt(5))
    return loose(found, "n = 9", factor=math.sqrt(9))


@claim("thm4.1-bounds", "App. B.1, end bounds of Theorem 4.1", "HOLDS")
def end_bounds(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial\theta}\|_F\le\frac{\Psi}{\|\theta\|_F}$ for $\theta = W_1, W_2, \gamma$, $\Psi
    = n\sqrt D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\frac{\partial A}{\partial M}\|_F\|W_1\|_F\|W_2\|_F\|\gamma\|_F$"""
    points = [*sample(seed), attaining(seed, D=128)]
    found = [worst(lambda p, x=x: end_ratio(p, x), points) for x in LETTERS]  # type: ignore[misc]
    return bounded(found, "17 points of 4 shapes, and one token of width 128; W_1, W_2, gamma")


@claim("ours/thm4.1-sharper", "Sharpness Disparity, Theorem 4.1", "HOLDS")
def sharper(seed: int) -> Evidence:
    r"""the three end bounds hold with $\sqrt{n(D-1)}$ in place of $n\sqrt D$, and are then attained at $n = 1$"""
    found = []
    for point in sample(seed):
        n, D, _ = point.sizes
        found += [end_ratio(point, letter, NormedInput.a_priori(n, D, 1.0).x) for letter in LETTERS]
    tight = [end_ratio(attaining(seed), letter, NormedInput.a_priori(1, 5, 1.0).x) for letter in LETTERS]
    return bounded(found, f"{len(found)} ratios; where they are attained {min(tight):.12f} or more", attained=1 - 1e-9)


@claim("thm4.1-s-w", "Theorem 4.1, bound on S", "HOLDS UNDER ASSUMPTION")
def s_w(seed: int) -> Evidence:
    r"""$\mathcal{S}(W_\bullet) = O\left(\frac{\Psi^2}{D^2\|W_\bullet\|_F^2}\right)$; 'the denominators ($D^2$ or $D$) reflect
    the number of parameters'
    Needs: $M\ge cD$: the number of parameters is $DM$, and the $O$ hides $D/M$
    Correct: $\mathcal{S}(W_\bullet)\le\frac{\Psi^2}{DM\,\|W_\bullet\|_F^2}$"""
    points = [*sample(seed), attaining(seed, D=128)]
    exact = [worst(lambda p, x=x: end_ratio(p, x) ** 2, points, steps=20) for x in ("W_1", "W_2")]  # type: ignore[misc]
    narrow = attaining(seed, D=64)
    without = end_ratio(narrow, "W_1") ** 2 * 64  # S D^2 ||W||^2 / Psi^2 at M = 1
    return assumed(bounded(exact, "S D M ||W||^2 / Psi^2"), without, above=10)


@claim("thm4.1-s-gamma", "Theorem 4.1, bound on S", "HOLDS")
def s_gamma(seed: int) -> Evidence:
    r"""$\mathcal{S}(\gamma) = O\left(\frac{\Psi^2}{D\,\|\gamma\|_F^2}\right)$"""
    found = worst(lambda p: end_ratio(p, "gamma") ** 2, [*sample(seed), attaining(seed, D=128)], steps=20)
    return bounded(found, "S D ||gamma||^2 / Psi^2, constant 1")


@claim("thm4.1-support", "Sec. 4.2, after Theorem 4.1", "DOES NOT FOLLOW")
def support(seed: int) -> Evidence:
    r"""since $D^2\|W_\bullet\|_F^2\gg D\,\|\gamma\|_F^2$, the theorem supports
    $\mathcal{S}(\mathrm{FFN})\ll\mathcal{S}(\mathrm{Norm})$
    Correct: the order of two upper bounds leaves that of the sharpnesses open: $\mathcal{S}(W_1)/\mathcal{S}(\gamma)$ can be
    anything at one value of $D^2\|W_1\|^2/(D\|\gamma\|^2)$, by the choice of $\frac{\partial\mathcal{Q}}{\partial Y}$"""
    point = FeedForwardPoint.draw(seed)
    n, D, M = point.sizes
    to_gamma = torch.stack([replace(point, q=row[None]).gradient("gamma")[0] for row in eye(n * D)])  # dQ/dgamma = q to_gamma
    kernel = torch.linalg.svd(to_gamma.T)[2][D:]  # directions dQ/dY that do not feel gamma
    point = replace(point, q=Draw(seed + 1).normal(1, len(kernel)) @ kernel + 1e-3 * point.q / norm(point.q))
    larger = D**2 * norm(point.W_1) ** 2 / (D * norm(point.gamma) ** 2)
    sharpness = norm(point.gradient("W_1")) ** 2 / (D * M) / (norm(point.gradient("gamma")) ** 2 / D)
    detail = f"S(W_1) / S(gamma) where D^2 ||W_1||^2 / (D ||gamma||^2) = {larger:.3g}; the bounds there"
    of_bounds = [end_ratio(point, letter) for letter in LETTERS]
    return violated([sharpness, *of_bounds], [1.0] * 4, detail, corrected=[math.inf, 1.0, 1.0, 1.0], above=100)


@claim("thm4.1-looseness", "Theorem 4.1, as bounds on measured gradients", "LOOSE")
def looseness(seed: int) -> Evidence:
    r"""$\Psi/\|\theta\|_F$ bounds $\|\nabla_\theta\mathcal{Q}\|$ at a width and an initialisation in use"""
    draw, n, D, M = Draw(seed), 64, 64, 256
    X, W_1, W_2 = draw.normal(n, D), draw.normal(D, M, std=0.02), draw.normal(M, D, std=0.02)
    q, gain = draw.normal(1, n * D), ones(D).T
    point = FeedForwardPoint(X, gain, W_1, W_2, q)
    active = math.sqrt(float((layer_norm(X) @ W_1 > 0).sum()))  # ||dA/dM||_F of ReLU
    bound = n * math.sqrt(D) * norm(q) * active * norm(W_1) * norm(W_2) * norm(gain)
    found = {letter: norm(point.gradient(letter)) * norm(getattr(point, letter)) / bound for letter in LETTERS}
    return loose(found.values(), "n = D = 64, M = 256, standard deviation 0.02; S is looser by the square", factor=1e4)


@claim("ours/ffn-rescaling", "Sharpness Disparity, Eq. 1", "HOLDS")
def rescaling(seed: int) -> Evidence:
    r"""$(\gamma, W_1)\to(c\gamma, W_1/c)$ leaves the function as it is and multiplies $\mathcal{S}(W_1)/\mathcal{S}(\gamma)$
    by $c^4$: the order of Eq. 1 is one of a parametrisation"""
    point = FeedForwardPoint.draw(seed)
    c = 10.0
    other = replace(point, gamma=c * point.gamma, W_1=point.W_1 / c)

    def quotient(at: FeedForwardPoint) -> float:
        return norm(at.gradient("W_1")) ** 2 / norm(at.gradient("gamma")) ** 2

    same = (other.closed.value - point.closed.value).abs().max() / point.closed.value.abs().max()
    return small(
        [float(same), abs(quotient(other) / quotient(point) / c**4 - 1)], "c = 10: the function, and the quotient over 10^4"
    )
