"""Training: the update is AdamW's, and the digits depend on the seed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hessiankit.support.errors import InputError
from papers.experiments.training import train

INPUTS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = (INPUTS[:, 0] > 0.3).long() + (INPUTS[:, 1] > 0).long()


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def digits_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def run(model: nn.Module, **options: object) -> tuple[float, ...]:
    settings: dict[str, object] = {"batch_size": 12, "progress": False, "lr": 0.02, **options}
    return train(model, INPUTS, LABELS, **settings)  # type: ignore[arg-type]


def test_steps_are_adam_on_seeded_epochs() -> None:
    model, reference = classifier(), classifier()
    losses = run(model, steps=7, seed=5)
    generator, expected = torch.Generator().manual_seed(5), []
    order = torch.cat([torch.randperm(50, generator=generator)[:48] for _ in range(2)])
    parameters = list(reference.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step in range(1, 8):
        rows = order[12 * (step - 1) : 12 * step]
        value = -reference(INPUTS[rows]).log_softmax(-1)[torch.arange(12), LABELS[rows]].sum() / 12
        expected.append(value.item())
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, torch.autograd.grad(value, parameters), moments, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                p.sub_(0.02 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    assert torch.allclose(digits_of(model), digits_of(reference), rtol=0, atol=1e-13)
    assert losses == pytest.approx(expected, abs=1e-13)


def test_the_seed_decides_and_the_callers_random_state_is_left_alone() -> None:
    models = [classifier() for _ in range(3)]
    before = torch.get_rng_state()
    first = run(models[0], steps=20, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert run(models[1], steps=20, seed=0) == first
    assert torch.equal(digits_of(models[0]), digits_of(models[1]))
    assert run(models[2], steps=20, seed=1) != first


def test_a_loss_that_is_not_finite_is_named() -> None:
    with pytest.raises(InputError, match="the loss became nan at step 1; lower the learning rate"):
        train(classifier(), INPUTS * float("nan"), LABELS, steps=3, progress=False)
