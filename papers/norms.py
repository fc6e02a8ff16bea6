r"""Matrix norms and the inequalities between them: Definition 1, Properties 7-12 and Proposition 2.

The numbers are those of "Closing the Curvature Gap", Appendix B; all of the statements hold. ``Matrix.norm_bound`` of an
expression applies Properties 8, 9, 10, 11b and 12 by itself; the functions here are for reading and for block matrices.

>>> import torch
>>> A = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
>>> [matrix_norm(A, kind) for kind in NORMS]
[4.0, 4.0, 7.0, 5.0, 5.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from derivations.arrays import Array, as_array, to_float
from derivations.matrix import Matrix

NORMS = ("max", "1", "inf", "2", "F")
"""The norms of Definition 1: largest entry, column sum, row sum, spectral, Frobenius."""

_HALF = Fraction(1, 2)
_ONE, _M, _N = (0, 0, 0), (1, 0, 0), (0, 1, 0)
_RM, _RN, _RMN, _RD = (_HALF, 0, 0), (0, _HALF, 0), (_HALF, _HALF, 0), (0, 0, _HALF)  # R: the root of

NORM_TABLE: dict[str, dict[str, tuple[Any, Any, Any]]] = {
    "max": {"max": _ONE, "1": _ONE, "inf": _ONE, "2": _ONE, "F": _ONE},
    "1": {"max": _M, "1": _ONE, "inf": _M, "2": _RM, "F": _RM},
    "inf": {"max": _N, "1": _N, "inf": _ONE, "2": _RN, "F": _RN},
    "2": {"max": _RMN, "1": _RN, "inf": _RM, "2": _ONE, "F": _ONE},
    "F": {"max": _RMN, "1": _RN, "inf": _RM, "2": _RD, "F": _ONE},
}
"""Property 7. ``NORM_TABLE[X][Y]`` holds the exponents (a, b, c) of the constant m^a n^b d^c in ||A||_X <= constant ||A||_Y,
for A in R^{m x n} of rank d. Every constant is attained. The print leaves out the diagonal."""


class NormInequality(NamedTuple):
    """An inequality lhs <= rhs between two numbers."""

    lhs: float
    rhs: float

    @property
    def ratio(self) -> float:
        """lhs / rhs: at most 1 where the inequality holds, and 1 where it is attained."""
        return self.lhs / self.rhs if self.rhs else (0.0 if self.lhs == 0 else math.inf)


def matrix_norm(A: Matrix | Array, kind: str = "2") -> float:
    """Return one of the five norms of Definition 1 (the spectral norm by a singular value decomposition).

    Args:
        A: m x n array or expression.
        kind: ``"max"``, ``"1"`` (largest column sum), ``"inf"`` (largest row sum), ``"2"`` or ``"F"``.

    Raises:
        ValueError: if the kind is unknown.

    >>> matrix_norm(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), "inf")
    7.0
    """
    if kind not in _NORM_FUNCTIONS:
        raise ValueError(f"matrix_norm: unknown norm {kind!r}, expected one of {', '.join(map(repr, NORMS))}")
    value = to_float(A.dense() if isinstance(A, Matrix) else as_array(A))
    if value.ndim != 2:
        raise ValueError(f"matrix_norm: expected a matrix, got an array of shape {tuple(value.shape)}")
    return float(_NORM_FUNCTIONS[kind](value)) if value.numel() else 0.0


_NORM_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda A: A.abs().max(),
    "1": lambda A: A.abs().sum(0).max(),
    "inf": lambda A: A.abs().sum(1).max(),
    "2": lambda A: torch.linalg.matrix_norm(A, 2),
    "F": lambda A: torch.linalg.matrix_norm(A, "fro"),
}


def norm_constant(x: str, y: str, m: int, n: int, rank: int | None = None) -> float:
    """Return the least c with ||A||_x <= c ||A||_y for all A in R^{m x n} (of the given rank): Property 7.

    Args:
        rank: the rank d of A; min(m, n) if unknown. Only ||A||_F <= sqrt(d) ||A||_2 reads it.

    Raises:
        ValueError: if a norm is unknown.

    >>> norm_constant("F", "2", 9, 4), norm_constant("1", "max", 9, 4)
    (2.0, 9.0)
    """
    for name in (x, y):
        if name not in NORM_TABLE:
            raise ValueError(f"norm_constant: unknown norm {name!r}, expected one of {', '.join(map(repr, NORMS))}")
    a, b, c = NORM_TABLE[x][y]
    return math.pow(m, a) * math.pow(n, b) * math.pow(min(m, n) if rank is None else rank, c)


def norm_inequality(A: Matrix | Array, x: str, y: str, rank: int | None = None) -> NormInequality:
    """Return both sides of ||A||_x <= c ||A||_y (Property 7) for a matrix at hand.

    >>> norm_inequality(torch.ones(4, 9), "F", "max")
    NormInequality(lhs=6.0, rhs=6.0)
    """
    m, n = A.shape
    return NormInequality(matrix_norm(A, x), norm_constant(x, y, m, n, rank) * matrix_norm(A, y))


def sum_norm_bound(*terms: Matrix) -> float:
    """Return ||A||_2 + ||B||_2 + ..., at least ||A + B + ...||_2 (Property 8, Eq. 11).

    >>> from derivations.matrix import Identity, Ones
    >>> sum_norm_bound(Identity(3), Ones(3, 3))
    4.0
    """
    return float(sum(term.norm_bound() for term in terms))


def kronecker_norm(*factors: Matrix) -> float:
    """Return ||A||_2 ||B||_2 ..., equal to ||A (x) B (x) ...||_2 (Property 9).

    >>> from derivations.matrix import Diagonal, Ones
    >>> kronecker_norm(Ones(2, 2), Diagonal(torch.tensor([-3.0, 1.0])))
    6.0
    """
    return float(math.prod(factor.norm_bound() for factor in factors))


def product_norm_bound(*factors: Matrix) -> float:
    """Return ||A||_2 ||B||_2 ..., at least ||A B ...||_2 (Property 10).

    >>> from derivations.matrix import Ones
    >>> product_norm_bound(Ones(1, 4), Ones(4, 1))
    4.0
    """
    return float(math.prod(factor.norm_bound() for factor in factors))


def transpose_norm(A: Matrix) -> float:
    """Return ||A||_2, equal to ||A^T||_2 (Property 12).

    >>> from derivations.matrix import Ones
    >>> transpose_norm(Ones(2, 8)) == transpose_norm(Ones(8, 2)) == 4.0
    True
    """
    return A.T.norm_bound()


def ones_norm(m: int, n: int | None = None) -> float:
    """Return sqrt(m n), the spectral norm of the m x n matrix of ones; L for L x L (Proposition 2).

    >>> ones_norm(5)
    5.0
    """
    return math.sqrt(m * (m if n is None else n))


def block_norms(A: Matrix | Array, row_sizes: Sequence[int], column_sizes: Sequence[int]) -> torch.Tensor:
    """Return the spectral norms of the blocks of a block matrix, of shape (len(row_sizes), len(column_sizes)).

    Args:
        A: array or expression with sum(row_sizes) rows and sum(column_sizes) columns.

    Raises:
        ValueError: if the sizes do not add up to the shape of A.

    >>> block_norms(torch.diag(torch.tensor([3.0, 1.0, 2.0])), [1, 2], [1, 2]).tolist()
    [[3.0, 0.0], [0.0, 2.0]]
    """
    value = to_float(A.dense() if isinstance(A, Matrix) else as_array(A))
    if (sum(row_sizes), sum(column_sizes)) != tuple(value.shape):
        raise ValueError(f"block_norms: blocks of {row_sizes} by {column_sizes} do not make up a matrix of shape {A.shape}")
    blocks = [torch.split(row, list(column_sizes), 1) for row in torch.split(value, list(row_sizes), 0)]
    return torch.tensor([[matrix_norm(block) for block in row] for row in blocks], dtype=torch.float64)


def block_norm_bound(norms: Any) -> float:
    """Return the spectral norm of the matrix of block norms, a bound on the norm of the block matrix.

    ||A||_2 <= || [ ||B_ij||_2 ]_ij ||_2 <= sqrt(m n) max_ij ||B_ij||_2, so this is never worse than the printed
    Property 11. It is attained if all blocks share their singular vectors.

    Args:
        norms: the norms of the blocks (or bounds on them), a matrix of nonnegative numbers.

    >>> block_norm_bound([[3.0, 0.0], [0.0, 1.0]]), block_norm_bound_printed([[3.0, 0.0], [0.0, 1.0]])
    (3.0, 6.0)
    """
    return matrix_norm(_block_norms("block_norm_bound", norms))


def block_norm_bound_printed(norms: Any) -> float:
    """Return sqrt(m n) max_ij ||B_ij||_2, with m x n the number of blocks (Property 11).

    The print reuses m and n for the size of A; read as numbers of blocks the statement is the useful one
    (curvature-gap/property11).

    >>> block_norm_bound_printed(torch.ones(2, 2))
    2.0
    """
    value = _block_norms("block_norm_bound_printed", norms)
    return math.sqrt(value.numel()) * matrix_norm(value, "max")


def block_diagonal_norm(norms: Any) -> float:
    """Return max_i ||B_ii||_2, the norm of a block-diagonal matrix (Property 11, second part).

    Blocks that are stacked, as the L x L second derivatives of one softmax row are, do not count as block diagonal
    (claim b:maxblock).

    >>> block_diagonal_norm([3.0, 1.0])
    3.0
    """
    return max((float(v) for v in norms), default=0.0)


def _block_norms(name: str, norms: Any) -> torch.Tensor:
    value = to_float(as_array(norms))
    if value.ndim != 2 or bool((value < 0).any()):
        raise ValueError(f"{name}: expected a matrix of block norms, all nonnegative, got {norms!r}")
    return value
