"""The right sides of Lemmas A.1 and A.2 as printed, matrix by matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from derivations.matrix import Commutation
from derivations.normalization import RMSNormAt
from derivations.softmax import SoftmaxAt
from hessiankit.ledger.hybridnorm.definitions import HeadPoint


def eye(n: int) -> Tensor:
    """Return I_n."""
    return torch.eye(n, dtype=torch.float64)


def dense(matrix: Any) -> Tensor:
    """Return an expression's matrix as a tensor."""
    return torch.as_tensor(matrix.dense(), dtype=torch.float64)


def printed_pre_norm(head: HeadPoint, letter: str) -> Tensor:
    """Return the right side of Eq. 15 (W_O), 16 (W_V), 17 (W_Q) or 18 (W_K)."""
    s, d, d_k = head.sizes
    N = RMSNormAt(head.X).value
    softmax = SoftmaxAt(N @ head.W_Q @ head.W_K.T @ N.T / math.sqrt(d_k), mask=head.mask)
    if letter == "W_O":
        return torch.kron(softmax.value @ N @ head.W_V, eye(d))
    if letter == "W_V":
        return torch.kron(softmax.value @ N, head.W_O.T.contiguous())
    front = torch.kron(eye(s), head.W_O.T @ head.W_V.T @ N.T) @ dense(softmax.jacobian("T"))
    if letter == "W_Q":
        return front @ torch.kron(N, N @ head.W_K) / math.sqrt(d_k)
    return front @ torch.kron(N @ head.W_Q, N) / math.sqrt(d_k) @ dense(Commutation(d_k, d))


def printed_qkv_norm(head: HeadPoint, letter: str, *, power: float = 0.5) -> Tensor:
    """Return the right side of Eq. 22 (W_O), 23 (W_V), 24 (W_Q) or 25 (W_K).

    Args:
        head: The point.
        letter: Which weight.
        power: 1 divides by d_k in place of its root, as two lines of the proof do.
    """
    s, d, d_k = head.sizes
    Q, K, V = (RMSNormAt(head.X @ W) for W in head.weights[:3])
    softmax = SoftmaxAt(Q.value @ K.value.T / math.sqrt(d_k), mask=head.mask)
    inner = torch.kron(head.X, eye(d_k))
    if letter == "W_O":
        return torch.kron(softmax.value @ V.value, eye(d))
    if letter == "W_V":
        return torch.kron(softmax.value, head.W_O.T.contiguous()) @ dense(V.jacobian("X")) @ inner
    front = torch.kron(eye(s), head.W_O.T @ V.value.T) @ dense(softmax.jacobian("T"))
    if letter == "W_Q":
        return front @ torch.kron(eye(s), K.value) / d_k**power @ dense(Q.jacobian("X")) @ inner
    turned = torch.kron(Q.value, eye(s)) / d_k**power @ dense(Commutation(d_k, s))
    return front @ turned @ dense(K.jacobian("X")) @ inner
