"""The post-norm block: derived without knowing its theorem, it is the theorem of Closing the Curvature Gap, corrected."""

from __future__ import annotations

import itertools

import pytest
import torch
from derivation_reference import generic

from derivations.stage import leaf
from derivations.transformer import PostNormBlockAt
from hessiankit import TransformerBlock, derive
from hessiankit.formulas.block_at import BlockAt, block_stage
from hessiankit.formulas.symbols import symbol_of

SHORT = {
    "X": "X", "attention.W_Q": "Q", "attention.W_K": "K", "attention.W_V": "V", "attention.W_O": "O", "norm_1.weight": "gamma_1",
    "norm_1.bias": "beta_1", "feedforward.W_1": "1", "feedforward.b_1": "b_1", "feedforward.W_2": "2", "feedforward.b_2": "b_2",
    "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2",
}  # fmt: skip


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return generic(TransformerBlock(4, 3, activation="gelu", bias=True, d_k=2, d_v=3, output_projection=True).double())


@pytest.fixture(scope="module")
def point(block):
    letters = {"norm_1.weight": "gamma_1", "norm_1.bias": "beta_1", "norm_2.weight": "gamma_2", "norm_2.bias": "beta_2"}
    given = {letters.get(name, name.split(".")[-1]): p.detach() for name, p in block.named_parameters()}
    X = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return PostNormBlockAt(X, **given, activation="gelu", eps=block.norm_1.eps)


def test_every_pair_and_every_jacobian_is_the_theorem(block, point):
    Z = block_stage(BlockAt(block, {name: p.detach() for name, p in block.named_parameters()}), leaf("X", point.X))
    symbols = {name: name if name == "X" else symbol_of(name) for name in SHORT}
    for (i, short_i), (j, short_j) in itertools.product(SHORT.items(), repeat=2):
        found, expected = Z.hessian(symbols[i], symbols[j]).dense(), point.H_tr(short_i, short_j).dense()
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max().clamp_min(1.0), (i, j)
    for i, short in SHORT.items():
        found, expected = derive(block, wrt=i, inputs=point.X).dense(), point.jacobian(short).dense()
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max(), i


def test_the_printed_theorem():
    story = derive(TransformerBlock(4, 5), wrt=("query", "value")).story
    lines = {line.symbol: line.formula for line in story.lines}
    assert lines[r"\frac{\partial^2 Z}{\partial W_Q\,\partial W_V}"] == (
        r"\left(J_{Z}\otimes I_{dd_K}\right)\,\xi_{Q,V}+\left(I_{Ld}\otimes B_{Q}^\top\right)\,H_{Z}\,B_{V}"
    )
    assert lines["B_{Q}"] == r"J_{S Y}\,J_{Y}\,G_{Q}"
    assert lines["B_{V}"] == r"J_{S Y}\,J_{Y}\,G_{V}"
    assert lines["J_{S Y}"] == r"I_{Ld}+J_{M Y}"
    assert lines["G_{V}"] == r"A\,X\otimes I_{d}"
    assert lines[r"\xi_{Q,V}"] == r"\left(J_{S Y}\otimes I_{dd_K}\right)\,Y_{Q,V}"
    assert lines["Y_{Q,V}"] == (
        r"\left(J_{Y}\otimes I_{dd_K}\right)\,\Phi_{Q,V}+\left(I_{Ld}\otimes G_{Q}^\top\right)\,H_{Y}\,G_{V}"
    )
    gain = r"\operatorname{diag}(\rho_{Z}^{-1})\otimes \operatorname{diag}(\gamma_2)"
    assert lines["J_{Z}"] == rf"\left({gain}\right)\,\left(I_{{L}}\otimes C_{{d}}-\frac{{1}}{{d}}\,V_{{Z}}\,V_{{Z}}^\top\right)"


def test_a_smooth_activation_adds_the_curvature_of_the_network():
    """The last term of xi_kl vanishes for ReLU only."""
    relu, gelu = (
        {line.symbol: line.formula for line in derive(TransformerBlock(4, 5, activation=name)).story.lines}
        for name in ("relu", "gelu")
    )
    assert r"H_{M,Y Y}" not in relu[r"\xi_{Q,V}"]
    assert (
        gelu[r"\xi_{Q,V}"] == relu[r"\xi_{Q,V}"] + r"+\left(I_{Ld}\otimes G_{Q}^\top\,J_{Y}^\top\right)\,H_{M,Y Y}\,J_{Y}\,G_{V}"
    )
