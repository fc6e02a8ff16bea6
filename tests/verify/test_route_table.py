"""The shipped route table: looked up by operations, and what check makes of it."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from benchmarks.routes.operations import OPERATIONS
from hessiankit.verify import route_table
from hessiankit.verify.check import AGAINST
from hessiankit.verify.problem import Problem
from hessiankit.verify.route_table import choose, load, signatures

OURS = ("reverse-over-reverse", "jvp(grad)", "central-differences")
pinned = pytest.mark.skipif(torch.__version__.split("+")[0] != load()["torch"], reason="the table is of another torch")


def problem(module: nn.Module, x: Tensor, loss: object = "mse") -> Problem:
    with torch.no_grad():
        target = draw(*module.double().eval()(x).shape, seed=6)
    return Problem(module, x, target, loss)  # type: ignore[arg-type]


def test_a_signature_says_which_tensors_move():
    def loss(p: dict[str, Tensor]) -> Tensor:
        z = F.layer_norm(torch.ones(2, 3) @ p["W"], (4,), torch.ones(4))
        return (z + torch.arange(4.0).sin()).sum()

    found = list(signatures(loss, {"W": torch.ones(3, 4)}))
    assert found == [
        "aten.matmul.default(self, other*)",
        "aten.layer_norm.default(input*, weight)",
        "aten.add.Tensor(self*, other)",
        "aten.sum.default(self*)",
    ]


@pinned
def test_a_gain_leaves_jacfwd_of_jacrev_out():
    found = choose(problem(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), draw(5, 3)), AGAINST)
    assert found.names == OURS
    assert found.note == ""
    assert set(found.left_out) == {"torch.func.hessian", "curvlinops"}
    for why in found.left_out.values():
        assert why == f"wrong through layer_norm(x W, gain, bias) (route table, torch {load()['torch']})"


@pinned
def test_without_a_gain_it_is_left_out_as_no_witness_of_its_own():
    found = choose(problem(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), draw(5, 3)), AGAINST)
    assert found.names == OURS
    assert "shares its path with jvp(grad)" in found.left_out["torch.func.hessian"]


@pinned
def test_the_other_of_a_path_is_taken_where_the_first_fails():
    found = choose(problem(nn.Linear(3, 4), draw(5, 3), F.mse_loss), AGAINST)
    assert found.names == ("reverse-over-reverse", "torch.func.hessian", "central-differences")
    assert found.left_out["jvp(grad)"].startswith("unsupported through mse_loss")


@pinned
def test_a_batched_sweep_that_is_wrong_is_left_out():
    found = choose(
        problem(nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.GroupNorm(4, 4, affine=False)), draw(2, 2, 4)), AGAINST
    )
    assert found.names == ("jvp(grad)", "central-differences")
    assert found.left_out["reverse-over-reverse"].startswith("wrong through group_norm(x W, 4 groups)")


@pinned
def test_an_operation_that_is_not_in_the_table_leaves_everything_to_the_examination():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sinc(self.inner(x))

    found = choose(problem(Odd(), draw(5, 3)), AGAINST)
    assert found.names == AGAINST
    assert found.note == "not in the route table: aten.sinc.default"
    report = hk.check(Odd().double(), draw(5, 3), draw(5, 2, seed=6))
    assert tuple(h.reference for h in report.health) == AGAINST
    assert "note: not in the route table: aten.sinc.default" in report.table()


def test_a_function_with_a_backward_of_its_own_is_named():
    example = OPERATIONS["autograd.Function (once)"].example(0)
    with pytest.raises(hk.TraceError, match=r"check: autograd: CubedOnceBackward .* marked once_differentiable"):
        hk.check(example.module, example.x, example.target)
    found = choose(Problem(example.module, example.x, example.target, "mse"), AGAINST)
    assert found.note == "not in the route table: autograd: CubedOnceBackward"


@pinned
def test_the_references_take_a_plain_formula_in_the_place_of_one_without_right_routes():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).double()
    found = choose(Problem(module, draw(5, 3), draw(5, 4, seed=6), "mse"), AGAINST)
    assert found.note == "not in the route table: aten.norm_except_dim.default"
    assert hk.check(module, draw(5, 3), draw(5, 4, seed=6))


def test_another_torch_leaves_everything_to_the_examination(monkeypatch):
    monkeypatch.setattr(route_table, "load", lambda: {"torch": "1.0.0", "operations": {}})
    found = choose(problem(nn.Linear(3, 4), draw(5, 3)), AGAINST)
    assert found.names == AGAINST
    assert "the route table is of torch 1.0.0" in found.note


@pinned
def test_names_that_are_given_are_taken():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    report = hk.check(module, draw(5, 3), draw(5, 4, seed=6), against=AGAINST)
    assert tuple(h.reference for h in report.health) == AGAINST
    assert report.left_out == {}
    by_default = hk.check(module, draw(5, 3), draw(5, 4, seed=6))
    assert tuple(h.reference for h in by_default.health) == OURS
    assert by_default.to_dict()["left_out"].keys() == {"torch.func.hessian", "curvlinops"}
    assert "curvlinops: left out: wrong through layer_norm" in by_default.table()


def test_own_blocks_show_the_known_defect():
    assert tuple(h.reference for h in hk.check(hk.TransformerBlock(d_model=4, d_ff=5, d_k=2)).health) == AGAINST
