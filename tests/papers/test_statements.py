"""Statements without a row of the ledger: tests in place of rows; norms, and what all rows share: derivatives and what confirms them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from derivations.matrix import Ones
from papers import norms
from papers.autodiff import confirmations, hessian_of, jacobian_of, kept
from papers.curse_of_depth.stacks import attention_head, exponent, layers
from papers.curse_of_depth.variance import grown, var
from papers.curvature_gap.point import point
from papers.drawing import Draw
from papers.notation import if_it_conforms, norm, rms_norm, spectral
from papers.sharpness_disparity.points import FeedForwardPoint

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_closing_the_curvature_gap_eq13(seed):
    """||dS/dW_1|| <= ||W_2|| ||Y||, and it is not far from it."""
    p = point(seed)
    ratio = spectral(p.first("S", "1")) / (spectral(p.weights["2"]) * spectral(p.block.Y))
    assert 0.1 < ratio <= 1 + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_sharpness_disparity_estimate_for_w_1(seed):
    p = FeedForwardPoint.draw(seed)
    right = norm(p.q) * norm(p.dA) * norm(p.W_2) * norm(p.X_norm)
    assert 0 < norm(p.gradient("W_1")) <= right * (1 + 1e-12)


def test_curse_of_depth_eq52_attention():
    """With its input divided by the root of l, the variance of attention goes as 1 / l where the logits are small."""
    draw = Draw(0)
    N, W = rms_norm(draw.normal(64, 16)), [0.03 * draw.normal(16, 16) for _ in range(3)]
    depths = [1.0, 4.0, 16.0, 64.0]
    variances = [var(attention_head(N / math.sqrt(k), *W)) for k in depths]
    assert abs(exponent(depths, variances) + 1) < 0.05


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_curse_of_depth_variance_with_layernorm_scaling(rho):
    L, c = 200, 0.7
    value, k = float(grown(L, c, rho, lns=True)[-1]), layers(L - 1)
    least, most = 1 + c * c * float((1 / k).sum()), (1 + c * float(k.rsqrt().sum())) ** 2
    assert least * (1 - 1e-12) <= value <= most * (1 + 1e-12)
    assert rho not in (0.0, 1.0) or min(value / least - 1, 1 - value / most) < 1e-12


# Definition 1, Properties 8-12 and Proposition 2; that Properties 7 and 11 hold and are attained, the ledger has ------

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


# The derivatives that the rows share, and what confirms them ----------------------------------------------------------


def test_products_that_do_not_conform():
    A, B = torch.ones(2, 3), torch.ones(2, 3)
    assert if_it_conforms(torch.matmul, A, B).numel() == 0
    assert if_it_conforms(torch.matmul, A, B.T).shape == (2, 2)
    with pytest.raises(RuntimeError, match="singular"):
        if_it_conforms(torch.linalg.inv, torch.zeros(2, 2))


def test_derivatives_of_functions_known_by_hand():
    x, y = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert jacobian_of(lambda a, b: a * b**2, x, y, wrt=1).tolist() == [[6.0, 0.0], [0.0, 20.0]]
    assert hessian_of(lambda a, b: (a * b**2).sum(), x, y, wrt=(0, 1)).tolist() == [[6.0, 0.0], [0.0, 10.0]]
    assert hessian_of(lambda a: a.sum(), x).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_confirmations_see_a_wrong_derivative():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] ** 2 * g  # 3 x^2 is right

    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with confirmations() as errors:
        jacobian_of(lambda x: x**3, x)
        hessian_of(lambda x: (x**4).sum(), x)
    assert len(errors) == 2
    assert max(errors) < 1e-7
    store = {}
    for _ in range(2):
        with confirmations() as errors:
            kept(store, "cube", lambda: torch.stack([jacobian_of(lambda v: Cube.apply(v), x)]))
        assert errors[0] > 0.1
