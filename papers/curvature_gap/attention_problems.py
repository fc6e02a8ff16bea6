"""Attention problems with the exact norms of their Hessians: samples, and the points that break bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.bounds import AttentionNorms, attention_a_priori
from papers.ascent import WorstRatio, worst
from papers.autodiff import hessian_of, jacobian_of, kept
from papers.curvature_gap.attention_printed import (
    PrintedAttentionBlocks,
    PrintedSteps,
    functional_printed,
    outer_printed,
    theorem_1_appendix_printed,
    theorem_1_printed,
    theorem_1_steps_printed,
)
from papers.curvature_gap.point import attention
from papers.drawing import Draw
from papers.notation import spectral


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """Attention F of Eq. 1 at X and weights, with the loss ||F - target||^2 / (L d_V)."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    target: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """L, d_V, d_K."""
        return self.X.shape[0], self.X.shape[1], self.W_Q.shape[1]

    @property
    def at(self) -> AttentionAt:
        """The closed forms."""
        return AttentionAt(self.X, self.W_Q, self.W_K, self.W_V)

    @property
    def A(self) -> Tensor:
        """The attention weights."""
        return self.at.A

    @property
    def norms(self) -> dict[str, float]:
        """The spectral norms that the printed bounds read."""
        named = {"x": self.X, "w_Q": self.W_Q, "w_K": self.W_K, "w_V": self.W_V, "t": self.target}
        return {name: spectral(A) for name, A in named.items()}

    @property
    def letters(self) -> tuple[float, float, float, float, float]:
        """x, w_Q, w_K, w_V, t."""
        n = self.norms
        return n["x"], n["w_Q"], n["w_K"], n["w_V"], n["t"]

    # The exact Hessian -------------------------------------------------------------------------------------------------

    @cached_property
    def vector(self) -> Tensor:
        """W_Q, W_K, W_V, one after the other."""
        return torch.cat([W.reshape(-1) for W in (self.W_Q, self.W_K, self.W_V)])

    def loss(self, w: Tensor) -> Tensor:
        """The loss as a function of ``vector``."""
        return (attention(self.X, *self._split(w)) - self.target).square().mean()

    def _split(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.W_Q.numel()
        Q, K, V = w[:n], w[n : 2 * n], w[2 * n :]
        return Q.reshape(self.W_Q.shape), K.reshape(self.W_K.shape), V.reshape(self.W_V.shape)

    @cached_property
    def _store(self) -> dict[str, tuple[Tensor, list[float]]]:
        return {}

    @property
    def hessian(self) -> Tensor:
        """The Hessian of the loss by autograd."""
        return kept(self._store, "hessian", lambda: hessian_of(self.loss, self.vector))

    @property
    def jacobian(self) -> Tensor:
        """The Jacobian of F by autograd."""
        return kept(self._store, "jacobian", lambda: jacobian_of(lambda w: attention(self.X, *self._split(w)), self.vector))

    @property
    def norm(self) -> float:
        """The spectral norm of the Hessian."""
        return spectral(self.hessian)

    def _place(self, k: str) -> slice:
        n = self.W_Q.numel()
        return {"Q": slice(0, n), "K": slice(n, 2 * n), "V": slice(2 * n, None)}[k]

    def outer(self, i: str, j: str) -> float:
        """The norm of the outer part of block (i, j)."""
        return spectral(self._outer(i, j))

    def functional(self, i: str, j: str) -> float:
        """The norm of the functional part of block (i, j)."""
        return spectral(self.hessian[self._place(i), self._place(j)] - self._outer(i, j))

    def _outer(self, i: str, j: str) -> Tensor:
        return 2 / self.target.numel() * self.jacobian[:, self._place(i)].T @ self.jacobian[:, self._place(j)]

    def G(self, k: str) -> Tensor:
        """dF/dW_k."""
        return self.jacobian[:, self._place(k)]

    # Bounds -------------------------------------------------------------------------------------------------------------

    def theorem_1(self, *, swapped: bool = False) -> PrintedAttentionBlocks:
        """The main text's terms."""
        return theorem_1_printed(*self.sizes, *self.letters, swapped=swapped)

    def theorem_1_appendix(self, *, swapped: bool = False) -> PrintedAttentionBlocks:
        """C.1's terms, with the rank of F - Target."""
        return theorem_1_appendix_printed(*self.sizes, *self.letters, rank=self.rank, swapped=swapped)

    @property
    def rank(self) -> int:
        """The rank of F - Target."""
        return int(torch.linalg.matrix_rank(self.at.value - self.target))

    @property
    def outer_bounds(self) -> PrintedAttentionBlocks:
        """C.1's bounds on the outer parts."""
        return outer_printed(*self.sizes, *self.letters[:4])

    @property
    def functional_bounds(self) -> PrintedAttentionBlocks:
        """C.1's bounds on the functional parts."""
        return functional_printed(*self.sizes, *self.letters, math.sqrt(self.rank))

    @property
    def steps(self) -> PrintedSteps:
        """C.1's bounds on its steps."""
        norms = self.norms
        return theorem_1_steps_printed(len(self.X), self.X.shape[1], norms["x"], norms["w_V"], norms["t"], rank=self.rank)

    @property
    def a_priori(self) -> float:
        """The bound that holds."""
        arrays = (self.X, self.W_Q, self.W_K, self.W_V, self.target)
        return attention_a_priori(AttentionNorms.measured(*arrays)).whole

    @property
    def corrected(self) -> float:
        """Left over right side of the bound that holds."""
        return self.norm / self.a_priori


