"""Rotary position embedding (RoPE, Su et al. 2021), half-split.

Feature i of a head is paired with feature i + d_k / 2, as in Hugging Face's Llama (``rotate_half``), not with feature i + 1 as
in the paper. The two differ by a fixed permutation of the columns of W_Q and W_K within each head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.rotary import angles

THETA = 10_000.0


def rotate(x: Tensor, theta: float = THETA) -> Tensor:
    """Turn the pairs (x_i, x_{i + d_k/2}) of the token at position p by the angle p theta^(-2 i / d_k).

    Args:
        x: Queries or keys, ``(..., L, d_k)`` with an even d_k.
        theta: Base of the frequencies.

    Returns:
        The same shape.

    >>> rotate(torch.ones(2, 2, dtype=torch.float64))  # position 0 stays; position 1: (cos 1 - sin 1, cos 1 + sin 1)
    tensor([[ 1.0000,  1.0000],
            [-0.3012,  1.3818]], dtype=torch.float64)
    """
    turn = angles(x.shape[-2], x.shape[-1], theta).repeat(1, 2)  # (L, d_k)
    first, second = x.chunk(2, -1)
    return x * turn.cos().to(x) + torch.cat([-second, first], -1) * turn.sin().to(x)
