"""State that ``preserved_state`` restores, also after an error."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from hessiankit.support.torch_state import preserved_state


def _measure_and_stop(model: nn.Module) -> None:
    with torch.no_grad(), preserved_state(model):
        assert torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        model[1].running_mean.add_(1.0)
        model.requires_grad_(True)
        model.train()
        model(torch.randn(4, 2)).sum().backward()
        raise KeyboardInterrupt


def test_everything_is_put_back_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = gradient = torch.ones(2, 2)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(KeyboardInterrupt):
        _measure_and_stop(model)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 2))
    assert model[1].weight.grad is None
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002


def test_buffers_that_did_not_change_are_not_written():
    model = nn.BatchNorm1d(2)
    versions = [b._version for b in model.buffers()]
    with preserved_state(model):
        model(torch.randn(3, 2))
    assert [b._version for b in model.buffers()] == versions
