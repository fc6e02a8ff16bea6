"""Theorem 3.3: the Jacobian from the first block to the last, and its factors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt, RMSNormAt
from hessiankit.blocks import TransformerBlock
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import (
    Network,
    StackSizes,
    dense,
    make_stack,
    rms_norm,
    spectral,
    stream,
)
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import (
    bounded,
    loose,
    readings,
    relative_error,
    violated,
    wrong,
)
from hessiankit.ledger.registry import claim

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
    "curse-of-depth/eq8",
    "Theorem 3.3, Eq. 8; Lemma A.2, Eqs. 35 and 37",
    "WRONG AS PRINTED",
    uses=[AttentionAt.jacobian, FeedForwardAt.jacobian, RMSNormAt],
)
def eq8(seed: int) -> Evidence:
    r"""$\frac{\partial y_L}{\partial x_1} = \prod_{\ell=1}^{L-1}\left(\frac{\partial y_\ell}{\partial
    x'_\ell}\cdot\frac{\partial x'_\ell}{\partial x_\ell}\right)$

    Correct: $L$ factors, $\prod_{\ell=1}^L$, since $y_L = x_{L+1}$
    """
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found = factors(blocks, X)
    reference = jacobian_of(lambda X: stream(blocks, X)[-1], X)
    return wrong(chain(found[:-1]), reference, "three blocks against autograd", corrected=chain(found), above=0.05)


@claim("curse-of-depth/eq8-order", "Theorem 3.3, Eq. 8", "VAGUE", uses=[AttentionAt.jacobian])
def eq8_order(seed: int) -> Evidence:
    r"""the order of the factors of $\prod_\ell$

    Correct: $\ell$ falls from left to right; the factors do not commute
    """
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found, reference = factors(blocks, X), jacobian_of(lambda X: stream(blocks, X)[-1], X)
    errors = {"rising": relative_error(chain(found[::-1]), reference), "falling": relative_error(chain(found), reference)}
    return readings(errors, "relative error against autograd")


@claim("curse-of-depth/eq35", "Lemma A.2, Eq. 35", "WRONG AS PRINTED")
def eq35(seed: int) -> Evidence:
    r"""$\prod_{n=1}^{L-1}(\frac{\partial y_\ell}{\partial x'_\ell}\cdot\frac{\partial x'_\ell}{\partial x_\ell})$, with
    factors that do not read $n$

    Correct: the product is over $\ell$, from 1 to $L$
    """
    X, blocks = Draw(seed).normal(3, 6), make_stack(seed, 3, **SMALL)
    found, reference = factors(blocks, X), jacobian_of(lambda X: stream(blocks, X)[-1], X)
    powers, three = [torch.linalg.matrix_power(J, 2) for J in found], [reference] * 3
    return wrong(powers, three, "each l, the power L - 1 = 2", corrected=[chain(found)] * 3, above=0.05)


@claim("curse-of-depth/eq38", "App. A.2.1, Eqs. 38, 39 and 42", "HOLDS", uses=[FeedForwardAt.jacobian, AttentionAt.jacobian])
def eq38(seed: int) -> Evidence:
    r"""$\|\frac{\partial y}{\partial x'}\|_2\le1 + \|\frac{\partial
    f}{\partial\,\mathrm{LN}}\|_2\|\frac{\partial\,\mathrm{LN}}{\partial x'}\|_2$ for the network and for the attention, and
    $\|\frac{\partial y}{\partial x}\|_2\le\|\frac{\partial y}{\partial x'}\|_2\|\frac{\partial x'}{\partial x}\|_2$"""
    steps, wholes = [], []
    for k in range(5):
        draw = Draw(10 * seed + k)
        X, W, network = draw.normal(3, 6), [draw.normal(6, 6) for _ in range(4)], Network.draw(draw, 6, 8, 1.0)
        norms = []
        for part, name in ((AttentionAt(rms_norm(X), *W), "X"), (None, "Y")):
            branch = part or FeedForwardAt(rms_norm(X), *network, residual=False)
            outer, inner = dense(RMSNormAt(X).jacobian("X")), dense(branch.jacobian(name))
            norms.append(torch.eye(18, dtype=torch.float64) + inner @ outer)
            steps.append(spectral(norms[-1]) / (1 + spectral(inner) * spectral(outer)))
            X = X + branch.value
        wholes.append(spectral(norms[1] @ norms[0]) / (spectral(norms[1]) * spectral(norms[0])))
    return bounded([steps, wholes], "5 points; one sub-layer, a block")


@claim("curse-of-depth/norm-of-w1", "App. A.2.1, below Eq. 39", "WRONG AS PRINTED")
def norm_of_w1(seed: int) -> Evidence:
    r"""$\|W_1\|_2\sim\sigma_1\sqrt{d + \sqrt{d_{\mathrm{FFN}}}}$

    Correct: $\sigma_1(\sqrt d + \sqrt{d_{\mathrm{FFN}}})$, as Eq. 40 uses it
    """
    d, d_ff, std = 128, 512, 0.05
    found = spectral(Draw(seed).normal(d, d_ff, std=std))
    printed, corrected = std * math.sqrt(d + math.sqrt(d_ff)), std * (math.sqrt(d) + math.sqrt(d_ff))
    detail = "d = 128, d_FFN = 512"
    return wrong(printed, found, detail, corrected=corrected, above=0.3, below=0.05)


@claim("curse-of-depth/eq40", "App. A.2.1, Eq. 40", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def eq40(seed: int) -> Evidence:
    r"""$\|\frac{\partial\,\mathrm{FFN}}{\partial\,\mathrm{LN}}\|_2 = \|W^1_\ell W^2_\ell\|_2$

    Correct: $\|W_2DW_1\|_2$ with the slopes $D$ of the activation, between the two in the order of Eq. 4; the bound
    $\sigma_1\sigma_2(\sqrt d + \sqrt{d_{\mathrm{ffn}}})^2$ holds for slopes up to 1
    """
    draw = Draw(seed)
    network, x = Network.draw(draw, 32, 64, 0.1), draw.normal(1, 32)
    reference = spectral(jacobian_of(lambda x: network(x), x))
    printed = [spectral(network.W_1 @ network.W_2), spectral(network.W_2 @ network.W_1)]
    closed = spectral(dense(FeedForwardAt(x, *network, residual=False).jacobian("Y")))
    return wrong(printed, reference, "both orders", corrected=closed, above=0.05)


@claim("curse-of-depth/eq41", "App. A.2.1, Eq. 41", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian, RMSNormAt])
def eq41(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_\ell}{\partial x'_\ell}\|_2\le1 + \frac{\sigma_\ell^2}{\sigma_{x'_\ell}(\sqrt d +
    \sqrt{d_{\mathrm{FFN}}})^2}$

    Correct: $1 + \frac{\sigma_\ell^2(\sqrt d + \sqrt{d_{\mathrm{FFN}}})^2}{\sigma_{x'_\ell}}$, the factor of Eq. 40
    """
    size, draw = StackSizes(), Draw(seed)
    network, x = Network.draw(draw, size.d, size.d_ffn, size.sigma), draw.normal(1, size.d)
    deviation = float(x.square().mean().sqrt())
    found = spectral(jacobian_of(lambda x: x + network(rms_norm(x)), x))
    printed, corrected = 1 + size.ffn_printed / deviation, 1 + size.ffn / deviation
    detail = f"d = 64, d_FFN = 256: norm {found:.3g}, bounds {printed:.5g} and {corrected:.3g}"
    return violated(found, printed, detail, corrected=corrected)


@claim("curse-of-depth/eq43", "App. A.2.1, Eq. 43; Eq. 70", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def eq43(seed: int) -> Evidence:
    r"""$\frac{\partial\,\mathrm{Attn}}{\partial\,\mathrm{LN}} = W^OZ(\mathrm{LN})\frac{\partial
    Z(\mathrm{LN})}{\partial\,\mathrm{LN}}$

    Correct: $W^OJ^Z$, the right side: $Z$ itself is no factor
    """
    draw, s, d = Draw(seed), 3, 5
    N, W = draw.normal(s, d), [draw.normal(d, d) for _ in range(4)]

    def attention(N: Tensor) -> Tensor:
        return torch.softmax(N @ W[0] @ W[1].T @ N.T / math.sqrt(d), -1) @ N @ W[2] @ W[3]

    reference = jacobian_of(attention, N)
    head = AttentionAt(N, *W[:3])
    J_Z, out = dense(head.jacobian("X")), torch.kron(torch.eye(s, dtype=torch.float64), W[3].T.contiguous())
    Z = torch.kron(torch.eye(s, dtype=torch.float64), (head.value.T @ head.value).contiguous())
    detail = "one head; Z, s x d, conforms with neither neighbour; Z^T Z in its place"
    return wrong(out @ Z @ J_Z, reference, detail, corrected=out @ J_Z)


@claim("curse-of-depth/eq44", "App. A.2.1, Eq. 44; Eq. 75", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def eq44(seed: int) -> Evidence:
    r"""$\|J^Z\|_2\le h\left((\sqrt s + 2 + \frac{1}{\sqrt s})\sigma^3\sqrt{d^3d_{\mathrm{head}}} + \sigma_x^\ell(\sqrt d +
    \sqrt{d_{\mathrm{head}}})\right)$

    Correct: $\sigma$ of the weights in the second term, which is the value path; it is Takase et al.'s, not Vershynin's
    """
    draw, s, d, std, deviation = Draw(seed), 6, 64, 0.01, 1e-4
    X, W = draw.normal(s, d, std=deviation), [draw.normal(d, d, std=std) for _ in range(3)]
    found = spectral(dense(AttentionAt(LayerNormAt(X).value, *W).jacobian("X")))
    first = (math.sqrt(s) + 2 + 1 / math.sqrt(s)) * std**3 * d**2
    printed, corrected = first + deviation * 2 * math.sqrt(d), first + std * 2 * math.sqrt(d)
    return violated(found, printed, "one head, tokens of standard deviation 1e-4, which LN undoes", corrected=corrected)


@claim("curse-of-depth/eq44-loose", "App. A.2.1, Eq. 44, corrected", "LOOSE", uses=[AttentionAt.jacobian])
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
