"""Random problems to hold bounds against, and their exact Hessians by autograd twice: attention and the post-norm block.

The two kinds are ``init`` (weights N(0, 1/d_in), standard normal tokens and target) and ``large`` (weights 3 times that, the target
is the output with 10 % noise). The functions use nothing of ``derivations``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformer_reference as reference
from torch import Tensor
from transformer_reference import normalised

F64 = torch.float64
BLOCK_SIZES = ((4, 4, 2, 6), (5, 6, 3, 8), (6, 4, 2, 4))  # L, d_V, d_K, d_ff


@dataclass(frozen=True)
class Problem:
    """One sequence, weights by name and a target, with options of the function that they go to."""

    X: Tensor
    weights: dict[str, Tensor]
    target: Tensor

    def scaled(self, **factors: float) -> Problem:
        """The same problem with some weights, "X" or "target" multiplied."""
        weights = {name: factors.get(name, 1.0) * W for name, W in self.weights.items()}
        return Problem(factors.get("X", 1.0) * self.X, weights, factors.get("target", 1.0) * self.target)


def attention(X: Tensor, w: dict[str, Tensor], mask: Tensor | None = None, heads: int = 1) -> Tensor:
    """Softmax attention by its weights among others."""
    weights = {name: w[name] for name in ("W_Q", "W_K", "W_V", "W_O") if name in w}
    return reference.attention(X, **weights, mask=mask, heads=heads)


def post_block(
    X: Tensor,
    w: dict[str, Tensor],
    *,
    eps: float | tuple[float, float] = 0.0,
    norm: str = "layernorm",
    act: Callable[[Tensor], Tensor] = torch.relu,
    fixed: dict[str, Tensor] | None = None,
    mask: Tensor | None = None,
    heads: int = 1,
) -> Tensor:
    f, (first, last) = fixed or w, eps if isinstance(eps, tuple) else (eps, eps)
    Y = normalised(X + attention(X, w, mask, heads), first, norm) * f.get("gamma_1", 1.0) + f.get("beta_1", 0.0)
    S = Y + act(Y @ w["W_1"] + f.get("b_1", 0.0)) @ w["W_2"] + f.get("b_2", 0.0)
    return normalised(S, last, norm) * f.get("gamma_2", 1.0) + f.get("beta_2", 0.0)


def hessian_blocks(f: Callable[..., Tensor], problem: Problem) -> dict[tuple[str, str], Tensor]:
    """Return the blocks of the Hessian of mean((f(X, weights) - target)^2) in the weights, reverse over reverse."""
    H, names, sizes = whole_hessian(f, problem), list(problem.weights), [W.numel() for W in problem.weights.values()]
    rows = [part.split(sizes, 1) for part in H.split(sizes, 0)]
    return {(a, b): rows[i][j] for i, a in enumerate(names) for j, b in enumerate(names)}


def whole_hessian(f: Callable[..., Tensor], problem: Problem) -> Tensor:
    leaves = [W.detach().clone().requires_grad_() for W in problem.weights.values()]
    loss = (f(problem.X, dict(zip(problem.weights, leaves, strict=True))) - problem.target).square().mean()
    first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, leaves, create_graph=True)])
    if first.grad_fn is None:
        return torch.zeros(len(first), len(first), dtype=first.dtype)
    directions = torch.eye(len(first), dtype=first.dtype)
    second = torch.autograd.grad(first, leaves, directions, is_grads_batched=True, materialize_grads=True)
    return torch.cat([s.reshape(len(first), -1) for s in second], 1)


def norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A, 2)) if A.numel() else 0.0


def draw_weights(L: int, d: int, d_K: int, d_ff: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights N(0, 1/d_in)."""
    shapes = {"W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, d)}
    if d_ff is not None:
        shapes |= {"W_1": (d, d_ff), "W_2": (d_ff, d)}
    return {name: torch.randn(*s, generator=generator, dtype=F64) / math.sqrt(s[0]) for name, s in shapes.items()}


def problems(kind: str, sizes: tuple[tuple[int, ...], ...], count: int, seed: int = 0) -> Iterator[Problem]:
    """Yield problems, "init" or "large". The sizes come in turn; with d_ff they are for the block."""
    for n in range(count):
        L, d, d_K, *rest = sizes[n % len(sizes)]
        g = torch.Generator().manual_seed(1000 * seed + n)
        weights = draw_weights(L, d, d_K, rest[0] if rest else None, g)
        f = post_block if rest else attention
        X = torch.randn(L, d, generator=g, dtype=F64)
        if kind == "init":
            yield Problem(X, weights, torch.randn(L, d, generator=g, dtype=F64))
        else:
            weights = {name: 3 * W for name, W in weights.items()}
            out = f(X, weights)
            yield Problem(X, weights, out + 0.1 * out.std() * torch.randn(L, d, generator=g, dtype=F64))
