"""The two sweeps: adjoints are gradients, and the sum of blocks is a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, mse, randomised
from torch import Tensor

import hessiankit as hk
from hessiankit.engine.adjoints import adjoints
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.parameter_blocks import VertexBlocks
from hessiankit.engine.problem.loss_trace import loss_trace
from hessiankit.engine.problem.own_call import make_task


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
    assert seen.asymmetry <= 1e-14
    assert (seen.block("V", "V") == 0).all()
    assert (seen.block("V", "W") == 0).all()


def test_blocks_of_pairs():
    blocks, K, square = VertexBlocks(), draw(2, 3, 4), draw(2, 3, 3, seed=2)
    blocks.add(0, 1, 2, K)
    blocks.add(1, 0, 2, K.mT)
    blocks.add_half(0, 1, 1, K)
    blocks.add_half(1, 1, 2, square)
    assert torch.equal(blocks.between(0, 1)[2], 2 * K)
    assert torch.equal(blocks.between(1, 0)[2], 2 * K.mT)
    assert torch.equal(blocks.between(0, 1)[1], K)
    assert torch.equal(blocks.between(1, 1)[2], square + square.mT)
    assert blocks.near[1] == {0, 1}
    blocks.add_diagonal(0, 1, 2, K[:, 0])
    blocks.forget(0, 1)
    assert blocks.diagonal(0, 1) == blocks.between(0, 1) == {}
    assert (blocks.near[0], blocks.near[1], list(blocks.of)) == (set(), {1}, [(1, 1)])


def test_a_block_is_kept_by_few_columns():
    """After the attention of the paper's block no tangent has more columns than the values have entries in a row."""
    block, x = randomised(hk.TransformerBlock(4, 5)), draw(2, 3, 4)
    sweep = ForwardSweep(traced(block, x, draw(2, 3, 4, seed=7)))
    sweep.run()
    assert sweep.peak_bytes > 0
    assert all(vertex.axes == 2 for vertex in sweep.vertices.values())
    assert max(width for s in sweep.vertices.values() for stack in s.parents.values() for width in stack.widths) == 5
    assert all(not set(by) - {2} for by in sweep.stacks.values())


def test_columns_of_samples_where_they_are_fewer_than_parameters():
    """Tokens that move: attention mixes rows, and two samples of three tokens are fewer than the parameters before."""
    module = Formula(
        lambda s, x: (lambda z: torch.softmax(z @ z.mT, -1) @ z)(torch.tanh(torch.tanh(x @ s.W) @ s.V)), W=(9, 8), V=(8, 2)
    )
    x = draw(2, 3, 9)
    assert_exact(module, x)
    sweep = ForwardSweep(traced(module, x, draw(2, 3, 2, seed=7)))
    sweep.run()
    levels = {level for vertex in sweep.vertices.values() for level in vertex.parents}
    levels |= {level for by in sweep.blocks.of.values() for level in by}
    assert 1 in levels
    assert 0 not in levels


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


def mixed(y: Tensor) -> Tensor:
    return torch.softmax(y @ y.mT, -1) @ y


def residual(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ s.W)
    return h + torch.tanh(h @ s.V)


FEW = {
    "residual": residual,
    "layer after a residual": lambda s, x: torch.tanh(residual(s, x) @ s.U),
    "residual around a residual": lambda s, x: (lambda h: h + torch.tanh(h @ s.U))(residual(s, x)),
    "queries and keys of a residual": lambda s, x: (lambda h: h @ s.V @ (h @ s.U).mT @ h)(residual(s, x)),
    "one weight on both branches": lambda s, x: torch.tanh(x @ s.W) + torch.tanh(torch.tanh(x @ s.V) @ s.W),
}


@pytest.mark.parametrize("name", FEW)
def test_fewer_parameters_than_entries_of_tokens_that_mix(name):
    """A parameter reaches the tokens over several branches; where these mix, its derivatives by all of them add up."""
    weights = {"W": (2, 2), "V": (2, 2)} | ({"U": (2, 2)} if " a residual" in name else {})
    for shape in ((2, 9, 2), (9, 2)):
        assert_exact(Formula(lambda s, x: torch.tanh(mixed(FEW[name](s, x))), **weights), draw(*shape))


@pytest.mark.parametrize("last", [lambda y: y, torch.tanh], ids=["linear", "tanh"])
def test_the_outer_part_leaves_out_what_bends_before_the_output(last):
    """J^T L'' J, with J by central differences of the module's own output; its last operation belongs to what comes before."""
    module, x, target = Formula(lambda s, x: last(torch.tanh(x @ s.W) @ s.V), W=(3, 4), V=(4, 2)), draw(5, 3), draw(5, 2, seed=7)
    found = hk.hessian(module, x, target)
    flat = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    columns, h = [], 1e-4

    def output(theta: Tensor) -> Tensor:
        torch.nn.utils.vector_to_parameters(theta, module.parameters())
        with torch.no_grad():
            return module(x).reshape(-1)

    for step in torch.eye(len(flat), dtype=flat.dtype) * h:
        near, far = output(flat + step) - output(flat - step), output(flat + 2 * step) - output(flat - 2 * step)
        columns.append((8 * near - far) / (12 * h))
    output(flat)
    J = torch.stack(columns, 1)
    expected = 2 / target.numel() * J.T @ J
    assert (found.outer() - expected).abs().max() <= 1e-11 * expected.abs().max()
    assert (found.matrix - found.outer() - found.functional()).abs().max() <= 1e-14 * found.matrix.abs().max()
    assert found.functional().abs().max() > 1e-3
