"""The two sweeps: adjoints are gradients, and the sum of blocks is a sum."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, mse, randomised
from torch import Tensor

import hessiankit as hk
from hessiankit.curvature import loss_trace
from hessiankit.sweep import Accumulator, BlockSum, adjoints
from hessiankit.task import make_task


def traced(module: torch.nn.Module, x: Tensor, target: Tensor) -> hk.Trace:
    with torch.no_grad():
        return loss_trace(make_task("test", module, x, target, "mse"), float(target.numel())).trace


@pytest.mark.parametrize(
    "options", [{}, {"placement": "pre", "norm": "rmsnorm"}, {"n_heads": 2, "bias": True, "attention_bias": True}]
)
def test_adjoints_of_the_parameters_are_the_gradient(options):
    block, x, target = randomised(hk.TransformerBlock(4, 5, activation="gelu", **options)), draw(2, 3, 4), draw(2, 3, 4, seed=7)
    trace = traced(block, x, target)
    mse(block(x), target).backward()
    found = adjoints(trace)
    for name, p in block.named_parameters():
        assert (found[trace.parameters[name]] - p.grad).abs().max() <= 1e-13 * max(1.0, float(p.grad.abs().max()))


def test_what_does_not_reach_the_loss_has_no_adjoint():
    module = Formula(lambda s, x: (torch.tanh(x @ s.V), torch.tanh(x @ s.W))[1], W=(4, 2), V=(4, 2))
    trace = traced(module, draw(3, 4), draw(3, 2))
    found = adjoints(trace)
    assert trace.parameters["W"] in found
    assert trace.parameters["V"] not in found
    seen = assert_exact(module, draw(3, 4))
    assert (seen.block("V", "V") == 0).all()
    assert (seen.block("V", "W") == 0).all()


def test_the_sum_of_blocks():
    slices = {"a": slice(0, 2), "b": slice(2, 5)}
    a, b = draw(2, 4), draw(4, 3, seed=2)
    square, corner = draw(5, 5, seed=3), draw(2, 3, seed=4)
    total = BlockSum()
    total.add(("a",), ("b",), corner.clone(), mirrored=True)  # the sum keeps the block and adds to it
    total.add_product(("a",), ("b",), a, b, mirrored=True)
    total.add_product(("a",), ("b",), a, b, mirrored=True)
    total.add(("b", "a"), ("b", "a"), square, mirrored=False)
    total.add(("a",), ("b",), corner.T.contiguous().T, mirrored=True)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    expected[:2, 2:] = 2 * corner + 2 * a @ b
    expected += expected.T.clone()
    order = [2, 3, 4, 0, 1]
    expected[torch.tensor(order)[:, None], torch.tensor(order)] += square
    matrix = torch.zeros(5, 5, dtype=torch.float64)
    total.write(matrix, slices)
    assert torch.allclose(matrix, expected, rtol=0, atol=1e-14)
    assert total.blocks == {}


def test_tangents_are_released_and_counted():
    block, x = randomised(hk.TransformerBlock(4, 5)), draw(2, 3, 4)
    accumulator = Accumulator(traced(block, x, draw(2, 3, 4, seed=7)), BlockSum())
    accumulator.run()
    assert accumulator.peak_bytes > 0
    assert all(not by for at, by in accumulator.tangents.items() if at not in accumulator.trace.parameters.values())


ORDER = {
    "product": lambda s, x: torch.tanh(x @ s.W) @ torch.tanh(x[0] @ s.V).mT,
    "product, later weight": lambda s, x: (lambda b: torch.tanh(x @ s.W) @ b)(torch.tanh(x[0] @ s.V).mT),
    "gate by token": lambda s, x: (lambda b: torch.tanh(x @ s.W) * b)(torch.tanh(x @ s.V).mean(1, keepdim=True)),
    "gate by sample": lambda s, x: (lambda b: torch.tanh(x @ s.W) * b)(torch.tanh(x @ s.V).mean(0)),
    "gain from data": lambda s, x: (lambda b: torch.nn.functional.layer_norm(torch.tanh(x @ s.W), (5,), b))(
        torch.tanh(x[0] @ s.V).mean(0)
    ),
    "weight from data": lambda s, x: (lambda b: torch.nn.functional.linear(torch.tanh(x @ s.W), b))(torch.tanh(x[0] @ s.V)),
    "rows repeated": lambda s, x: torch.tanh((x[0] @ s.W).expand(3, 3, 5) * torch.tanh(x[1] @ s.V).unsqueeze(1)),
    "rows and columns": lambda s, x: torch.tanh(x @ s.W) * torch.tanh(x.mT.mT @ s.V).flip(1),
}


@pytest.mark.parametrize("name", ORDER)
def test_two_paths_of_other_row_shapes_meet(name):
    """A path that keeps its rows apart meets one that does not have these rows: neither order may lose the mixed term."""
    assert_exact(Formula(lambda s, x: torch.tanh(ORDER[name](s, x)), W=(4, 5), V=(4, 5)), draw(2, 3, 4))
    assert_exact(Formula(lambda s, x: torch.tanh(ORDER[name](s, x)), V=(4, 5), W=(4, 5)), draw(2, 3, 4))
