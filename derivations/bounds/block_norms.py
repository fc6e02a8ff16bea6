"""Bounds on the blocks of a Hessian, the bound on the whole that they imply, and the norms of sums over rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXACT_ENTRIES = 2**22
"""Entries up to which an off-diagonal block is formed, one at a time, in the space of its rows."""


@dataclass(frozen=True, eq=False)
class BlockNorms:
    """Bounds on the spectral norms of the blocks of a Hessian, one for every pair of parameters.

    Args:
        names: the parameters.
        matrix: symmetric, nonnegative, of shape (len(names), len(names)): bounds on the norms of the blocks.
        parts: named quantities that went into them.
        spectral: another bound on the norm of the whole Hessian, if there is one.

    ||H||_2 is at most the largest eigenvalue of the matrix of block norms, which is never above the largest row sum.

    >>> BlockNorms(("W_Q", "W_K"), torch.tensor([[3.0, 4.0], [4.0, 3.0]]), {"x": 1.0})
    block norms      W_Q       W_K
    W_Q                3         4
    W_K                4         3
    whole: 7
    """

    names: tuple[str, ...]
    matrix: Tensor
    parts: Mapping[str, float] = field(default_factory=dict)
    spectral: float = float("inf")

    @property
    def whole(self) -> float:
        """The bound on ||H||_2: the largest eigenvalue of ``matrix``, or ``spectral`` if that is smaller."""
        if not bool(self.matrix.isfinite().all()):
            return self.spectral
        return min(float(torch.linalg.eigvalsh(self.matrix)[-1]), self.spectral) if self.names else 0.0

    def block(self, i: str, j: str) -> float:
        """Return the bound on the block of parameters i and j.

        Raises:
            ValueError: if a name is unknown.
        """
        for name in (i, j):
            if name not in self.names:
                raise ValueError(f"block: no parameter {name!r}; expected one of {', '.join(self.names)}")
        return float(self.matrix[self.names.index(i), self.names.index(j)])

    def __repr__(self) -> str:
        width = max(9, *(len(name) for name in self.names))
        lines = ["block norms".ljust(width) + "".join(name.rjust(10)[-10:] for name in self.names)]
        for name, row in zip(self.names, self.matrix.tolist(), strict=True):
            lines.append(name.ljust(width + 2) + "".join(f"{value:10.4g}" for value in row))
        return "\n".join([*lines, f"whole: {self.whole:.6g}"])


def symmetric(names: Sequence[str], norms: Mapping[tuple[str, str], float], factor: float = 1.0) -> Tensor:
    """Return the symmetric matrix of block norms, of which one half or both are given; absent pairs are zero.

    >>> symmetric(("a", "b"), {("a", "b"): 2.0}, 0.5).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    matrix = torch.zeros(len(names), len(names), dtype=torch.float64, device="cpu")
    for (i, j), value in norms.items():
        a, b = names.index(i), names.index(j)
        matrix[a, b] = matrix[b, a] = factor * value
    return matrix


def row_sum_norm(U: Tensor, K: Tensor, V: Tensor) -> float:
    r"""Return || sum_i u_i v_i^T (x) K_i ||_2 exactly, for rows u_i and v_i of U and V.

    It is the norm of the bilinear form sum_i (D^T u_i)^T K_i (E^T v_i) in the matrices D and E: how a row-wise second
    derivative acts on weights that all rows share. Nothing is lost to a triangle inequality between rows, where the
    signs of K_i differ. With more columns than rows, U and V are replaced by their coordinates in the space of their rows.

    Args:
        U: L x m.
        K: L x p x q.
        V: L x n.

    >>> K = torch.stack([torch.eye(2), -torch.eye(2)]).double()
    >>> row_sum_norm(torch.ones(2, 3).double(), K, torch.ones(2, 3).double())  # the two rows cancel
    0.0
    """
    u, v = in_row_space(U), in_row_space(V)
    big = torch.einsum("im,ipq,in->mpnq", u, K, v)
    return spectral_norm(big.reshape(u.shape[1] * K.shape[1], v.shape[1] * K.shape[2]))


