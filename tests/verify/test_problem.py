"""The loss as a function of named parameters: layouts, losses, what stays fixed, what is refused."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hessiankit.support.errors import InputError
from hessiankit.verify.problem import Problem


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3, dtype=torch.float64)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_theta_follows_the_order_of_params_and_flat_loss_uses_it():
    module, x, t = linear(), data(5, 4), data(5, 3)
    problem = Problem(module, x, t, "mse", {"bias": torch.ones(3).double(), "weight": torch.zeros(3, 4).double()})
    assert problem.slices == {"bias": slice(0, 3), "weight": slice(3, 15)}
    assert problem.size == 15
    assert torch.equal(problem.theta, torch.cat([torch.ones(3), torch.zeros(12)]).double())
    torch.testing.assert_close(problem.flat_loss(problem.theta), F.mse_loss(torch.ones(5, 3).double(), t))
    moved = problem.theta + 0.5
    expected = F.mse_loss(x @ torch.full((4, 3), 0.5, dtype=torch.float64) + 1.5, t)
    torch.testing.assert_close(problem.flat_loss(moved), expected)


def test_parameters_left_out_stay_and_the_module_is_untouched():
    module, x, t = linear(), data(5, 4), data(5, 3)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    problem = Problem(module, x, t, "mse", {"bias": torch.zeros(3).double()})
    torch.testing.assert_close(problem.flat_loss(problem.theta), F.mse_loss(x @ before["weight"].T, t))
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_inputs_may_be_a_tuple_or_a_dict():
    module, t = nn.Bilinear(2, 3, 4, dtype=torch.float64), data(5, 4)
    a, b = data(5, 2), data(5, 3)
    by_position = Problem(module, (a, b), t)
    by_name = Problem(module, {"input1": a, "input2": b}, t)
    assert by_position.value == by_name.value == F.mse_loss(module(a, b), t).item()


def test_loss_may_be_a_callable_or_come_from_the_module():
    class OwnLoss(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return types.SimpleNamespace(loss=out.square().sum(), logits=out)

    module = OwnLoss(4, 3, dtype=torch.float64)
    x = data(5, 4)
    total = module(x).loss.item()
    assert Problem(module, x, loss=None).value == total
    assert Problem(module, x, loss=lambda out, target: out.logits.square().sum()).value == total
    assert Problem(module, x, torch.zeros(5, 3).double()).value == pytest.approx(total / 15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"gain": torch.ones(3).double()}}, "no parameter named 'gain'"),
        ({"params": {"bias": torch.ones(4).double()}}, r"shape \(4,\); the module expects \(3,\)"),
        ({"params": {"bias": torch.ones(3), "weight": torch.ones(3, 4).double()}}, "several dtypes"),
        ({"loss": "hinge"}, "loss='hinge' is not known"),
        ({"target": torch.ones(5, 1).double()}, "needs equal shapes"),
        ({"loss": "cross_entropy"}, "integer class labels"),
        ({"loss": "cross_entropy", "target": torch.full((5,), -100)}, "every label is -100"),
        ({"loss": lambda outputs, target: outputs}, r"the loss returned shape \(5, 3\), expected a scalar tensor"),
    ],
)
def test_what_cannot_be_used_is_refused(change, message):
    arguments = {"module": linear(), "inputs": data(5, 4), "target": data(5, 3), "loss": "mse", "params": {}} | change
    with pytest.raises(InputError, match=message):
        _ = Problem(**arguments).value


def test_a_random_loss_is_refused():
    problem = Problem(nn.Sequential(linear(), nn.Dropout(0.5)).train(), data(5, 4), data(5, 3))
    with pytest.raises(InputError, match=r"module\.eval"):
        _ = problem.value
