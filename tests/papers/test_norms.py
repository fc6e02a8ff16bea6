"""Definition 1, Properties 8-12 and Proposition 2; that Properties 7 and 11 hold and are attained, the ledger has."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from derivations.matrix import Ones
from papers import norms

F64 = torch.float64

PRINTED = """
      max       1        inf      2        F
max   .         1        1        1        1
1     m         .        m        sqrt(m)  sqrt(m)
inf   n         n        .        sqrt(n)  sqrt(n)
2     sqrt(m*n) sqrt(n)  sqrt(m)  .        1
F     sqrt(m*n) sqrt(n)  sqrt(m)  sqrt(d)  .
"""


def matrices() -> Iterator[Tensor]:
    """Gaussian, sparse, low-rank and badly scaled matrices of several shapes."""
    generator = torch.Generator().manual_seed(3)
    for m, n in [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1), (7, 2)]:
        for _ in range(3):
            G = torch.randn(m, n, generator=generator, dtype=F64)
            yield G
            yield G * (torch.rand(m, n, generator=generator, dtype=F64) < 0.3)
            yield G[:, :1] @ G[:1, :]
            yield G * 10.0 ** torch.randint(-3, 4, (m, 1), generator=generator)


def by_hand(A: Tensor) -> dict[str, float]:
    """The five norms of Definition 1, entry by entry; the spectral one from the eigenvalues of A^T A."""
    rows = A.tolist()
    return {
        "max": max(abs(v) for row in rows for v in row),
        "1": max(sum(abs(row[j]) for row in rows) for j in range(A.shape[1])),
        "inf": max(sum(abs(v) for v in row) for row in rows),
        "2": math.sqrt(max(float(torch.linalg.eigvalsh(A.T @ A)[-1]), 0.0)),
        "F": math.sqrt(sum(v * v for row in rows for v in row)),
    }


class TestDefinition:
    def test_five_norms(self) -> None:
        for A in matrices():
            for kind, expected in by_hand(A).items():
                assert norms.matrix_norm(A, kind) == pytest.approx(expected, rel=1e-12)

    def test_what_is_taken_and_what_is_not(self) -> None:
        assert norms.matrix_norm(Ones(4, 9)) == pytest.approx(6)
        assert norms.matrix_norm(np.array([[3, 4]], dtype=object), "F") == 5
        assert norms.matrix_norm(torch.zeros(0, 3)) == 0
        with pytest.raises(ValueError, match="unknown norm 'nuclear'"):
            norms.matrix_norm(torch.ones(2, 2), "nuclear")
        with pytest.raises(ValueError, match="expected a matrix"):
            norms.matrix_norm(torch.ones(2))


class TestProperty7:
    def test_table_is_the_printed_one(self) -> None:
        header, *lines = PRINTED.strip().splitlines()
        for line in lines:
            x, *cells = line.split()
            for y, cell in zip(header.split(), cells, strict=True):
                expected = 1.0 if cell == "." else eval(cell, {"sqrt": math.sqrt, "m": 6, "n": 15, "d": 4})
                assert norms.norm_constant(x, y, 6, 15, rank=4) == pytest.approx(expected), (x, y)


class TestProperty11:
    sizes = [2, 1, 3], [4, 2]

    def test_block_norms(self) -> None:
        A = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
        found = norms.block_norms(A, *self.sizes)
        assert found.shape == (3, 2)
        assert found[2, 0] == pytest.approx(float(torch.linalg.matrix_norm(A[3:, :4], 2)), rel=1e-14)
        assert found[0, 1] == pytest.approx(float(torch.linalg.matrix_norm(A[:2, 4:], 2)), rel=1e-14)
        with pytest.raises(ValueError, match="do not make up"):
            norms.block_norms(A, [2, 2], [6])

    def test_the_sharper_form_is_attained(self) -> None:
        """Blocks c_ij Q with Q orthogonal: the norm of C (x) Q is that of C, and of its entries for C >= 0."""
        C = torch.tensor([[1.0, 2.0, 0.5], [0.0, 3.0, 1.0]], dtype=F64)
        Q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=F64))
        A = torch.kron(C, Q.contiguous())
        bound = norms.block_norm_bound(norms.block_norms(A, [4, 4], [4, 4, 4]))
        assert norms.matrix_norm(A) == pytest.approx(bound, rel=1e-14)
        assert bound < 0.55 * norms.block_norm_bound_printed(C)
