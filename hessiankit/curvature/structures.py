"""Symmetric matrices whose eigenvectors are known by structure: diagonals, dense blocks, Kronecker products, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hessiankit.curvature.tensor_operator import TensorOperator


@dataclass(frozen=True, eq=False)
class Structure:
    """A symmetric matrix U diag(values) U^T on some entries of a vector; a diagonal, U = I, unless a kind says otherwise."""

    at: Tensor  # positions of the entries, (n,)
    values: Tensor  # eigenvalues, (n,), in the order of the columns of U
    numbers: int  # that are stored

    def to_basis(self, rows: Tensor) -> Tensor:
        """Return U^T times the rows, (S, n)."""
        return rows

    def from_basis(self, rows: Tensor) -> Tensor:
        """Return U times the rows, (S, n)."""
        return rows

    def root(self) -> Structure:
        """Return the square root of a positive semidefinite matrix."""
        return replace(self, values=self.values.clamp(min=0).sqrt())


@dataclass(frozen=True, eq=False)
class DenseBlock(Structure):
    """A dense symmetric block."""

    basis: Tensor  # U, (n, n)

    def to_basis(self, rows: Tensor) -> Tensor:
        return rows @ self.basis

    def from_basis(self, rows: Tensor) -> Tensor:
        return rows @ self.basis.T


@dataclass(frozen=True, eq=False)
class KroneckerBlock(Structure):
    """A matrix (U_1 (x) U_2) diag(values) (U_1 (x) U_2)^T on the entries of a weight (m, n) in vec_r."""

    left: Tensor  # U_1, (m, m)
    right: Tensor  # U_2, (n, n)

    def to_basis(self, rows: Tensor) -> Tensor:
        return (self.left.T @ self._matrices(rows) @ self.right).flatten(1)

    def from_basis(self, rows: Tensor) -> Tensor:
        return (self.left @ self._matrices(rows) @ self.right.T).flatten(1)

    def _matrices(self, rows: Tensor) -> Tensor:
        return rows.reshape(-1, len(self.left), len(self.right))


def diagonal(at: Tensor, values: Tensor) -> Structure:
    """Return a diagonal structure from its entries (n,)."""
    return Structure(at, values, values.numel())


def dense_block(at: Tensor, matrix: Tensor) -> DenseBlock:
    """Return a dense block from a symmetric matrix (n, n).

    >>> dense_block(torch.arange(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])).values.tolist()
    [1.0, 3.0]
    """
    values, basis = torch.linalg.eigh((matrix + matrix.T) / 2)
    n = len(at)
    return DenseBlock(at, values, n * (n + 1) // 2, basis)


def kronecker_block(at: Tensor, left: Tensor, right: Tensor) -> KroneckerBlock:
    """Return left (x) right from two symmetric factors (m, m) and (n, n).

    >>> kronecker_block(torch.arange(2), torch.tensor([[2.0]]), torch.diag(torch.tensor([3.0, 5.0]))).values.tolist()
    [6.0, 10.0]
    """
    a, U = torch.linalg.eigh((left + left.T) / 2)
    b, V = torch.linalg.eigh((right + right.T) / 2)
    numbers = sum(len(x) * (len(x) + 1) // 2 for x in (a, b))
    return KroneckerBlock(at, torch.outer(a, b).reshape(-1), numbers, U, V)


class StructuredOperator(TensorOperator):
    """A symmetric matrix that is a direct sum of structures on disjoint entries; entries in none of them are zero.

    A function in place of the structures makes them at the first use, as the eigenvectors of Kronecker factors take time.
    """

    def __init__(
        self,
        size: int,
        structures: Sequence[Structure] | Callable[[], Sequence[Structure]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__((size, size), dtype, device)
        self._make, self.block_size = structures, 64

    @cached_property
    def structures(self) -> tuple[Structure, ...]:
        """The structures."""
        return tuple(self._make() if callable(self._make) else self._make)

    @cached_property
    def rest(self) -> Tensor:
        """Positions of the entries that no structure has."""
        covered = torch.zeros(self.shape[0], dtype=torch.bool, device="cpu")
        for part in self.structures:
            covered[part.at.cpu()] = True
        return (~covered).nonzero()[:, 0].to(self.device)

    @property
    def numbers(self) -> int:
        """How many numbers the matrix stores."""
        return sum(part.numbers for part in self.structures)

    def completed(self, whole: Callable[[], Tensor]) -> StructuredOperator:
        """Return the matrix with the diagonal of ``whole()``, (P,), on the entries that no structure has."""

        def structures() -> Sequence[Structure]:
            return [*self.structures, diagonal(self.rest, whole()[self.rest])] if len(self.rest) else self.structures

        return StructuredOperator(self.shape[0], structures, self.torch_dtype, self.device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> StructuredOperator:
        """Return f(A): the function applied to all eigenvalues, including the zeros of entries without a structure."""
        structures: list[Structure] = [replace(part, values=function(part.values)) for part in self.structures]
        if len(self.rest):
            zeros = torch.zeros(len(self.rest), dtype=self.torch_dtype, device=self.device)
            structures.append(Structure(self.rest, function(zeros), 0))
        return StructuredOperator(self.shape[0], structures, self.torch_dtype, self.device)

    def inverse(self, damping: float = 0.0) -> StructuredOperator:
        """Return (|A| + damping I)^-1, |A| having the eigenvalues' magnitudes; sums count as at least sqrt(eps) of the largest.

        >>> A = StructuredOperator(2, [diagonal(torch.arange(2), torch.tensor([3.0, -1.0]))], torch.float32, torch.device("cpu"))
        >>> A.inverse(damping=1.0).to_matrix().tolist()
        [[0.25, 0.0], [0.0, 0.5]]
        """
        least = ((self.largest + damping) or 1.0) * torch.finfo(self.torch_dtype).eps ** 0.5
        return self.mapped(lambda values: 1 / (values.abs() + damping).clamp(min=least))

    @property
    def largest(self) -> float:
        """The largest magnitude of an eigenvalue."""
        return max((float(part.values.abs().max()) for part in self.structures), default=0.0)

    def _rows(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for part in self.structures:
            out[:, part.at] = part.from_basis(part.to_basis(rows[:, part.at]) * part.values)
        return out

    def _adjoint(self) -> StructuredOperator:
        return self


def diagonal_operator(values: Tensor) -> StructuredOperator:
    """Return a diagonal matrix from its entries (n,)."""
    entries = torch.arange(len(values), device=values.device)
    return StructuredOperator(len(values), [diagonal(entries, values)], values.dtype, values.device)


class LowRankPlusDiagonal(TensorOperator):
    """U diag(values) U^T + diag(d): an orthonormal ``basis`` (P, k), ``values`` (k,) and a ``diagonal`` (P,)."""

    def __init__(self, basis: Tensor, values: Tensor, diagonal: Tensor) -> None:
        super().__init__((len(basis), len(basis)), basis.dtype, basis.device)
        self.basis, self.values, self.diagonal, self.block_size = basis, values, diagonal, 64

    @property
    def numbers(self) -> int:
        """How many numbers the matrix stores."""
        return self.basis.numel() + self.values.numel() + self.diagonal.numel()

    @property
    def largest(self) -> float:
        """An upper bound of the largest magnitude of an eigenvalue."""
        return float(self.values.abs().max()) + float(self.diagonal.abs().max())

    def solve(self, rows: Tensor, damping: float) -> Tensor:
        """Return (A + damping I)^-1 times the rows, (S, P), by the Woodbury identity."""
        D = self.diagonal + damping
        scaled = self.basis / D.unsqueeze(1)
        nonzero = self.values != 0
        inner = torch.diag(1 / self.values[nonzero]) + self.basis[:, nonzero].T @ scaled[:, nonzero]
        return rows / D - (torch.linalg.solve(inner, (rows @ scaled[:, nonzero]).T)).T @ scaled[:, nonzero].T

    def _rows(self, rows: Tensor) -> Tensor:
        return rows * self.diagonal + (rows @ self.basis * self.values) @ self.basis.T

    def _adjoint(self) -> LowRankPlusDiagonal:
        return self
