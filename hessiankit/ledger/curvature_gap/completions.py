"""What the paper leaves out: gains, shifts, eps, biases, W_O, masks, heads, other activations and losses, depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.composition import Composite
from derivations.feedforward import FeedForwardAt
from derivations.loss import CrossEntropyAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed
from derivations.pooling import MeanPoolHeadAt
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.autodiff import hessian_of, jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.notation import dense, spectral
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, relative_error, small
from hessiankit.ledger.registry import claim

Values = dict[str, Tensor]
EPS = 0.01


def all_blocks(at: Operation, values: Values, function: Callable[[Values], Tensor]) -> Evidence:
    """Compare value, Jacobians and second derivatives of an operation, all arguments and pairs, with autograd.

    An error is relative to its block's largest entry; where the whole block is rounding, to that of all blocks.
    """
    names = list(at.arguments)
    ends = torch.tensor([values[name].numel() for name in names]).cumsum(0).tolist()
    places = {name: slice(end - values[name].numel(), end) for name, end in zip(names, ends, strict=True)}
    vector = torch.cat([values[name].reshape(-1) for name in names])

    def of_vector(v: Tensor) -> Tensor:
        return function({name: v[places[name]].reshape(values[name].shape) for name in names})

    n, value = vector.numel(), function(values)
    first, second = jacobian_of(of_vector, vector), hessian_of(of_vector, vector).reshape(-1, n, n)
    errors = [relative_error(at.value, value)]
    errors += [block_error(dense(at.jacobian(i)), first[:, places[i]], first) for i in names]
    for i in names:
        for j in names:
            reference = second[:, places[i], places[j]].reshape(-1, values[j].numel())
            errors.append(block_error(dense(at.hessian(i, j)), reference, second))
    return small(errors, f"{len(names)} Jacobians and {len(names) ** 2} second derivatives, against autograd")


def block_error(found: Tensor, reference: Tensor, whole: Tensor) -> float:
    """Return the largest error of a block, relative to its own entries unless they are rounding."""
    size, all_sizes = float(reference.abs().max()), float(whole.abs().max())
    return float((found - reference).abs().max()) / (size if size > 1e-12 * all_sizes else all_sizes)


def layer_norm(X: Tensor, gamma: Tensor | float = 1.0, beta: Tensor | float = 0.0, eps: float = 0.0) -> Tensor:
    """Return LayerNorm with gain, shift and eps."""
    centred = X - X.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * gamma + beta


def attention(v: Values, mask: Tensor | None = None) -> Tensor:
    """Return F for the arguments by name, with W_O where there is one."""
    logits = v["X"] @ v["W_Q"] @ v["W_K"].T @ v["X"].T / math.sqrt(v["W_K"].shape[1])
    logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
    F = logits.softmax(1) @ v["X"] @ v["W_V"]
    return F @ v["W_O"] if "W_O" in v else F


@claim("ours/norm-norms", "Closing the Curvature Gap, in place of Lemma 4", "HOLDS", uses=[norm_jacobian_norm, norm_hessian_norm])
def norm_norms(seed: int) -> Evidence:
    r"""$\|J\|_2 = 1/\min_is_i$ and $\|H\|_2 = \max_i\frac{\rho_i}{\sqrt d\,s_i^2}\sqrt{\max(d-2+9(1-\rho_i^2)^2, 2)}$,
    $\rho_i^2 = \|\hat x_i\|^2/d$; for RMSNorm $d - 1$ in place of $d - 2$"""
    draw = Draw(seed)
    found, references = [], []
    for eps in (0.0, 0.3):
        X = draw.normal(3, 5)
        for kind, at in (("layernorm", LayerNormAt(X, eps=eps)), ("rmsnorm", RMSNormAt(X, eps=eps))):
            found += [norm_jacobian_norm(X, eps, norm=kind), norm_hessian_norm(X, eps, norm=kind)]
            references += [spectral(dense(at.jacobian("X"))), spectral(dense(at.hessian("X", "X")))]
    return agrees(found, references, "eps = 0 and 0.3, by singular values of the closed forms")


def feedforward(seed: int, activation: str, sigma: Callable[[Tensor], Tensor]) -> Evidence:
    """Compare the feed-forward network with biases and residual."""
    draw = Draw(seed)
    shapes = {"Y": (2, 3), "W_1": (3, 4), "W_2": (4, 3), "b_1": (4,), "b_2": (3,)}
    v = {name: draw.normal(*shape) for name, shape in shapes.items()}

    def function(v: Values) -> Tensor:
        return v["Y"] + sigma(v["Y"] @ v["W_1"] + v["b_1"]) @ v["W_2"] + v["b_2"]

    return all_blocks(FeedForwardAt(v["Y"], v["W_1"], v["W_2"], v["b_1"], v["b_2"], activation), v, function)


def draw_block(draw: Draw, X: Tensor) -> Values:
    """Return every argument of a block of width 3, d_ff = 2, d_K = d_v = 2."""
    shapes = {"W_Q": (3, 2), "W_K": (3, 2), "W_V": (3, 2), "W_O": (2, 3), "W_1": (3, 2), "W_2": (2, 3), "b_1": (2,), "b_2": (3,)}
    shapes |= {f"{name}_{k}": (3,) for k in (1, 2) for name in ("gamma", "beta")}
    return {"X": X, **{name: 0.7 * draw.normal(*shape) for name, shape in shapes.items()}}


def block(v: Values) -> Tensor:
    """Return the block with everything: gains, shifts, eps, biases, W_O, causal mask, GELU."""
    mask = torch.ones(len(v["X"]), len(v["X"]), dtype=torch.bool).tril()
    Y = layer_norm(v["X"] + attention(v, mask), v["gamma_1"], v["beta_1"], EPS)
    U = Y @ v["W_1"] + v["b_1"]
    S = Y + (U * 0.5 * (1 + torch.erf(U / math.sqrt(2)))) @ v["W_2"] + v["b_2"]
    return layer_norm(S, v["gamma_2"], v["beta_2"], EPS)


def block_at(v: Values) -> PostNormBlockAt:
    """Return its closed forms."""
    return PostNormBlockAt(**v, mask=torch.ones(len(v["X"]), len(v["X"]), dtype=torch.bool).tril(), eps=EPS, activation="gelu")


@cache
def stacked(seed: int) -> tuple[Operation, Operation, Values]:
    """Return two blocks and a mean-pool head, the cross-entropy on it, and the values of all parameters."""
    draw = Draw(seed)
    first = draw_block(draw, draw.normal(2, 3))
    lower = block_at(first)
    second = draw_block(draw, lower.value)
    upper = block_at(second)
    own = [Renamed(at, {name: f"{k}.{name}" for name in at.arguments if name != "X"}) for k, at in ((1, lower), (2, upper))]
    head = MeanPoolHeadAt(upper.value, draw.normal(3, 4))
    model = Composite(head, {"Z": Composite(own[1], {"X": own[0]})})
    values = {"X": first["X"], "W_c": head.W_c}
    values |= {f"{k}.{name}": W for k, v in ((1, first), (2, second)) for name, W in v.items() if name != "X"}
    return model, CrossEntropyAt(head.value, [2]), values
