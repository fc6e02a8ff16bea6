"""Theorem 4.1: the gradients of a feed-forward network and its norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from derivations.activation import ActivationAt
from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt
from hessiankit.blocks import TransformerBlock, initialise
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, relative_error, small, wrong
from hessiankit.ledger.registry import claim
from hessiankit.ledger.sharpness_disparity.points import (
    FeedForwardPoint,
    dense,
    eye,
    if_it_conforms,
    ones,
    standardised,
)

VOCABULARY = 9
"""d of the paper, which is not the width D."""
KINKED = ("relu", "leaky_relu")


@claim("sharpness-disparity/thm4.1-w1", "Theorem 4.1; App. B.1", "HOLDS", uses=[FeedForwardAt.jacobian])
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


@claim("sharpness-disparity/thm4.1-w2", "Theorem 4.1", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian])
def w2(seed: int) -> Evidence:
    r"""$\frac{\partial\mathcal{Q}}{\partial W_2} = \frac{\partial\mathcal{Q}}{\partial
    Y}\left(X_{\mathrm{Norm}}W_1\odot\frac{\partial A}{\partial M}\right)\otimes I_d$

    Correct: $\frac{\partial\mathcal{Q}}{\partial Y}(A\otimes I_D)$: the Hadamard product is of an $n\times M$ with an
    $nM\times nM$ matrix, and $I_d$ has the size of the vocabulary
    """
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


@claim("sharpness-disparity/b1-w2", "App. B.1, dY/dW_2", "WRONG AS PRINTED", uses=[FeedForwardAt.jacobian, ActivationAt])
def b1_w2(seed: int) -> Evidence:
    r"""$\frac{\partial Y}{\partial W_2} = A\otimes I_D$ $= (X_{\mathrm{Norm}}W_1\odot\frac{\partial A}{\partial M})\otimes
    I_D$

    Correct: $A\otimes I_D$, the first equation, holds for every $\sigma$; the second with the $n\times M$ matrix $\sigma'(M)$
    for $\frac{\partial A}{\partial M}$
    """
    point = FeedForwardPoint.draw(seed, "leaky_relu")
    _, D, _ = point.sizes
    U = point.X_norm @ point.W_1
    reference = dense(point.closed.jacobian("W_2"))
    autograd = jacobian_of(lambda W_2: F.leaky_relu(U) @ W_2, point.W_2)
    printed = if_it_conforms(lambda: torch.kron(U * point.dA, eye(D)))
    corrected = [reference, torch.kron(U * ActivationAt("leaky_relu", U).first, eye(D))]
    return wrong([printed] * 2, [autograd] * 2, "the Hadamard product does not conform", corrected=corrected)


@claim("sharpness-disparity/thm4.1-gamma", "Theorem 4.1", "WRONG AS PRINTED", uses=[LayerNormAt, FeedForwardAt.jacobian])
def gamma(seed: int) -> Evidence:
    r"""$\frac{\partial\mathcal{Q}}{\partial\gamma} = \frac{\partial\mathcal{Q}}{\partial Y}(I_n\otimes
    W_2^\top)\frac{\partial A}{\partial M}(I_n\otimes
    W_1^\top)\,\mathrm{diag}(\mathrm{vec}(X_{\mathrm{std}}))(1_{n\times1}\otimes I_d)$

    Correct: $I_D$ in place of $I_d$, as in App. B.1: $d$ is the vocabulary size
    """
    point, reference = FeedForwardPoint.draw(seed), FeedForwardPoint.draw(seed).gradient("gamma")
    printed = if_it_conforms(lambda: gamma_formula(point, VOCABULARY))
    corrected, detail = [gamma_formula(point, 5), point.closed_gradient("gamma")], f"D = 5, d = {VOCABULARY}: does not conform"
    return wrong([printed] * 2, [reference] * 2, detail, corrected=corrected)


def gamma_formula(point: FeedForwardPoint, d: int) -> torch.Tensor:
    """Return the theorem's row for gamma, with I_d."""
    n = point.sizes[0]
    outer = torch.kron(eye(n), point.W_2.T.contiguous()) @ point.dA @ torch.kron(eye(n), point.W_1.T.contiguous())
    return point.q @ outer @ standardised(point.X).reshape(-1).diag() @ torch.kron(ones(n), eye(d))


@claim("sharpness-disparity/b1-residual", "App. B.1, first line", "WRONG AS PRINTED", uses=[FeedForwardAt])
def b1_residual(seed: int) -> Evidence:
    """'the transformation from $X^{(l-1)}$ to $X^{(l-1/2)}$'

    Correct: from $X^{(l-1/2)}$ to $X^{(l)}$, as the display below it has it
    """
    block = TransformerBlock(5, 7, placement="pre", output_projection=True).double()
    initialise(block, seed=seed)
    X = Draw(seed).normal(4, 5)
    Y = X + block.attention(F.layer_norm(X, (5,), eps=1e-5))
    network = block.feedforward

    def through(Z: torch.Tensor) -> torch.Tensor:
        N = F.layer_norm(Z, (5,), eps=1e-5)
        return Z + FeedForwardAt(N, network.W_1.detach(), network.W_2.detach(), residual=False).value

    return wrong(through(X), block(X), "the display applied to the two inputs", corrected=through(Y.detach()))


@claim("sharpness-disparity/thm4.1-activation", "App. B.1, 'it holds that'", "HOLDS UNDER ASSUMPTION", uses=[ActivationAt])
def activation(seed: int) -> Evidence:
    r"""$\sigma(z) = z\,\sigma'(z)$

    Needs: ReLU and Leaky ReLU; GPT-2 has GELU, LLaMA a gate with SiLU

    Correct: $\frac{\partial Y}{\partial W_2} = A\otimes I_D$ needs no such identity
    """
    U = Draw(seed).normal(4, 7)
    errors = {
        kind: relative_error(U * ActivationAt(kind, U).first, ActivationAt(kind, U).value) for kind in (*KINKED, "gelu", "silu")
    }
    holds = small([errors[kind] for kind in KINKED], "ReLU and Leaky ReLU")
    return assumed(holds, max(errors["gelu"], errors["silu"]), above=0.05)


@claim("ours/ffn-any-activation", "Sharpness Disparity, Theorem 4.1", "HOLDS", uses=[FeedForwardAt.jacobian, LayerNormAt])
def any_activation(seed: int) -> Evidence:
    r"""the three gradients hold for every $\sigma$, with $\frac{\partial Y}{\partial W_2} = A\otimes I_D$"""
    points = [FeedForwardPoint.draw(seed, activation) for activation in ("gelu", "silu")]
    letters = ("W_1", "W_2", "gamma")
    found = [point.closed_gradient(letter) for point in points for letter in letters]
    return agrees(found, [point.gradient(letter) for point in points for letter in letters], "GELU and SiLU against autograd")


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
