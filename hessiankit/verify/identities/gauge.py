"""How many directions in the weights of one attention head leave its function unchanged, and a change of units.

Counted are the linear maps of W_Q, W_K, W_V (columns) and W_O (rows), gl(d_k)^4, that do not change the head for any input.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hessiankit.errors import InputError


def gauge_dimension(head_dim: int, *, normed: str = "", rotary: bool = False) -> int:
    """Return the dimension of the gauge group of one attention head.

    With d = head_dim, the logits (W_Q, W_K) and the values (W_V, W_O) add up:

        logits   d^2 (W_Q G, W_K G^-T); with an RMS norm on q or k d (d - 1) / 2 rotations, plus one scale for each norm;
                 rotary: d (a rotation and a scale for each frequency), with norms d / 2 rotations plus the scales
        values   d^2 (W_V G, G^-1 W_O); with a norm on v or on the head's output c d (d - 1) / 2 + 1

    Source: HybridNorm (arXiv 2503.04598) defines the placements; the dimensions are not in the paper.

    Args:
        head_dim: Width of a query, a key and a value.
        normed: Which of "q", "k", "v", "c" (the head's output before W_O) pass an RMS norm without gain and with eps = 0:
            "qk" for QK-Norm, "qkv" for QKV-Norm.
        rotary: Whether q and k are rotated by position, after their norms; head_dim is even then.

    Raises:
        InputError: Another letter, a width below 1, or an odd one with rotary.

    >>> gauge_dimension(4), gauge_dimension(4, normed="qkv"), gauge_dimension(4, normed="qk", rotary=True)
    (32, 15, 20)
    """
    d, letters = head_dim, set(normed)
    if not letters <= set("qkvc"):
        raise InputError(f"gauge_dimension: normed={normed!r}; expected letters out of 'q', 'k', 'v', 'c'")
    if d < 1 or (rotary and d % 2):
        raise InputError(f"gauge_dimension: head_dim={d}, rotary={rotary}; expected at least 1, and an even number with rotary")
    rotations, scales = d * (d - 1) // 2, len(letters & set("qk"))
    if rotary:
        logits = d // 2 + scales if scales else d
    else:
        logits = rotations + scales if scales else d * d
    return logits + (rotations + 1 if letters & set("vc") else d * d)


def rescaled(matrix: Tensor, slices: Mapping[str, slice], factors: Mapping[str, float]) -> Tensor:
    """Return the Hessian of theta -> loss(D theta) from the Hessian of the loss at D theta: D H D, D = diag(factors).

    LayerNorm Scaling (The Curse of Depth in Large Language Models, arXiv 2502.05795, Eq. 12) divides what norm l gives by
    sqrt(l). It is Pre-LN at gamma_l / sqrt(l), beta_l / sqrt(l), so its Hessian is ``rescaled`` Pre-LN's with the factor
    1 / sqrt(l) for both: the blocks of all other weights are equal.

    Args:
        matrix: The Hessian (P, P) at D theta.
        slices: Rows of each parameter, as in :class:`hessiankit.Hessian`.
        factors: By parameter; 1 for those left out.

    Raises:
        InputError: A factor for an unknown parameter.

    >>> H = torch.tensor([[2.0, 3.0], [3.0, 5.0]])
    >>> rescaled(H, {"gamma": slice(0, 1), "W": slice(1, 2)}, {"gamma": 0.5}).tolist()
    [[0.5, 1.5], [1.5, 5.0]]
    """
    D = torch.ones(matrix.shape[0]).to(matrix)
    for name, factor in factors.items():
        if name not in slices:
            raise InputError(f"rescaled: no parameter named '{name}'; the matrix has {', '.join(slices)}")
        D[slices[name]] = factor
    return D[:, None] * matrix * D
