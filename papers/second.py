"""Second references for formulas that are wrong in print, computed without the code of the first.

Rational arithmetic of the standard library, and blocks written with the functions of torch alone.

>>> variance(torch.tensor([1.0, 2.0, 3.0]))
0.6666666666666666
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Norm: TypeAlias = Callable[[Tensor], Tensor]


def variance(X: Tensor) -> float:
    """Return the variance of all entries, summed in rational numbers."""
    return statistics.pvariance(X.reshape(-1).tolist())


def standardised(X: Tensor) -> Tensor:
    """Return each row less its mean, over its standard deviation, both summed in rational numbers."""
    rows = [[(x - statistics.fmean(row)) / statistics.pstdev(row) for x in row] for row in X.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def as_printed(numbers: Iterable[float]) -> list[Fraction]:
    """Return the decimal numbers of a table as rational numbers."""
    return [Fraction(str(number)) for number in numbers]


def largest_singular_value(A: Tensor) -> float:
    """Return the root of the largest eigenvalue of the Gram matrix."""
    return float(torch.linalg.eigvalsh(A.T @ A)[-1].sqrt())


def rms(X: Tensor) -> Tensor:
    """Return torch's RMSNorm without eps."""
    return F.rms_norm(X, X.shape[-1:], eps=0.0)


def block(X: Tensor, W: Mapping[str, Tensor], heads: int, *, norms: str, causal: bool = False, norm: Norm = rms) -> Tensor:
    """Return a Transformer block whose norms have no gain, by torch's attention and norms.

    Args:
        X: The tokens, s x d.
        W: W_Q, W_K, W_V, W_O, W_1, W_2; with W_G the network is SwiGLU, without it ReLU.
        heads: Heads of attention.
        norms: "a": in front of the attention; "qkv": of queries, keys and values of each head; "f": in front of the network;
            "y": of what network and residual read.
        causal: Whether a token sees only those before it.
        norm: What a norm does to each row.
    """
    N = norm(X) if "a" in norms else X
    Q, K, V = (torch.stack((N @ W[name]).chunk(heads, -1)) for name in ("W_Q", "W_K", "W_V"))
    if "qkv" in norms:
        Q, K, V = norm(Q), norm(K), norm(V)
    heads_out = F.scaled_dot_product_attention(Q, K, V, is_causal=causal)
    Y = X + torch.cat(list(heads_out), -1) @ W["W_O"]
    Y = norm(Y) if "y" in norms else Y
    N = norm(Y) if "f" in norms else Y
    inner = F.silu(N @ W["W_G"]) * (N @ W["W_1"]) if "W_G" in W else torch.relu(N @ W["W_1"])
    return Y + inner @ W["W_2"]
