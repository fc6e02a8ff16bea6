"""Theorem 6 and Proposition 10 as printed, with the true norms of their factors; the ledger has the other printed bounds."""

from __future__ import annotations

import pytest
import torch
from bound_problems import (
    BLOCK_SIZES,
    F64,
    norm,
    post_block,
    problems,
    whole_hessian,
)

from derivations.transformer import PostNormBlockAt
from papers.curvature_gap import block_printed as block_in_print


def spectral(matrix) -> float:
    return norm(matrix.dense())


def test_an_unknown_reading_of_lemma_4() -> None:
    with pytest.raises(ValueError, match="unknown reading"):
        block_in_print.sigma_min_printed(torch.eye(2, dtype=F64), reading="other")


class TestTheorem6:
    def test_exact_factors(self) -> None:
        """Eqs. 8, 13-16, 20, 22 and 23 hold with the true norms of their factors, and so does Eq. 9 for the normalised loss."""
        (p,) = problems("init", ((3, 4, 2, 4),), 1, seed=6)
        at = PostNormBlockAt(p.X, *p.weights.values())
        w1, w2 = norm(p.weights["W_1"]), norm(p.weights["W_2"])
        G = {f"G_{k}": spectral(at.G(k)) for k in "QKV"}
        outer = {"J_Z": spectral(at.J_Z), "H_Z": spectral(at.H_Z), "J_Y": spectral(at.J_Y), "H_Y": spectral(at.H_Y)}
        hidden = norm(torch.relu(at.Y @ p.weights["W_1"]))
        factors = block_in_print.PrintedFactors(**outer, Y=norm(at.Y), hidden=hidden, **G)
        phi = {k + ell: spectral(at.Phi(k, ell)) for k, ell in ("QQ", "KK", "VV", "VQ", "VK", "QK")}
        bound = block_in_print.theorem_6_printed(3, 4, 4, factors, phi, w1, w2, float((at.Z - p.target).norm()))
        names = block_in_print.NAMES
        for i, a in enumerate(names):
            assert spectral(at.B(a)) <= float(bound.B[i]) * (1 + 1e-12)
            for j, b in enumerate(names[i:], start=i):
                true = spectral(at.xi(a, b))
                assert true <= float(bound.xi[i, j]) * (1 + 1e-12), (a, b)
                assert spectral(at.H_tr(a, b)) <= float(bound.H_tr[i, j]) * (1 + 1e-12), (a, b)
        assert norm(whole_hessian(post_block, p)) <= bound.whole

    def test_proposition_10(self) -> None:
        for p in problems("large", BLOCK_SIZES, 3, seed=2):
            at = PostNormBlockAt(p.X, *p.weights.values())
            w1, w2 = norm(p.weights["W_1"]), norm(p.weights["W_2"])
            bound = block_in_print.proposition_10_printed(*p.X.shape, p.weights["W_1"].shape[1], w1, w2)
            assert float(at.Y.norm()) == pytest.approx(bound.Y, rel=1e-12)
            assert norm(at.S - at.Y) <= bound.FFN
            assert norm(at.S) <= bound.S
