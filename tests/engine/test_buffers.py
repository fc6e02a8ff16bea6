"""Buffers that a call writes: statistics of a batch norm, counters, moving averages; they are put back, and samples stay together."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from curvature_reference import cross_entropy, draw, gradient_twice, randomised
from torch import Tensor, nn

import hessiankit as hk

LABELS = torch.tensor([0, 1, 1, 0, 1, 0])


def expected_of(module: nn.Module, x: Tensor, labels: Tensor = LABELS) -> Tensor:
    """The Hessian of cross entropy by autograd twice, of a copy, whose buffers may change."""
    twin = deepcopy(module)
    return gradient_twice(cross_entropy(twin(x), labels), list(twin.parameters()))


def norms(track: bool, momentum: float | None = 0.1) -> dict[str, tuple[nn.Module, Tensor]]:
    options = {"track_running_stats": track, "momentum": momentum}
    return {
        "rows": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Linear(4, 2)), draw(6, 3)),
        "last": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2, **options)), draw(6, 3)),
        "sequences": (
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, affine=False, **options), nn.SiLU(), nn.Flatten(), nn.Linear(9, 2)),
            draw(6, 2, 4),
        ),
        "images": (
            nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, **options), nn.GELU(), nn.Flatten(), nn.Linear(12, 2)),
            draw(6, 2, 3, 3),
        ),
        "volumes": (
            nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2, **options), nn.Tanh(), nn.Flatten(), nn.Linear(2, 2)),
            draw(6, 1, 2, 2, 2),
        ),
        "instances": (
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, **options), nn.SiLU(), nn.Flatten(), nn.Linear(9, 2)),
            draw(6, 2, 4),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "track", "momentum"), [*((name, k % 2 == 0, 0.1) for k, name in enumerate(norms(track=False))), ("rows", True, None)]
)
def test_norms_in_training(name: str, track: bool, momentum: float | None) -> None:
    module, x = norms(track, momentum)[name]
    randomised(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    expected = expected_of(module, x)
    largest = float(expected.abs().max())
    found = hk.hessian(module, x, LABELS, loss="cross_entropy")
    assert found.fallbacks == ()
    assert float((found.matrix - expected).abs().max()) <= 1e-12 * largest
    in_chunks = hk.hessian(module, x, LABELS, loss="cross_entropy", batch_size=2, handshake=False)
    assert float((in_chunks.matrix - expected).abs().max()) <= 1e-12 * largest
    operator = hk.hessian_operator(module, x, LABELS, loss="cross_entropy")
    for _ in range(2):
        assert float((operator.to_matrix() - expected).abs().max()) <= 1e-12 * largest
    diagonal = hk.hessian_diagonal(module, x, LABELS, loss="cross_entropy")
    assert float((diagonal.flat - expected.diagonal()).abs().max()) <= 1e-12 * largest
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.training


def test_parts_of_a_batch_are_refused() -> None:
    module, x = norms(track=True)["rows"]
    randomised(module)
    for handshake in (True, False):
        with pytest.raises(
            hk.TraceError, match=r"hessian_operator: .* samples depend on each other, as in a batch norm in training"
        ):
            hk.hessian_operator(module, x, LABELS, loss="cross_entropy", micro_batch=2, handshake=handshake)


def test_several_batches_each_have_their_own_statistics() -> None:
    module, x = norms(track=True)["rows"]
    randomised(module)
    expected = expected_of(module, x[:2], LABELS[:2]) / 3 + 2 * expected_of(module, x[2:], LABELS[2:]) / 3
    batches = [(x[:2], LABELS[:2]), (x[2:], LABELS[2:])]
    for found in (
        hk.hessian(module, batches, loss="cross_entropy").matrix,
        hk.hessian_operator(module, batches, loss="cross_entropy").to_matrix(),
    ):
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_a_single_value_in_a_channel_is_torchs_error() -> None:
    module, x = norms(track=True)["rows"]
    with pytest.raises(hk.InputError, match="Expected more than 1 value per channel when training"):
        hk.hessian(module.double(), x[:1], LABELS[:1], loss="cross_entropy")


class Keeps(nn.Module):
    """tanh(x W^T + b), changed by f(self, h), which may write into the buffers ``count`` and ``mean``."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.layer, self.f = nn.Linear(3, 2), f
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(2))
        randomised(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, torch.tanh(self.layer(x)))


def counted(m: Any, h: Tensor) -> Tensor:
    m.count += 1
    return h * h


def averaged(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h * h


def replaced(m: Any, h: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h * h


def by_entries(m: Any, h: Tensor) -> Tensor:
    m.mean[0].add_(1)
    m.mean[1] = 3
    return h * h


def written_before_use(m: Any, h: Tensor) -> Tensor:
    m.mean.copy_(h.detach().mean(0))
    first, view = m.mean[0] * 1, m.mean[1:]
    m.mean.copy_(h.detach().amax(0))
    view.mul_(2)
    return h * first + h * h * m.mean + h * view


def statistics_of_this_call(m: Any, h: Tensor) -> Tensor:
    m.mean.fill_(1)
    normed = nn.functional.batch_norm(h, m.mean, m.mean.clone(), training=True)
    return normed * h * m.mean


@pytest.mark.parametrize("f", [counted, averaged, replaced, by_entries, written_before_use, statistics_of_this_call])
def test_buffers_without_effect_on_later_calls(f: Any) -> None:
    module, x = Keeps(f), draw(6, 3)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    expected = expected_of(module, x)
    for handshake in (True, False):
        found = hk.hessian(module, x, LABELS, loss="cross_entropy", handshake=handshake)
        assert float((found.matrix - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    operator = hk.hessian_operator(module, x, LABELS, loss="cross_entropy")
    assert float((operator.to_matrix() - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def average_in_the_loss(m: Any, h: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h * m.mean


def test_buffers_with_an_effect_are_refused_by_name() -> None:
    module = Keeps(average_in_the_loss)
    with pytest.raises(hk.InputError, match=r"different losses \(.* and .*\): it changes its buffer 'mean'"):
        hk.hessian(module, draw(6, 3), LABELS, loss="cross_entropy")
    assert torch.equal(module.mean, torch.ones_like(module.mean))
