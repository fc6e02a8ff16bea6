"""Theorem 3.3: the Jacobian from the first block to the last, its factors, A, B and the bounds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt, RMSNormAt
from hessiankit.blocks import TransformerBlock
from papers.ascent import worst
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.curse_of_depth.stacks import (
    Network,
    StackSizes,
    attention_head,
    block_jacobian,
    exponent,
    layers,
    log_product,
    make_stack,
    stream,
)
from papers.drawing import Draw
from papers.evidence import bounded, loose, measured, readings, relative_error, violated, wrong
from papers.notation import dense, layer_norm, rms_norm, spectral
from papers.registry import claim
from papers.second import largest_singular_value

SMALL: dict[str, Any] = {"d_model": 6, "d_ff": 8, "n_heads": 1}


def factors(blocks: list[TransformerBlock], X: Tensor) -> list[Tensor]:
    """Return dy_l/dx_l of each block, from the closed forms of its parts."""
    out = []
    for block in blocks:
        W: Any = block.attention
        network: Any = block.feedforward
        norm = RMSNormAt(X)
        mask = torch.ones(len(X), len(X), dtype=torch.bool).tril()
        attention = AttentionAt(norm.value, W.W_Q, W.W_K, W.W_V, W.W_O, mask=mask)
        Y = X + attention.value
        second = RMSNormAt(Y)
        feedforward = FeedForwardAt(second.value, network.W_1, network.W_2, residual=False)
        eye = torch.eye(X.numel(), dtype=torch.float64)
        inner = eye + dense(attention.jacobian("X") @ norm.jacobian("X"))
        out.append((eye + dense(feedforward.jacobian("Y") @ second.jacobian("X"))) @ inner)
        X = Y + feedforward.value
    return out


def chain(matrices: list[Tensor]) -> Tensor:
    """Return the product, the last factor on the left."""
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    return product


@claim(
    "eq8",
    "Theorem 3.3, Eq. 8; Lemma A.2, Eqs. 35 and 37",
    "WRONG AS PRINTED",
    uses=[AttentionAt.jacobian, FeedForwardAt.jacobian, RMSNormAt],
)
def eq8(seed: int) -> Evidence:
    r"""$\frac{\partial y_L}{\partial x_1} = \prod_{\ell=1}^{L-1}\left(\frac{\partial y_\ell}{\partial
    x'_\ell}\cdot\frac{\partial x'_\ell}{\partial x_\ell}\right)$
    Correct: $L$ factors, $\prod_{\ell=1}^L$, since $y_L = x_{L+1}$
    Severity: slip of print"""
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found = factors(blocks, X)
    reference = jacobian_of(lambda X: stream(blocks, X)[-1], X)
    return wrong(chain(found[:-1]), reference, "three blocks against autograd", corrected=chain(found), above=0.05)


@claim("eq8-order", "Theorem 3.3, Eq. 8", "VAGUE", uses=[AttentionAt.jacobian])
def eq8_order(seed: int) -> Evidence:
    r"""the order of the factors of $\prod_\ell$
    Correct: $\ell$ falls from left to right; the factors do not commute"""
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found, reference = factors(blocks, X), jacobian_of(lambda X: stream(blocks, X)[-1], X)
    errors = {"rising": relative_error(chain(found[::-1]), reference), "falling": relative_error(chain(found), reference)}
    return readings(errors, "relative error against autograd")


@claim("eq35", "Lemma A.2, Eq. 35", "WRONG AS PRINTED")
def eq35(seed: int) -> Evidence:
    r"""$\prod_{n=1}^{L-1}(\frac{\partial y_\ell}{\partial x'_\ell}\cdot\frac{\partial x'_\ell}{\partial x_\ell})$, with
    factors that do not read $n$
    Correct: the product is over $\ell$, from 1 to $L$
    Severity: slip of print"""
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found, reference = factors(blocks, X), jacobian_of(lambda X: stream(blocks, X)[-1], X)
    powers, three = [torch.linalg.matrix_power(J, 2) for J in found], [reference] * 3
    return wrong(powers, three, "each l, the power L - 1 = 2", corrected=[chain(found)] * 3, above=0.05)


@claim("eq38", "App. A.2.1, Eqs. 38, 39 and 42", "HOLDS", uses=[FeedForwardAt.jacobian, AttentionAt.jacobian])
def eq38(seed: int) -> Evidence:
    r"""$\|\frac{\partial y}{\partial x'}\|_2\le1 + \|\frac{\partial
    f}{\partial\,\mathrm{LN}}\|_2\|\frac{\partial\,\mathrm{LN}}{\partial x'}\|_2$ for the network and for the attention, and
    $\|\frac{\partial y}{\partial x}\|_2\le\|\frac{\partial y}{\partial x'}\|_2\|\frac{\partial x'}{\partial x}\|_2$"""

    def ratios(theta: Tensor) -> list[float]:
        """Return left over right side for the attention, the network and the block whose numbers are ``theta``."""
        X, *W = (part.reshape(-1, 8 if k == 5 else 6) for k, part in enumerate(theta.split([18, *[36] * 4, 48, 48])))
        blocks, found = [], []
        for name in ("X", "Y"):
            N = rms_norm(X)
            branch = AttentionAt(N, *W[:4]) if name == "X" else FeedForwardAt(N, W[4], W[5], residual=False)
            outer, inner = dense(RMSNormAt(X).jacobian("X")), dense(branch.jacobian(name))
            blocks.append(torch.eye(18, dtype=torch.float64) + inner @ outer)
            found.append(spectral(blocks[-1]) / (1 + spectral(inner) * spectral(outer)))
            X = X + branch.value
        return [*found, spectral(blocks[1] @ blocks[0]) / (spectral(blocks[1]) * spectral(blocks[0]))]

    points = [Draw(10 * seed + k).normal(258) for k in range(5)]
    found = [worst(lambda theta, k=k: ratios(theta)[k], points, steps=60) for k in range(3)]  # type: ignore[misc]
    return bounded(found, "5 points; the attention, the network, the block")


@claim("norm-of-w1", "App. A.2.1, below Eq. 39", "WRONG AS PRINTED")
def norm_of_w1(seed: int) -> Evidence:
    r"""$\|W_1\|_2\sim\sigma_1\sqrt{d + \sqrt{d_{\mathrm{FFN}}}}$
    Correct: $\sigma_1(\sqrt d + \sqrt{d_{\mathrm{FFN}}})$, as Eq. 40 uses it
    Severity: slip of print"""
    d, d_ff, std = 128, 512, 0.05
    W = Draw(seed).normal(d, d_ff, std=std)
    printed, corrected = std * math.sqrt(d + math.sqrt(d_ff)), std * (math.sqrt(d) + math.sqrt(d_ff))
    detail = "d = 128, d_FFN = 512"
    second, by = largest_singular_value(W), "eigenvalues of the Gram matrix"
    return wrong(printed, spectral(W), detail, corrected=corrected, above=0.3, below=0.05, second=second, by=by)


@claim("eq40", "App. A.2.1, Eq. 40", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def eq40(seed: int) -> Evidence:
    r"""$\|\frac{\partial\,\mathrm{FFN}}{\partial\,\mathrm{LN}}\|_2 = \|W^1_\ell W^2_\ell\|_2$
    Correct: $\|W_2DW_1\|_2$ with the slopes $D$ of the activation, between the two in the order of Eq. 4; the bound
    $\sigma_1\sigma_2(\sqrt d + \sqrt{d_{\mathrm{ffn}}})^2$ holds for slopes up to 1
    Severity: scope"""
    draw = Draw(seed)
    network, x = Network.draw(draw, 32, 64, 0.1), draw.normal(1, 32)
    reference = spectral(jacobian_of(lambda x: network(x), x))
    printed = [spectral(network.W_1 @ network.W_2), spectral(network.W_2 @ network.W_1)]
    closed = spectral(dense(FeedForwardAt(x, *network, residual=False).jacobian("Y")))
    return wrong(printed, reference, "both orders", corrected=closed, above=0.05)


@claim("eq41", "App. A.2.1, Eq. 41", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian, RMSNormAt])
def eq41(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_\ell}{\partial x'_\ell}\|_2\le1 + \frac{\sigma_\ell^2}{\sigma_{x'_\ell}(\sqrt d +
    \sqrt{d_{\mathrm{FFN}}})^2}$
    Correct: $1 + \frac{\sigma_\ell^2(\sqrt d + \sqrt{d_{\mathrm{FFN}}})^2}{\sigma_{x'_\ell}}$, the factor of Eq. 40
    Severity: constant"""
    size, draw = StackSizes(), Draw(seed)
    network, x = Network.draw(draw, size.d, size.d_ffn, size.sigma), draw.normal(1, size.d)
    deviation = float(x.square().mean().sqrt())
    found = spectral(jacobian_of(lambda x: x + network(rms_norm(x)), x))
    printed, corrected = 1 + size.ffn_printed / deviation, 1 + size.ffn / deviation
    detail = f"d = 64, d_FFN = 256: norm {found:.3g}, bounds {printed:.5g} and {corrected:.3g}"
    return violated(found, printed, detail, corrected=corrected)


@claim("eq43", "App. A.2.1, Eq. 43; Eq. 70", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def eq43(seed: int) -> Evidence:
    r"""$\frac{\partial\,\mathrm{Attn}}{\partial\,\mathrm{LN}} = W^OZ(\mathrm{LN})\frac{\partial
    Z(\mathrm{LN})}{\partial\,\mathrm{LN}}$
    Correct: $W^OJ^Z$, the right side: $Z$ itself is no factor
    Severity: slip of print"""
    draw, s, d = Draw(seed), 3, 5
    N, W = draw.normal(s, d), [draw.normal(d, d) for _ in range(4)]

    reference = jacobian_of(lambda N: attention_head(N, *W[:3]) @ W[3], N)
    head = AttentionAt(N, *W[:3])
    J_Z, out = dense(head.jacobian("X")), torch.kron(torch.eye(s, dtype=torch.float64), W[3].T.contiguous())
    Z = torch.kron(torch.eye(s, dtype=torch.float64), (head.value.T @ head.value).contiguous())
    detail = "one head; Z, s x d, conforms with neither neighbour; Z^T Z in its place"
    return wrong(out @ Z @ J_Z, reference, detail, corrected=out @ J_Z)


@claim("eq44", "App. A.2.1, Eq. 44; Eq. 75", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def eq44(seed: int) -> Evidence:
    r"""$\|J^Z\|_2\le h\left((\sqrt s + 2 + \frac{1}{\sqrt s})\sigma^3\sqrt{d^3d_{\mathrm{head}}} + \sigma_x^\ell(\sqrt d +
    \sqrt{d_{\mathrm{head}}})\right)$
    Correct: the second term, of the value path, has the $\sigma$ of the weights. The bound is by Takase et al., not
    Vershynin
    Severity: slip of print"""
    draw, s, d, std, deviation = Draw(seed), 6, 64, 0.01, 1e-4
    X, W = draw.normal(s, d, std=deviation), [draw.normal(d, d, std=std) for _ in range(3)]
    found = spectral(jacobian_of(lambda N: attention_head(N, *W), layer_norm(X)))
    first = (math.sqrt(s) + 2 + 1 / math.sqrt(s)) * std**3 * d**2
    printed, corrected = first + deviation * 2 * math.sqrt(d), first + std * 2 * math.sqrt(d)
    return violated(found, printed, "one head, tokens of standard deviation 1e-4, which LN undoes", corrected=corrected)


@claim("eq44-loose", "App. A.2.1, Eq. 44, corrected", "LOOSE", uses=[AttentionAt.jacobian])
def eq44_loose(seed: int) -> Evidence:
    r"""the bound with $\sigma_W$ in the second term"""
    draw, size, head = Draw(seed), StackSizes(d=32, s=8, h=2), 16
    N = LayerNormAt(draw.normal(size.s, size.d)).value
    heads = [
        dense(AttentionAt(N, *(draw.normal(size.d, head, std=size.sigma) for _ in range(3))).jacobian("X")) for _ in range(size.h)
    ]
    found = spectral(torch.cat(heads))
    inner = size.of_sequence * size.sigma**3 * math.sqrt(size.d**3 * head) + size.sigma * (math.sqrt(size.d) + math.sqrt(head))
    return loose(found / (size.h * inner), "d = 32, two heads, 8 tokens", factor=1.5)


# Theorem 3.3: A, B, and the bounds that follow from them
@claim("eq47", "App. A.2.2, Eq. 47", "WRONG AS PRINTED")
def eq47(seed: int) -> Evidence:
    r"""$A = \frac{\sigma^2}{(\sqrt d + \sqrt{d_{\mathrm{FFN}}})^2} + 2dh(\sqrt s + 2 + \frac{1}{\sqrt
    s})\sigma^2\left(d\sqrt{d_{\mathrm{head}}} + 1 + \sqrt{d_{\mathrm{head}}/d}\right)$
    Correct: $A = a + b$ with $a = \sigma^2(\sqrt d + \sqrt{d_{\mathrm{FFN}}})^2$, $b = 2dh(\sqrt s + 2 + \frac{1}{\sqrt
    s})\sigma^2(\sigma^2d\sqrt{d_{\mathrm{head}}} + 1 + \sqrt{d_{\mathrm{head}}/d})$: Eq. 36 has a $\sigma^2$ that is lost
    here
    Severity: constant"""
    size = StackSizes()
    first, _ = coefficients(size.ffn, size.attention)
    as_printed, _ = coefficients(size.ffn_printed, size.attention)
    second = [coefficients(a, size.attention, exact=True)[0] for a in (size.ffn_printed, size.ffn)]
    detail = f"coefficient of 1 / sigma in Eq. 36, d = 64, s = 32: with the printed factors {as_printed:.4g}"
    return wrong(
        [size.A_printed] * 2,
        [as_printed, first],
        detail,
        corrected=[size.ffn_printed + size.attention, size.ffn + size.attention],
        above=1,
        second=second,
        by=EXACT,
    )


EXACT = "differences of rational numbers"


def coefficients(a: float, b: float, *, exact: bool = False) -> tuple[float, float]:
    """Return the coefficients of t and t^2 of (1 + a t)(1 + b t), by derivatives at 0 or by differences, which are exact."""
    if exact:
        up, down = ((1 + Fraction(a) * t) * (1 + Fraction(b) * t) for t in (1, -1))
        return float(up - down) / 2, float(up + down - 2) / 2
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((1 + a * t) * (1 + b * t), t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    return float(first.detach()), float(second) / 2


@claim("eq48", "App. A.2.2, Eq. 48", "WRONG AS PRINTED")
def eq48(seed: int) -> Evidence:
    r"""$B = 2dh(\sqrt s + 2 + \frac{1}{\sqrt s})\sigma^4d\sqrt{d_{\mathrm{head}}}$
    Correct: $B = ab$, the product of the two factors of $1/\sigma_x$; the printed one is a part of $b$
    Severity: constant"""
    size = StackSizes()
    _, second = coefficients(size.ffn, size.attention)
    _, as_printed = coefficients(size.ffn_printed, size.attention)
    _, again = coefficients(size.ffn, size.attention, exact=True)
    detail = f"coefficient of 1 / sigma^2 in Eq. 36: with the printed factors {as_printed:.3g}"
    corrected = size.ffn * size.attention
    return wrong(size.B_printed, second, detail, corrected=corrected, above=0.5, second=again, by=EXACT)


def stack_norms(seed: int, depth: int, **options: Any) -> tuple[list[Tensor], list[float], list[float]]:
    """Return the Jacobian of each block of a stack, and the least deviation of a token at its two norms."""
    X, blocks = Draw(seed).normal(4, 16), make_stack(seed, depth, **options)
    jacobians, at_attention, at_network = [], [], []
    for block in blocks:
        jacobians.append(block_jacobian(block, X))
        Y = X + block.attention(rms_norm(X))
        at_attention.append(float(X.square().mean(1).sqrt().min()))
        at_network.append(float(Y.square().mean(1).sqrt().min()))
        X = block(X)
    return jacobians, at_attention, at_network


STACK = StackSizes(d=16, d_ffn=32, h=2, s=4, sigma=1 / math.sqrt(2.5 * 16))
"""The numbers of the stacks that the rows draw."""


@claim("eq9", "Theorem 3.3, Eq. 9; Eqs. 36, 45 and 46", "WRONG AS PRINTED", uses=[TransformerBlock])
def eq9(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_L}{\partial x_1}\|_2\le\prod_{\ell=1}^{L-1}\left(1 + \frac{A}{\sigma_{x_\ell}} +
    \frac{B}{\sigma_{x_\ell}^2}\right)$
    Correct: $L$ factors with $A = a + b$, $B = ab$ and the least deviation of a token for $\sigma_{x_\ell}$: at $L = 1$
    the printed product is empty. The corrected bound is far from attained: at $L = 8$ by a factor above $10^6$
    Severity: slip of print
    Follows: eq8, eq47, eq48"""
    jacobians, first, second = stack_norms(seed, 8)
    factors = [(1 + STACK.attention / x) * (1 + STACK.ffn / y) for x, y in zip(first, second, strict=True)]
    printed = [1 + STACK.A_printed / x + STACK.B_printed / x**2 for x in first]
    norms = [spectral(jacobians[0]), spectral(chain(jacobians))]
    v = torch.linalg.svd(jacobians[0])[2][0].reshape(4, 16) * 1e-6
    X, block = Draw(seed).normal(4, 16), make_stack(seed, 1)[0]
    quotient = float((block(X + v) - block(X - v)).norm() / 2e-6)
    return violated(
        norms,
        [1.0, math.prod(printed[:-1])],
        f"L = 1 and 8, width 16; at L = 8 the corrected bound is {math.prod(factors) / norms[1]:.1g} times the norm",
        corrected=[factors[0], math.prod(factors)],
        second=[quotient, norms[1]],
        by="at L = 1 a difference quotient along the first singular vector",
    )


@claim("eq10", "Theorem 3.3, Eq. 10", "HOLDS")
def eq10(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2\sim\exp(\ell)$: $\|\frac{\partial y_L}{\partial x_1}\|_2\le M$"""

    def ratio(coefficients: Tensor) -> float:
        A, B = map(abs, coefficients.tolist())
        limit = A / (math.exp(0.5) - 1) + B / (math.e - 1)  # sum of A e^{-k/2} + B e^{-k}
        return max(math.exp(log_product(A, B, torch.exp(layers(L) / 2)) - limit) for L in (1, 10, 100, 700))

    points = torch.tensor([[1.0, 1.0], [10.0, 10.0], [50.0, 5.0]], dtype=torch.float64)
    return bounded(worst(ratio, points), "the product of Eq. 9 over exp of the sum of its terms, L to 700")


@claim("eq49", "App. A.2.2, Eq. 49", "WRONG AS PRINTED")
def eq49(seed: int) -> Evidence:
    r"""$M = \exp\left(\frac{A}{e-1} + \frac{B}{e^2-1} - \frac12\left(\frac{A^2}{e^2-1} + \frac{2AB}{e^3-1} +
    \frac{B^2}{e^4-1}\right)\right)$
    Correct: $M = \exp\left(\frac{A}{\sqrt e-1} + \frac{B}{e-1}\right)$: $\sigma = e^{k/2}$ where $\sigma^2 = e^k$, and two
    terms of $\log(1+x)$ are a lower bound
    Severity: constant"""
    A = B = 10.0
    e = math.e
    square = A**2 / (e**2 - 1) + 2 * A * B / (e**3 - 1) + B**2 / (e**4 - 1)
    printed = A / (e - 1) + B / (e**2 - 1) - square / 2
    own = log_product(A, B, torch.exp(layers(700)))  # with sigma = e^k, as the text has it
    right, corrected = log_product(A, B, torch.exp(layers(700) / 2)), A / (math.sqrt(e) - 1) + B / (e - 1)
    terms = ([mpmath.log(1 + A * mpmath.exp(-k * p) + B * mpmath.exp(-2 * k * p)) for k in range(1, 701)] for p in (1, 0.5))
    return violated(
        [math.exp(own), math.exp(right)],
        [math.exp(printed)] * 2,
        "A = B = 10; with the text's sigma = e^k and with sigma = e^(k / 2)",
        corrected=[math.exp(corrected)] * 2,
        above=10,
        second=[mpmath.exp(mpmath.fsum(each)) for each in terms],
        by="mpmath",
    )


@claim("eq11", "Theorem 3.3, Eq. 11; Eq. 50", "DOES NOT FOLLOW")
def eq11(seed: int) -> Evidence:
    r"""$\sigma_{x_\ell}^2\sim\ell$: $\|\frac{\partial y_L}{\partial x_1}\|_2\le\Theta(L)$
    Correct: Eq. 9 gives $\prod_k(1 + \frac{A}{\sqrt k} + \frac Bk)$, which grows like $\exp(2A\sqrt L)$ up to a power of $L$.
    Of the norm itself this says nothing: at initialisation it grows like the stream (ours/rms-gain)
    Follows: eq50-substitution"""
    A = B = 1.0
    logs = [log_product(A, B, layers(L).sqrt()) for L in (1024, 4096)]
    grown, linear = math.exp(logs[1] - logs[0]), 4.0
    corrected = math.exp(2 * A * (math.sqrt(4096) - math.sqrt(1024)) + B * math.log(4))
    detail = "growth of Eq. 9's product from L = 1024 to 4096, A = B = 1"
    second = mpmath.exp(mpmath.fsum(mpmath.log(1 + A / mpmath.sqrt(k) + B / mpmath.mpf(k)) for k in range(1025, 4097)))
    return violated(grown, linear, detail, corrected=corrected, above=1e6, second=second, by="mpmath")


@claim("eq50-substitution", "App. A.2.2, above Eq. 50", "WRONG AS PRINTED")
def eq50_substitution(seed: int) -> Evidence:
    r"""$\sigma^2 = k$: $\prod_k(1 + \frac Ak + \frac{B}{e^{k^2}})\sim\exp(A(\log n + \gamma) + \mathrm{const}) = \Theta(L)$
    Correct: it is $\Theta(L^A)$; and $\sigma = \sqrt k$ gives other terms, see Eq. 11
    Severity: constant
    Follows: eq49"""
    A, B = 3.0, 1.0
    logs = [float(torch.log1p(A / layers(L) + B * torch.exp(-(layers(L) ** 2))).sum()) for L in (10_000, 100_000)]
    slope = (logs[1] - logs[0]) / math.log(10)
    ends = [mpmath.loggamma(L + 1 + A) - mpmath.loggamma(L + 1) for L in (10_000, 100_000)]  # e^(-k^2) is 0 from k = 30 on
    second = float((ends[1] - ends[0]) / mpmath.log(10))
    detail, by = "exponent of L for A = 3, from L = 10^4 to 10^5", "Gamma functions, mpmath"
    return wrong(1.0, slope, detail, corrected=A, above=0.5, below=0.01, second=second, by=by)


@claim("weierstrass", "Sec. 3.1, after Theorem 3.3", "DOES NOT FOLLOW", uses=[TransformerBlock])
def weierstrass(seed: int) -> Evidence:
    r"""a bounded $\|\frac{\partial y_L}{\partial x_1}\|_2$ 'implies that deeper layers behave nearly as an identity map'
    Correct: rotations have products of norm 1 and are not near the identity; what makes deep Pre-LN blocks near it is
    $\|J_\ell - I\|_2\le\frac{A}{\sigma_\ell} + \frac{B}{\sigma_\ell^2}$ with a growing $\sigma_\ell$"""
    draw, eye = Draw(seed), torch.eye(6, dtype=torch.float64)
    rotations = [draw.orthogonal(6) for _ in range(50)]
    distance = min(spectral(R - eye) for R in rotations)
    product = spectral(chain(rotations))
    jacobians, first, second = stack_norms(seed, 6)
    ratios = []
    for J, x, y in zip(jacobians, first, second, strict=True):
        bound = (1 + STACK.attention / x) * (1 + STACK.ffn / y) - 1
        ratios.append(spectral(J - torch.eye(len(J), dtype=torch.float64)) / bound)
    detail = f"least ||R - I|| of 50 rotations, their product of norm {product:.6f}: near I is 0.1; ||J - I|| over its bound"
    return violated([distance, *ratios], [0.1, *[math.inf] * 6], detail, corrected=[2.0, *[1.0] * 6])


@claim("ours/rms-gain", "The Curse of Depth, Theorem 3.3", "SEEN AT THIS SIZE", uses=[TransformerBlock])
def rms_gain(seed: int) -> Evidence:
    r"""at initialisation, with ReLU, $\|\frac{\partial y_L}{\partial x_1}\|_F/\sqrt n\approx\sigma_{x_{L+1}}/\sigma_{x_1}$ to
    30 %: the stream's growth and the Jacobian's are one number"""
    X, blocks = Draw(seed).normal(4, 32), make_stack(seed, 8, d_model=32, d_ff=64, n_heads=2)
    out = stream(blocks, X)[-1]
    gain = float(jacobian_of(lambda X: stream(blocks, X)[-1], X).norm() / math.sqrt(X.numel()))
    growth = float((out.square().mean() / X.square().mean()).sqrt())
    return measured(gain / growth, abs(gain / growth - 1) < 0.3, f"8 blocks of width 32: gain {gain:.3f}, growth {growth:.3f}")


@claim("ours/identity-rate", "The Curse of Depth, Sec. 3.1", "SEEN AT THIS SIZE", uses=[TransformerBlock])
def identity_rate(seed: int) -> Evidence:
    r"""at initialisation $\|J_\ell - I\|_F\propto1/\sigma_{x_\ell}$ in a Pre-LN stack: the exponent is -1 to 0.2"""
    states, distances = [], []
    X = Draw(seed).normal(4, 16)
    for block in make_stack(seed, 24):
        states.append(float(X.square().mean().sqrt()))
        distances.append(float((block_jacobian(block, X) - torch.eye(X.numel(), dtype=torch.float64)).norm()))
        X = block(X)
    slope = exponent(states, distances)
    return measured(slope, abs(slope + 1) < 0.2, "24 blocks of width 16, exponent")