def pair_norm(U: Tensor, straight: tuple[Tensor, Tensor], crossed: tuple[Tensor, Tensor]) -> float:
    r"""Return a bound on the norm of sum_i u_i v_i^T (x) K_i + sum_i u_i [v'_i]^T (x) K'_i with the last two factors exchanged.

    It is the bilinear form sum_i (D^T u_i)^T (K_i E^T v_i + K'_i E v'_i) in the matrices D and E: a weight acts through its own
    product, and as a factor of the product of another weight. The norm is exact for a block of at most
    ``EXACT_ENTRIES`` entries, or if v has no more columns than rows. Else it is that of the two parts, of which each fits in
    the space of its rows.

    Args:
        U: L x m.
        straight: K, L x p x q, and V, L x n.
        crossed: K', L x p x n, and V', L x q.

    >>> one = torch.ones(1, 1, 1).double()
    >>> pair_norm(one[0], (one, one[0]), (-one, one[0]))
    0.0
    """
    (K, V), (K_crossed, V_crossed) = straight, crossed
    u = in_row_space(U)
    rows, columns = u.shape[1] * K.shape[1], K.shape[2] * V.shape[1]
    if rows * columns > EXACT_ENTRIES and V.shape[1] > V.shape[0]:
        return row_sum_norm(u, K, V) + row_sum_norm(u, K_crossed, V_crossed)
    big = torch.einsum("im,ipq,in->mpqn", u, K, V) + torch.einsum("im,ipn,iq->mpqn", u, K_crossed, V_crossed)
    return spectral_norm(big.reshape(rows, columns))


def row_sum_ends(U: Tensor, K: Tensor) -> tuple[float, float]:
    r"""Return the largest eigenvalue of sum_i u_i u_i^T (x) K_i and minus the smallest, neither below 0, for symmetric K_i.

    >>> row_sum_ends(torch.ones(2, 1).double(), torch.tensor([[[3.0, 0.0], [0.0, -1.0]]] * 2).double())
    (6.0, 2.0)
    """
    u = in_row_space(U)
    big = torch.einsum("im,ipq,in->mpnq", u, K, u).reshape(u.shape[1] * K.shape[1], -1)
    values = torch.linalg.eigvalsh((big + big.mT) / 2)
    return max(float(values[-1]), 0.0), max(-float(values[0]), 0.0)


@dataclass
class Pairs:
    """Norms of blocks while they are found: off the diagonal, and both ends of the spectrum of those on it.

    >>> pairs = Pairs()
    >>> pairs.ends["a"], pairs.ends["b"], pairs.norms["a", "b"] = (1.0, 4.0), (1.0, 0.0), 0.0
    >>> pairs.bounds(("a", "b"), 0.5)
    block norms        a         b
    a                  2         0
    b                  0       0.5
    whole: 2
    """

    norms: dict[tuple[str, str], float] = field(default_factory=dict)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)

    def update(self, other: Pairs, end: str = "") -> None:
        """Add the blocks of another, with ``end`` appended to their names."""
        self.norms.update({(a + end, b + end): value for (a, b), value in other.norms.items()})
        self.ends.update({a + end: value for a, value in other.ends.items()})

    def bounds(self, names: tuple[str, ...], factor: float, parts: Mapping[str, float] | None = None) -> BlockNorms:
        """Return the block norms times ``factor``.

        x^T H x <= sum_a top_a |x_a|^2 + sum_ab n_ab |x_a| |x_b|, and the same for -H with the other ends: the whole is bounded by
        the two matrices that have one kind of ends on their diagonals, better than by that of the block norms.
        """
        off = symmetric(names, self.norms, factor)
        top, bottom = (factor * torch.tensor([self.ends[a][k] for a in names], dtype=torch.float64, device="cpu") for k in (0, 1))
        whole = max(float(torch.linalg.eigvalsh(off + torch.diag(end))[-1]) for end in (top, bottom)) if names else 0.0
        return BlockNorms(names, off + torch.diag(torch.maximum(top, bottom)), parts or {}, whole)


def in_row_space(U: Tensor) -> Tensor:
    """Return coordinates of the rows of U in a basis of the space they span, at most as many as there are rows."""
    if U.shape[1] <= U.shape[0]:
        return U
    q, _ = torch.linalg.qr(U.mT)
    return U @ q


def spectral_norm(A: Tensor) -> float:
    """Return ||A||_2, 0 for an empty matrix: from the smaller Gram matrix, whose largest eigenvalue loses no digits.

    >>> spectral_norm(torch.tensor([[3.0, 4.0]]).double())
    5.0
    """
    largest = float(A.abs().max()) if A.numel() else 0.0
    if largest == 0:
        return 0.0
    small = A / largest if A.shape[0] <= A.shape[1] else A.mT / largest
    return largest * math.sqrt(float(torch.linalg.eigvalsh(small @ small.mT)[-1]))
