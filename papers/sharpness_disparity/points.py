"""The layers of the theorems at a point, written out: what the rows compare closed forms and printed formulas with.

Q is linear in Y there, with dQ/dY the row ``q``: the gradients of the theorems hold for any Q, and depend on it through dQ/dY.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt
from papers.autodiff import jacobian_of
from papers.drawing import Draw
from papers.notation import dense, layer_norm

SLOPE = 0.01
"""Of Leaky ReLU."""
SIGMA: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": lambda U: F.leaky_relu(U, SLOPE),
    "gelu": F.gelu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class FeedForwardPoint:
    """Y = X + sigma(Norm(X; gamma) W_1) W_2 of Theorem 4.1: X n x D, gamma 1 x D, W_1 D x M, W_2 M x D, q 1 x nD."""

    X: Tensor
    gamma: Tensor
    W_1: Tensor
    W_2: Tensor
    q: Tensor
    activation: str = "relu"

    @staticmethod
    def draw(seed: int, activation: str = "relu", n: int = 4, D: int = 5, M: int = 7) -> FeedForwardPoint:
        """Return a generic point."""
        draw = Draw(seed)
        arrays = (draw.normal(n, D), draw.normal(1, D), draw.normal(D, M), draw.normal(M, D), draw.normal(1, n * D))
        return FeedForwardPoint(*arrays, activation)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """n, D and M."""
        return self.X.shape[0], self.X.shape[1], self.W_1.shape[1]

    @property
    def X_norm(self) -> Tensor:
        """Norm(X; gamma)."""
        return layer_norm(self.X) * self.gamma

    def Q(self, gamma: Tensor, W_1: Tensor, W_2: Tensor) -> Tensor:
        """The function whose gradients the theorem gives."""
        F_ = SIGMA[self.activation](F.layer_norm(self.X, self.X.shape[1:], gamma[0], eps=0.0) @ W_1) @ W_2
        return self.q @ (self.X + F_).reshape(-1)

    def gradient(self, letter: str) -> Tensor:
        """dQ/dgamma, dQ/dW_1 or dQ/dW_2 by automatic differentiation, a row."""
        return jacobian_of(self.Q, self.gamma, self.W_1, self.W_2, wrt=("gamma", "W_1", "W_2").index(letter))

    @property
    def closed(self) -> FeedForwardAt:
        """The closed forms of the network as a function of X_Norm and the weights."""
        return FeedForwardAt(self.X_norm, self.W_1, self.W_2, activation=self.activation, residual=False)

    def closed_gradient(self, letter: str) -> Tensor:
        """The same from the closed forms of the chapters."""
        if letter != "gamma":
            return self.q @ dense(self.closed.jacobian(letter))
        return self.q @ dense(self.closed.jacobian("Y") @ LayerNormAt(self.X, self.gamma[0]).jacobian("gamma"))

    @property
    def dA(self) -> Tensor:
        """dA/dM."""
        return dense(self.closed.D_1)


@dataclass(frozen=True)
class AttentionSublayer:
    """Y = X + SA(Norm(X; gamma)) of Theorem 4.2, one head of width D: X n x D, gamma 1 x D, four D x D weights, q 1 x nD."""

    X: Tensor
    gamma: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    q: Tensor
    causal: bool = False

    @staticmethod
    def draw(seed: int, *, causal: bool = False, n: int = 4, D: int = 5, std: float = 1.0) -> AttentionSublayer:
        """Return a generic point."""
        draw = Draw(seed)
        X, gamma = draw.normal(n, D), draw.normal(1, D)
        W_Q, W_K, W_V, W_O = (draw.normal(D, D, std=std) for _ in range(4))
        return AttentionSublayer(X, gamma, W_Q, W_K, W_V, W_O, draw.normal(1, n * D), causal)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V, W_O."""
        return self.W_Q, self.W_K, self.W_V, self.W_O

    @property
    def sizes(self) -> tuple[int, int]:
        """n and D."""
        return self.X.shape[0], self.X.shape[1]

    @property
    def X_norm(self) -> Tensor:
        """Norm(X; gamma)."""
        return layer_norm(self.X) * self.gamma

    @property
    def mask(self) -> Tensor | None:
        """Where a token may look, None for everywhere."""
        return torch.ones(len(self.X), len(self.X), dtype=torch.bool).tril() if self.causal else None

    def Q(self, gamma: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor) -> Tensor:
        """The function whose gradients the theorem gives."""
        N = F.layer_norm(self.X, self.X.shape[1:], gamma[0], eps=0.0)
        logits = N @ W_Q @ W_K.T @ N.T / math.sqrt(self.X.shape[1])
        if self.mask is not None:
            logits = logits.masked_fill(~self.mask, -math.inf)
        return self.q @ (self.X + logits.softmax(-1) @ N @ W_V @ W_O).reshape(-1)

    def gradient(self, letter: str) -> Tensor:
        """dQ/dgamma or dQ/dW by automatic differentiation, a row."""
        names = ("gamma", "W_Q", "W_K", "W_V", "W_O")
        return jacobian_of(self.Q, self.gamma, *self.weights, wrt=names.index(letter))

    @property
    def closed(self) -> AttentionAt:
        """The closed forms of the attention as a function of X_Norm and the weights."""
        return AttentionAt(self.X_norm, *self.weights, mask=self.mask)

    def closed_gradient(self, letter: str) -> Tensor:
        """The same from the closed forms of the chapters."""
        if letter != "gamma":
            return self.q @ dense(self.closed.jacobian(letter))
        return self.q @ dense(self.closed.jacobian("X") @ LayerNormAt(self.X, self.gamma[0]).jacobian("gamma"))

    @property
    def dA(self) -> Tensor:
        """dA/dM."""
        return dense(self.closed.softmax.jacobian("T"))
