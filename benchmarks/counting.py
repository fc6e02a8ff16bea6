"""Operations and bytes of the output by formula, for forecasts.

A weight enters a token's computation through one vector, its lift: dY_n = x_n dW. A block of the Hessian is therefore

    H_ij = sum_n  lift_i(n)^T  C_n  lift_j(n),

a sum over the tokens of the batch, whatever lies between (where attention mixes tokens, C is first summed over one of the two
token axes, which costs L d_i P_j and is of lower order). Each token n, seen from both sides, costs P_i P_j multiply-adds;
symmetry halves their sum:

    multiply-adds of the dense Hessian  =  P^2 B L / 2,        floating point operations  =  P^2 B L.

It is the work of the product as the papers write it. It is no proven lower bound: a route that factorises C_n needs less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PESSIMISTIC_RATE = 2e8
"""Floating point operations a second that a forecast counts on before anything was measured; any computer does more."""


def lift_operations(parameters: int, rows: int) -> float:
    """Return the floating point operations of the dense Hessian: P^2 B L.

    >>> lift_operations(2816, 49) == 2816**2 * 49
    True
    """
    return float(parameters) ** 2 * rows


def pair_operations(left: int, right: int, rows: int) -> float:
    """Return the floating point operations of one block: 2 P_i P_j B L (a block of its own has no symmetry to use)."""
    return 2.0 * left * right * rows


def forward_operations(tokens: int, d_model: int, d_ff: int) -> float:
    """Return the floating point operations of one block's forward pass on one sequence."""
    return 2.0 * tokens * (3 * d_model**2 + 2 * d_model * d_ff) + 4.0 * tokens**2 * d_model


def product_operations(tokens: int, d_model: int, d_ff: int, layers: int, batch: int) -> float:
    """Return the floating point operations of one Hessian-vector product: tangent and second adjoint, about 9 forwards.

    Forward 1, tangent 2, adjoint 2 and its tangent 4.
    """
    return 9.0 * layers * batch * forward_operations(tokens, d_model, d_ff)


def dense_bytes(parameters: int, itemsize: int) -> int:
    """Return the bytes of the P x P matrix.

    >>> dense_bytes(1000, 8)
    8000000
    """
    return parameters * parameters * itemsize


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of log y over log x by least squares.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    u, v = [math.log(a) for a in x], [math.log(b) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    spread = sum((a - mean_u) ** 2 for a in u)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / spread
