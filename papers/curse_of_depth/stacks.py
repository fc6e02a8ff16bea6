"""Stacks of blocks at initialisation, with the measured and the predicted numbers that the rows compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock, initialise
from papers.autodiff import jacobian_of
from papers.drawing import Draw


def make_block(seed: int, layer: int = 1, placement: str = "pre", **options: Any) -> TransformerBlock:
    """Return a block of width 16 with RMSNorm, weights of standard deviation 1 / sqrt(2.5 d), and no gains."""
    settings: dict[str, Any] = {"norm": "rmsnorm", "causal": True, "output_projection": True, "affine": False, "eps": 0.0}
    settings |= {"d_model": 16, "d_ff": 32, "n_heads": 2, "n_layers": 64} | options
    block = TransformerBlock(placement=placement, layer=layer, **settings).double().requires_grad_(False)
    initialise(block, "normal", seed=1000 * seed + layer)
    return block


def make_stack(seed: int, depth: int, placement: str = "pre", **options: Any) -> list[TransformerBlock]:
    """Return the blocks 1 to ``depth``."""
    return [make_block(seed, layer, placement, **options) for layer in range(1, depth + 1)]


def stream(blocks: list[TransformerBlock], X: Tensor) -> list[Tensor]:
    """Return x_1, ..., x_{L+1}."""
    out = [X]
    for block in blocks:
        out.append(block(out[-1]))
    return out


def block_jacobian(block: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """Return dy/dx of a block by automatic differentiation."""
    return jacobian_of(block, X)


def exponent(x: list[float], y: list[float]) -> float:
    """Return the slope of log y over log x."""
    a, b = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    return float(((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum())


class StackSizes(NamedTuple):
    """The numbers that enter A and B: those of a small model with LLaMA-130M's gain."""

    d: int = 64
    d_ffn: int = 256
    h: int = 4
    s: int = 32
    sigma: float = 0.0693

    @property
    def root(self) -> float:
        """sqrt(d) + sqrt(d_FFN)."""
        return math.sqrt(self.d) + math.sqrt(self.d_ffn)

    @property
    def of_sequence(self) -> float:
        """sqrt(s) + 2 + 1 / sqrt(s)."""
        return math.sqrt(self.s) + 2 + 1 / math.sqrt(self.s)

    @property
    def ffn_printed(self) -> float:
        """The factor of 1 / sigma_x in the network's part of Eq. 36."""
        return self.sigma**2 / self.root**2

    @property
    def ffn(self) -> float:
        """A's part a of the network, corrected."""
        return self.sigma**2 * self.root**2

    @property
    def attention(self) -> float:
        """The factor of 1 / sigma_x in the attention's part of Eq. 36: b."""
        head = self.d / self.h
        inner = self.sigma**2 * self.d * math.sqrt(head) + 1 + math.sqrt(head / self.d)
        return 2 * self.d * self.h * self.of_sequence * self.sigma**2 * inner

    @property
    def A_printed(self) -> float:
        """A of Eq. 47."""
        head = self.d / self.h
        inner = self.d * math.sqrt(head) + 1 + math.sqrt(head / self.d)
        return self.ffn_printed + 2 * self.d * self.h * self.of_sequence * self.sigma**2 * inner

    @property
    def B_printed(self) -> float:
        """B of Eq. 48."""
        return 2 * self.d * self.h * self.of_sequence * self.sigma**4 * self.d * math.sqrt(self.d / self.h)


def log_product(A: float, B: float, sigmas: Tensor) -> float:
    """Return log of the product of 1 + A / sigma + B / sigma^2."""
    return float(torch.log1p(A / sigmas + B / sigmas**2).sum())


def layers(L: int) -> Tensor:
    """Return 1, ..., L."""
    return torch.arange(1, L + 1, dtype=torch.float64)


def attention_head(N: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return one head of attention on tokens N."""
    return torch.softmax(N @ W_Q @ W_K.T @ N.T / math.sqrt(W_K.shape[1]), -1) @ N @ W_V


class Network(NamedTuple):
    """A feed-forward network of the theory: W_1 d x d_ff and W_2 d_ff x d with entries of one standard deviation."""

    W_1: Tensor
    W_2: Tensor

    @staticmethod
    def draw(draw: Draw, d: int, d_ff: int, std: float) -> Network:
        """Draw both matrices."""
        return Network(draw.normal(d, d_ff, std=std), draw.normal(d_ff, d, std=std))

    def __call__(self, N: Tensor) -> Tensor:
        """Return ReLU(N W_1) W_2."""
        return torch.relu(N @ self.W_1) @ self.W_2
