"""The paper's block at a point: Eqs. 1 to 5 written out, with reverse-over-reverse derivatives of every stage.

One sequence, no biases, gamma = 1, beta = 0, eps = 0, ReLU, as in Theorems 4 to 6. The derivatives of a stage in all five weights
are taken at once and kept, since many rows are compared with parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.transformer import PostNormBlockAt
from papers.autodiff import hessian_of, jacobian_of, kept
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, relative_error, wrong
from papers.notation import if_it_conforms, layer_norm

WEIGHTS = ("1", "2", "K", "Q", "V")
"""The five weights in the order of Theorem 6."""

ATTENTION = ("K", "Q", "V")
PAIRS = tuple((i, j) for i in WEIGHTS for j in WEIGHTS)
ATTENTION_PAIRS = tuple((i, j) for i in ATTENTION for j in ATTENTION)


class BlockSizes(NamedTuple):
    """L, d_V, d_K and d_ff."""

    L: int
    d_V: int
    d_K: int
    d_ff: int


GENERIC = BlockSizes(3, 4, 2, 5)
"""All different, so that a product in the wrong order does not conform or is seen."""

EQUAL = BlockSizes(3, 3, 3, 3)
"""All equal: every printed product conforms, and what is still off is wrong in its entries."""

BOTH = (GENERIC, EQUAL)


def attention(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return F of Eq. 1."""
    return (X @ W_Q @ W_K.T @ X.T / math.sqrt(W_K.shape[1])).softmax(1) @ X @ W_V


@dataclass(frozen=True, eq=False)
class BlockPoint:
    """Tokens, weights and a target.

    ``uniform`` points have W_Q W_K^T = 0 with neither of them zero: every entry of A is 1/L.
    """

    sizes: BlockSizes
    X: Tensor
    weights: dict[str, Tensor]
    target: Tensor

    # Values -----------------------------------------------------------------------------------------------------------

    def stage(self, name: str, W: dict[str, Tensor]) -> Tensor:
        """Return F, Y, S or Z of Eqs. 1, 4, 5 as a function of the weights, or the loss of Sec. 3."""
        F = attention(self.X, W["Q"], W["K"], W["V"])
        if name == "F":
            return F
        if name == "loss of F":
            return (F - self.target).square().mean()
        Y = layer_norm(self.X + F)
        if name == "Y":
            return Y
        S = torch.relu(Y @ W["1"]) @ W["2"] + Y
        if name == "S":
            return S
        Z = layer_norm(S)
        return Z if name == "Z" else (Z - self.target).square().mean()

    # Closed forms of this code base -----------------------------------------------------------------------------------

    @cached_property
    def block(self) -> PostNormBlockAt:
        """The closed forms of the block."""
        W = self.weights
        return PostNormBlockAt(self.X, W["Q"], W["K"], W["V"], W["1"], W["2"])

    @property
    def at(self) -> AttentionAt:
        """The closed forms of the attention."""
        return self.block.attention

    # Derivatives by automatic differentiation -------------------------------------------------------------------------

    def first(self, name: str, i: str) -> Tensor:
        """Return d vec_r(stage) / d vec_r(W_i)^T."""
        return self._first(name)[:, self.place(i)]

    def second(self, name: str, i: str, j: str) -> Tensor:
        """Return d vec_r(d stage/dW_i) / d vec_r(W_j)^T."""
        rows, columns = self.place(i), self.place(j)
        return self._second(name)[:, rows, columns].reshape(-1, columns.stop - columns.start)

    def place(self, i: str) -> slice:
        """Return where W_i stands among all weights, one after the other."""
        start = sum(self.weights[k].numel() for k in WEIGHTS[: WEIGHTS.index(i)])
        return slice(start, start + self.weights[i].numel())

    def n(self, i: str) -> int:
        """Return n_i, the number of entries of W_i."""
        return self.weights[i].numel()

    def loss(self, w: Tensor) -> Tensor:
        """Return the loss of Sec. 3 as a function of ``vector``."""
        return self._of_vector("loss")(w)

    def _first(self, name: str) -> Tensor:
        return self._kept(("first", name), lambda: jacobian_of(self._of_vector(name), self.vector))

    def _second(self, name: str) -> Tensor:
        n = self.vector.numel()
        return self._kept(("second", name), lambda: hessian_of(self._of_vector(name), self.vector).reshape(-1, n, n))

    @cached_property
    def vector(self) -> Tensor:
        """The weights, one after the other."""
        return torch.cat([self.weights[i].reshape(-1) for i in WEIGHTS])

    def _of_vector(self, name: str) -> Callable[[Tensor], Tensor]:
        shapes = {i: self.weights[i].shape for i in WEIGHTS}
        return lambda w: self.stage(name, {i: w[self.place(i)].reshape(shapes[i]) for i in WEIGHTS})

    @cached_property
    def _store(self) -> dict[tuple[str, str], tuple[Tensor, list[float]]]:
        return {}

    def _kept(self, key: tuple[str, str], compute: Callable[[], Tensor]) -> Tensor:
        return kept(self._store, key, compute)


@cache
def point(seed: int, sizes: BlockSizes = GENERIC, *, uniform: bool = False) -> BlockPoint:
    """Return the point of a seed, the same object for the same arguments."""
    draw, (L, d_V, d_K, d_ff) = Draw(seed), sizes
    X = draw.normal(L, d_V)
    weights = {
        "1": draw.normal(d_V, d_ff),
        "2": draw.normal(d_ff, d_V),
        "K": draw.normal(d_V, d_K, std=0.7),
        "Q": draw.normal(d_V, d_K, std=0.7),
        "V": draw.normal(d_V, d_V),
    }
    if uniform:  # queries and keys use different columns
        half = d_K // 2
        weights["Q"][:, :half], weights["K"][:, half:] = 0.0, 0.0
    return BlockPoint(sizes, X, weights, draw.normal(L, d_V))


def points(seed: int) -> Iterator[BlockPoint]:
    """Yield the points of a seed with generic and with equal sizes."""
    for sizes in BOTH:
        yield point(seed, sizes)


# Comparing printed matrices with autograd


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
