"""The position-wise feed-forward network, plain or gated."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.support.errors import check_sizes, unknown

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
GATED = {"swiglu": "silu"}
"""The gated networks, and the activation of their gate."""


def weight(rows: int, columns: int) -> nn.Parameter:
    """Return a matrix of independent normal entries of standard deviation 1 / sqrt(rows)."""
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(rows))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W, or x W + b."""
    return x @ weight if bias is None else x @ weight + bias


class FeedForward(nn.Module):
    """Position-wise feed-forward network sigma(Y W_1 + 1 b_1^T) W_2 + 1 b_2^T.

    ``"swiglu"`` has a gate: (silu(Y W_G + 1 b_G^T) * (Y W_1 + 1 b_1^T)) W_2 + 1 b_2^T, entry by entry.

    Args:
        d_model: Width of a token.
        d_ff: Hidden width.
        activation: One of ``relu, leaky_relu, gelu, gelu_tanh, silu, tanh, identity``, or ``swiglu``, which has the gate W_G.
        bias: Whether there are b_1, b_2 (and b_G).
    """

    b_1: nn.Parameter | None
    b_2: nn.Parameter | None
    W_G: nn.Parameter | None
    b_G: nn.Parameter | None

    def __init__(self, d_model: int, d_ff: int, *, activation: str = "relu", bias: bool = False) -> None:
        super().__init__()
        if activation not in ACTIVATIONS and activation not in GATED:
            raise unknown("FeedForward", "activation", activation, (*ACTIVATIONS, *GATED))
        check_sizes("FeedForward", d_model=d_model, d_ff=d_ff)
        self.activation, gated = activation, activation in GATED

        def b(width: int, present: bool = bias) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(width)) if present else None

        self.W_1 = weight(d_model, d_ff)
        self.register_parameter("b_1", b(d_ff))
        self.W_2 = weight(d_ff, d_model)
        self.register_parameter("b_2", b(d_model))
        self.register_parameter("W_G", weight(d_model, d_ff) if gated else None)
        self.register_parameter("b_G", b(d_ff, bias and gated))

    def forward(self, y: Tensor) -> Tensor:
        """Map tokens ``(..., d_model)`` to ``(..., d_model)``."""
        hidden = linear(y, self.W_1, self.b_1)  # (..., d_ff)
        if self.W_G is None:
            hidden = ACTIVATIONS[self.activation](hidden)
        else:
            hidden = ACTIVATIONS[GATED[self.activation]](linear(y, self.W_G, self.b_G)) * hidden
        return linear(hidden, self.W_2, self.b_2)  # (..., d_model)

    def extra_repr(self) -> str:
        """Return the options shown by ``print(network)``."""
        return f"{self.W_1.shape[0]} -> {self.W_1.shape[1]}, {self.activation}"