@cache
def sample(seed: int, count: int = 12, *, uniform: bool = False) -> tuple[AttentionProblem, ...]:
    """Return problems of different sizes and scales; ``uniform``: W_Q and W_K use different columns, all weights are 1/L."""
    draw = Draw(seed)
    found = []
    for _ in range(count):
        L, d_V, d_K = (int(draw.integers(low, high)) for low, high in ((2, 6), (1, 4), (2, 4)))
        scale = [10 ** float(v) for v in draw.uniform(4, low=-0.7, high=0.7)]
        W_Q, W_K = scale[0] * draw.normal(d_V, d_K), scale[1] * draw.normal(d_V, d_K)
        if uniform:
            W_Q[:, :1], W_K[:, 1:] = 0.0, 0.0
        found.append(
            AttentionProblem(draw.normal(L, d_V), W_Q, W_K, scale[2] * draw.normal(d_V, d_V), scale[3] * draw.normal(L, d_V))
        )
    return tuple(found)


def column(*entries: float) -> Tensor:
    """Return a column."""
    return torch.tensor(entries, dtype=torch.float64).reshape(-1, 1)


def global_minimum(q: float) -> AttentionProblem:
    """Return two tokens +-1 with W_Q = q, W_K = 0, W_V = 1, target 0: loss tanh(q W_K)^2 = 0, gradient 0, uniform attention."""
    return AttentionProblem(column(1.0, -1.0), column(q), column(0.0), column(1.0), column(0.0, 0.0))


def half_on_itself(L: int, *, w_V: float = 0.0, t: float = 1e6) -> AttentionProblem:
    """Return tokens e_1, whose first row of A puts 1/2 on the first token and the rest evenly; the target is t e_1."""
    e = column(1.0, *[0.0] * (L - 1))
    w = column(math.sqrt(math.log(L - 1)))
    return AttentionProblem(e, w, w, column(w_V), t * e)


def two_attended_tokens(L: int) -> AttentionProblem:
    """Return tokens (1, 1), (-1, 1), 0, ...: the first two look at each other alone, with equal weights; target F."""
    X = torch.zeros(L, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    eye = torch.eye(2, dtype=torch.float64)
    problem = AttentionProblem(X, torch.diag(torch.tensor([0.0, 4.0], dtype=torch.float64)), 4 * eye, 30 * eye, X)
    return replace(problem, target=problem.at.value)


def pair_and_followers(followers: int = 32) -> AttentionProblem:
    """Return a pair (+-1, 1/sqrt 2, 0) and tokens (0, 0, 1/4) that all attend the pair, with equal weights; target F."""
    X = torch.zeros(followers + 2, 3, dtype=torch.float64)
    X[0] = torch.tensor([1.0, 0.5**0.5, 0.0])
    X[1] = torch.tensor([-1.0, 0.5**0.5, 0.0])
    X[2:, 2] = 0.25
    W_Q = torch.zeros(3, 3, dtype=torch.float64)
    W_Q[2, 1] = 1e3  # the followers' queries meet the pair's common part
    problem = AttentionProblem(X, W_Q, torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), X)
    return replace(problem, target=problem.at.value)


Side = Callable[[AttentionProblem], float]


def over(left: float, right: float) -> float:
    """Return left / right, and 0 where both vanish."""
    return left / right if right else (math.inf if left > 1e-12 else 0.0)


def ratios(problems: Sequence[AttentionProblem], left: Side, right: Side) -> list[float]:
    """Return left over right side of an inequality, 0 where both vanish."""
    return [over(left(p), right(p)) for p in problems]


def worst_of(problems: Sequence[AttentionProblem], left: Side, right: Side) -> WorstRatio:
    """Return the worst ratio of an inequality, by ascent from the worst of the problems."""
    return worst(lambda p: over(left(p), right(p)), problems)
