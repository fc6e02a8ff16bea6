"""The text after Theorem A.3, and what is exact in its place: homogeneity, its consequences for the Hessian, gauges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from derivations.gradient_bounds import pre_norm_gradient_bounds, qkv_norm_gradient_bounds
from derivations.stage import Stage
from hessiankit.ledger.autodiff import hessian_of, jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, relative_error, small, wrong
from hessiankit.ledger.hybridnorm.definitions import LETTERS, HeadPoint
from hessiankit.ledger.hybridnorm.jacobians import dense, printed_pre_norm
from hessiankit.ledger.registry import claim


def moved(seed: int, letter: str) -> tuple[HeadPoint, HeadPoint]:
    """Return a head, and one in which a weight is another draw."""
    head = HeadPoint.draw(Draw(seed))
    return head, head.with_(**{letter: Draw(seed + 1000).normal(*getattr(head, letter).shape)})


@claim("hybridnorm/text-pre-not-by-themselves", "App. A, after Theorem A.3", "WRONG AS PRINTED", uses=[pre_norm_gradient_bounds])
def not_by_themselves(seed: int) -> Evidence:
    """with Pre-Norm, the gradients of $W_Q$ and $W_K$ are influenced by all three other weights but not by themselves

    Correct: only the bounds are free of them: $A$, in the gradient, depends on both
    """
    before_and_after, bounds = [], []
    for letter, k in (("W_Q", 0), ("W_K", 1)):
        head, other = moved(seed, letter)
        before_and_after.append((printed_pre_norm(head, letter), printed_pre_norm(other, letter)))
        before, after = (pre_norm_gradient_bounds(4, *h.weights)[k] for h in (head, other))
        bounds.append(abs(after / before - 1))
    free, found = map(list, zip(*before_and_after, strict=True))
    names = zip((moved(seed, "W_Q")[1], moved(seed, "W_K")[1]), ("W_Q", "W_K"), strict=True)
    closed = [dense(h.closed_pre_norm.jacobian(letter)) for h, letter in names]
    detail = f"dS/dW_Q when W_Q moves, dS/dW_K when W_K does; their bounds change by {max(bounds):.1g}"
    return wrong(free, found, detail, corrected=closed, above=0.1)


@claim(
    "hybridnorm/text-qkv-itself-and-output",
    "App. A, after Theorem A.3",
    "WRONG AS PRINTED",
    uses=[Stage.jacobian, qkv_norm_gradient_bounds],
)
def itself_and_output(seed: int) -> Evidence:
    """with QKV-Norm, the gradient of each weight depends at most on itself and $W_O$

    Correct: it depends on the direction of all others and not on their scale, nor on that of $X$
    """
    head, other = moved(seed, "W_K")
    before = dense(head.closed_qkv_norm.jacobian("W_Q"))
    turned = jacobian_of(other.qkv_norm, other.X, *other.weights, wrt=1)
    scaled = head.with_(X=7 * head.X, W_Q=head.W_Q, W_K=3 * head.W_K, W_V=0.2 * head.W_V)
    rest = relative_error(dense(scaled.closed_qkv_norm.jacobian("W_Q")), before)
    detail = f"dS_N/dW_Q when W_K is drawn anew: unmoved, moved; scales of X, W_K, W_V change it by {rest:.1g}"
    return wrong(before, turned, detail, corrected=dense(other.closed_qkv_norm.jacobian("W_Q")), above=0.1)


@claim("ours/qkv-degrees", "HybridNorm, Eq. 13", "HOLDS", uses=[Stage.jacobian])
def degrees(seed: int) -> Evidence:
    r"""$S_N$ is homogeneous of degrees $(0,0,0,1;0)$ in $(W_Q,W_K,W_V,W_O;X)$, so $\partial S_N/\partial W_\bullet$ has
    degree $-1$ in $W_\bullet$, $1$ in $W_O$, $0$ in all else"""
    head = HeadPoint.draw(Draw(seed))
    errors = []
    for letter in LETTERS[:3]:
        before = dense(head.closed_qkv_norm.jacobian(letter))
        for name, factor in (("X", 3.0), *((other, 0.5) for other in LETTERS)):
            scaled = head.with_(**{name: factor * getattr(head, name)})
            degree = 1 if name == "W_O" else -1 if name == letter else 0
            errors.append(relative_error(dense(scaled.closed_qkv_norm.jacobian(letter)), factor**degree * before))
    return small(errors, "15 scalings")


def loss_of(head: HeadPoint, seed: int) -> Callable[..., Tensor]:
    """Return a generic loss of S_N as a function of the four weights."""
    draw = Draw(seed + 1)
    slope, target = draw.normal(*head.X.shape), draw.normal(*head.X.shape)

    def loss(*weights: Tensor) -> Tensor:
        S = head.qkv_norm(head.X, *weights)
        return (slope * S).sum() + (S - target).square().sum()

    return loss


@claim("ours/qkv-hessian-on-its-weight", "HybridNorm, Eq. 13", "HOLDS")
def hessian_on_weight(seed: int) -> Evidence:
    r"""$H w_\bullet = -g_\bullet$ on the block of $W_\bullet$ and $0$ on all others, for $W_Q$, $W_K$, $W_V$"""
    head = HeadPoint.draw(Draw(seed), 3, 4, 2)
    loss, errors = loss_of(head, seed), []
    for k in range(3):
        g = jacobian_of(loss, *head.weights, wrt=k).reshape(-1)
        w = head.weights[k].reshape(-1)
        for i in range(4):
            image = hessian_of(loss, *head.weights, wrt=(i, k)) @ w
            expected = -g if i == k else torch.zeros_like(image)
            errors.append(float((image - expected).abs().max() / g.abs().max()))
    return small(errors, "12 blocks, Hessians by autograd twice")


@claim("ours/qkv-curvature-scale", "HybridNorm, Eq. 13", "HOLDS")
def curvature_scale(seed: int) -> Evidence:
    r"""the eigenvalues of $H_{QQ}$ scale like $\|W_Q\|^{-2}$"""
    head = HeadPoint.draw(Draw(seed), 3, 4, 2)
    large = head.with_(W_Q=3 * head.W_Q)
    spectra = [
        torch.linalg.eigvalsh(hessian_of(loss_of(h, seed), *h.weights, wrt=(0, 0)))
        for h in (head, HeadPoint(large.X, *large.weights))
    ]
    return agrees(9 * spectra[1], spectra[0], "W_Q times 3 gives one ninth")
