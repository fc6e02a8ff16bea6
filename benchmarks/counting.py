"""Operations of the output by formula, for forecasts.

A weight enters a token's computation through one vector, its lift: dY_n = x_n dW. A block of the Hessian is therefore

    H_ij = sum_n  lift_i(n)^T  C_n  lift_j(n),

a sum over the tokens of the batch, whatever lies between (where attention mixes tokens, C is first summed over one of the two
token axes, which costs L d_i P_j and is of lower order). Each token n, seen from both sides, costs P_i P_j multiply-adds;
symmetry halves their sum:

    multiply-adds of the dense Hessian  =  P^2 B L / 2,        floating point operations  =  P^2 B L.

It is the work of the product as the papers write it. It is no proven lower bound: a route that factorises C_n needs less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lift_operations(parameters: int, rows: int) -> float:
    """Return the floating point operations of the dense Hessian: P^2 B L.

    >>> lift_operations(2816, 49) == 2816**2 * 49
    True
    """
    return float(parameters) ** 2 * rows


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of log y over log x by least squares.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
