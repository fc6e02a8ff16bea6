"""Sites that move the loss row by row: which they are, and how far their tangents are followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, randomised
from torch import Tensor

import hessiankit as hk
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.problem.loss_trace import loss_trace
from hessiankit.engine.problem.own_call import make_task
from hessiankit.engine.reassociation import reassociate
from hessiankit.engine.row_diagonal import FactoredTangents, RowDiagonal


def swept(module: torch.nn.Module, x: Tensor, target: Tensor) -> ForwardSweep:
    with torch.no_grad():
        return ForwardSweep(loss_trace(make_task("test", module, x, target, "mse"), float(target.numel())).trace)


def by_site(module: torch.nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    sweep = swept(module, x, target)
    with torch.no_grad():
        found = RowDiagonal(sweep).columns(list(sweep.sites))
    return {lift.parameter: found[at] for at, site in sweep.sites.items() for lift in site.jacobians if at in found}


def test_curvature_in_the_site_of_a_bias() -> None:
    """A bias moves all rows alike, so that of one row is the Hessian of a bias for that row alone."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.layer_norm(torch.tanh(x @ s.A + s.b) @ s.B + x[..., :3], (3,)) @ s.C)

    module, x = Formula(forward, A=(4, 5), b=(5,), B=(5, 3), C=(3, 3)), draw(2, 3, 4)
    target = draw(2, 3, 3, seed=7)
    found = by_site(module, x, target)
    assert set(found) == {"A", "b", "B", "C"}
    shifts = torch.zeros(6, 5, dtype=torch.float64)

    def loss(shift: Tensor) -> Tensor:
        y = torch.tanh(x @ module.A + module.b + shift.reshape(2, 3, 5)) @ module.B + x[..., :3]
        y = y - y.mean(-1, keepdim=True)
        return mse(torch.tanh(y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() @ module.C), target)

    whole = torch.autograd.functional.hessian(loss, shifts).reshape(30, 30)
    torch.testing.assert_close(found["b"].reshape(-1), whole.diagonal(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_every_parameter_of_a_block_of_one_head(placement: str) -> None:
    block, x = randomised(hk.TransformerBlock(4, 5, placement=placement)), draw(2, 3, 4)
    found = by_site(block, x, draw(2, 3, 4, seed=7))
    apart = {name for name, _ in block.named_parameters()}
    moved = {"norm_1.weight", "norm_1.bias", "attention.W_Q", "attention.W_K", "attention.W_V"} if placement == "pre" else set()
    assert set(found) >= apart - moved


def test_not_where_rows_meet() -> None:
    module = Formula(lambda s, x: (lambda y: torch.softmax(y @ y.mT, -1) @ x @ s.B)(x @ s.A), A=(4, 5), B=(4, 2))
    assert set(by_site(module, draw(2, 3, 4), draw(2, 3, 2))) == {"B"}


def test_tangents_that_share_a_matrix() -> None:
    scale, M, like = draw(2, 3, 5), draw(5, 4, seed=2), torch.zeros((), dtype=torch.float64)
    beam = FactoredTangents(torch.Size((2, 3, 4)), matrix=M, scale=scale)
    assert beam.is_shared
    assert not beam.is_identity
    torch.testing.assert_close(beam.dense(like), torch.einsum("bnp,pw->pbnw", scale, M))
    assert torch.equal(FactoredTangents(torch.Size((3, 2))).dense(like)[1], torch.tensor([[0.0, 1.0]] * 3).double())


def test_nothing_of_a_norm_before_the_loss_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the feed-forward weights a norm and the loss follow: no tangent is pushed through them."""
    block, x = randomised(hk.TransformerBlock(4, 5)), draw(2, 3, 4)
    sweep = swept(block, x, draw(2, 3, 4, seed=7))
    reassociate(sweep.trace)
    rows = RowDiagonal(sweep)
    monkeypatch.setattr(
        rows, "_add_curvature", lambda *_, **__: pytest.fail("a tangent was pushed through something that bends it")
    )
    sites = [at for at, site in sweep.sites.items() for u in site.jacobians if u.parameter.startswith("feedforward")]
    with torch.no_grad():
        assert set(rows.columns(sites)) == set(sites)
