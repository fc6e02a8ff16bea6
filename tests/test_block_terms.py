"""explain: the terms of one block of the Hessian, which primitives they come from, and that they add up to the block."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine.block_terms import BlockTerms
from hessiankit.engine.plan import make_plan
from hessiankit.engine.recorder import recording
from hessiankit.support.errors import InputError

DOUBLE = torch.float64


class TwoLayers(nn.Module):
    """tanh(X W_1) W_2, an unused gate, and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.W_1 = nn.Parameter(torch.randn(2, 4, dtype=DOUBLE))
        self.W_2 = nn.Parameter(torch.randn(4, 3, dtype=DOUBLE))
        self.shift = nn.Parameter(torch.randn(3, dtype=DOUBLE))

    def forward(self, X: Tensor) -> Tensor:
        return torch.tanh(X @ self.W_1) @ self.W_2 + self.shift


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_layers() -> Any:
    return hk.hessian_function(TwoLayers(), draw(5, 2), draw(5, 3))


def kinds(terms: BlockTerms) -> list[tuple[str, tuple[int, int]]]:
    return [(t.primitive, t.positions) for t in terms.terms]


def test_the_terms_are_the_primitives_that_both_parameters_move(two_layers: Any) -> None:
    explain = two_layers.plan.explain
    assert kinds(explain("W_1", "W_1")) == [("Activation", (0, 0)), ("MeanSquaredError", (0, 0))]
    assert kinds(explain("W_1", "W_2")) == [("MatMul", (0, 1)), ("MeanSquaredError", (0, 0))]
    assert kinds(explain("W_2", "W_1")) == [("MatMul", (1, 0)), ("MeanSquaredError", (0, 0))]
    assert kinds(explain("W_2", "W_2")) == kinds(explain("shift", "W_1")) == [("MeanSquaredError", (0, 0))]


def test_shapes_operations_and_bytes_of_a_term(two_layers: Any) -> None:
    first, _ = two_layers.plan.explain("W_1", "W_2").terms
    assert first.formula == "J[tanh, W_1]ᵀ [λ·D₁D₂ matmul_1] I"
    assert (first.left, first.curvature, first.right) == ((20, 8), (20, 12), (12, 12))
    assert (first.left_path, first.right_path) == (("matmul", "tanh"), ())
    loss = two_layers.plan.explain("W_1", "W_1").terms[-1]
    assert loss.groups == 5  # rows of the output, 3 x 3 each
    assert loss.operations == 5 * 3 * 3 * 8 + 8 * 15 * 8
    assert loss.bytes == 8 * (2 * 15 * 8 + 5 * 3 * 3)


def attention() -> tuple[nn.Module, Tensor, Tensor, str]:
    block = hk.TransformerBlock(d_model=4, d_ff=6, n_heads=2, placement="pre", causal=True, activation="gelu")
    return block.double(), draw(2, 3, 4), draw(2, 3, 4), "mse"


def language_model() -> tuple[nn.Module, Tensor, Tensor, str]:
    tokens = torch.randint(7, (2, 4))
    return hk.Transformer(7, 4, 6, n_layers=1, n_heads=2, max_len=4).double(), tokens, tokens.flip(1), "cross_entropy"


@pytest.mark.parametrize("make", [attention, language_model])
def test_the_terms_add_up_to_the_block_at_the_last_values(make: Any) -> None:
    module, x, t, loss = make()
    f = hk.hessian_function(module, x, t, loss=loss)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    H = f()
    for i in H.names:
        for j in (H.names[0], H.names[-1], i):
            found = f.plan.explain(i, j)
            total, block = sum(matrix for _, matrix in found.matrices()), H.block(i, j)
            assert (total - block).abs().max() <= 1e-12 * H.matrix.abs().max()
            assert found.steps or not bool(block.any())


def test_a_block_that_is_zero_has_no_terms() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(draw(3)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a**2 * x).sum() + torch.sin(self.b * x).sum()

    f = hk.hessian_function(Apart(), draw(3), loss=None)
    found = f.plan.explain("a", "b")
    assert found.terms == ()
    assert "the block is zero" in str(found)


def test_names_end_as_they_do_in_tables_and_unknown_ones_are_refused() -> None:
    module, x, t, _ = attention()
    plan = hk.hessian_function(module, x, t).plan
    assert plan.explain("W_Q", "W_1").i == "attention.W_Q"
    with pytest.raises(InputError, match=r"explain: the parameter 'W_X' is not known; choose one of attention.W_Q"):
        plan.explain("W_Q", "W_X")
    with pytest.raises(InputError, match=r"'weight' is the end of 2 names: norm_1.weight, norm_2.weight; pass one of them"):
        plan.explain("weight", "W_Q")
    total = torch.zeros(2)
    with recording([total]) as record:
        total += 1
    with pytest.raises(InputError, match="not that of a Hessian"):
        make_plan(record, [], total, []).explain("a", "b")


def test_it_prints(two_layers: Any) -> None:
    found = two_layers.plan.explain("W_1", "W_2")
    assert "2 terms" in repr(found)
    for text in (found.table(), found._repr_html_()):
        assert "J[tanh, W_1]ᵀ [λ·D₁D₂ matmul_1] I" in text
    assert "W_1 &gt; matmul &gt; tanh" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["terms"][0]["operations"] == found.terms[0].operations
