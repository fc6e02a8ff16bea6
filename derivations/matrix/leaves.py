"""Leaves of a matrix expression: a matrix of numbers with a name, the identity, all ones, all zeros."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from derivations.arrays import Array, as_array, full, matmul, to_float
from derivations.matrix.expression import Matrix
from derivations.matrix.letters import dimension, in_letters

_ONE_LETTER = re.compile(r"(\\[A-Za-z]+(\{[^{}]*\})*|[A-Za-z0-9])(_(\{[^{}]*\}|[A-Za-z0-9]))?'*")


class Dense(Matrix):
    r"""A matrix of numbers with the symbol it is printed as, and its spectral norm where that is known.

    >>> W = Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "W_Q")
    >>> W, W.norm_bound()
    (Dense(2x2: W_Q), 4.0)
    >>> W.T.latex(), Dense(torch.ones(2, 2), "XW_Q").T.latex()
    ('W_Q^\\top', '\\left(XW_Q\\right)^\\top')
    """

    def __init__(self, value: Any, symbol: str = r"\bullet", *, norm: float | None = None) -> None:
        self.value = as_array(value)
        if self.value.ndim != 2:
            raise ValueError(f"Dense: expected a matrix for {symbol!r}, got an array of shape {tuple(self.value.shape)}")
        self.symbol, self.norm = in_letters(symbol), norm
        self.shape = (int(self.value.shape[0]), int(self.value.shape[1]))
        self._transposed_symbol: str | None = None

    def like(self) -> Array:
        return self.value

    def dense(self, like: Array | None = None) -> Array:
        return self.value

    def apply(self, y: Array) -> Array:
        return matmul(self.value, y)

    def transpose(self) -> Matrix:
        result = Dense(self.value.T, "", norm=self.norm)
        result.symbol, result._transposed_symbol = self._transposed_symbol or transposed(self.symbol), self.symbol
        return result

    def norm_bound(self) -> float:
        if self.norm is not None:
            return self.norm
        return float(torch.linalg.matrix_norm(to_float(self.value), 2)) if 0 not in self.shape else 0.0

    def latex(self) -> str:
        return self.symbol


class Identity(Matrix):
    """The n x n identity.

    >>> Identity(3).norm_bound(), Identity(3).latex()
    (1.0, 'I_{3}')
    """

    def __init__(self, n: int) -> None:
        self.shape = (n, n)

    def apply(self, y: Array) -> Array:
        return y

    def transpose(self) -> Matrix:
        return self

    def norm_bound(self) -> float:
        return 1.0

    def latex(self) -> str:
        return f"I_{{{dimension(self.shape[0])}}}"


class Ones(Matrix):
    """The m x n matrix of ones, of spectral norm sqrt(m n) (Proposition 2 of Closing the Curvature Gap for m = n).

    >>> Ones(4, 4).norm_bound()
    4.0
    """

    def __init__(self, m: int, n: int = 1) -> None:
        self.shape = (m, n)

    def apply(self, y: Array) -> Array:
        return full((self.shape[0], 1), 1, y) * y.sum(0).reshape(1, -1)

    def transpose(self) -> Matrix:
        return Ones(self.shape[1], self.shape[0])

    def norm_bound(self) -> float:
        return math.sqrt(self.shape[0] * self.shape[1])

    def latex(self) -> str:
        m, n = (dimension(size) for size in self.shape)
        if self.shape[1] == 1:
            return rf"\mathbf{{1}}_{{{m}}}"
        return rf"\mathbf{{1}}_{{{n}}}^\top" if self.shape[0] == 1 else rf"\mathbf{{1}}_{{{m}\times {n}}}"


class Zero(Matrix):
    """The m x n matrix of zeros.

    >>> Zero(2, 3).norm_bound()
    0.0
    """

    def __init__(self, m: int, n: int) -> None:
        self.shape = (m, n)

    def apply(self, y: Array) -> Array:
        return full((self.shape[0], int(y.shape[1])), 0, y)

    def transpose(self) -> Matrix:
        return Zero(self.shape[1], self.shape[0])

    def norm_bound(self) -> float:
        return 0.0

    def latex(self) -> str:
        return rf"0_{{{dimension(self.shape[0])}\times {dimension(self.shape[1])}}}"


def transposed(symbol: str) -> str:
    r"""Return the LaTeX of a transposed symbol, in brackets if it is more than one letter with an index.

    >>> transposed("W_Q"), transposed(r"W_Q^\top"), transposed("XW_Q")
    ('W_Q^\\top', 'W_Q', '\\left(XW_Q\\right)^\\top')
    """
    if symbol.endswith(r"^\top") and _ONE_LETTER.fullmatch(symbol.removesuffix(r"^\top")):
        return symbol.removesuffix(r"^\top")
    return symbol + r"^\top" if _ONE_LETTER.fullmatch(symbol) else rf"\left({symbol}\right)^\top"
