"""Labels drawn from a softmax: one uniform number a token, whatever is around it."""

from __future__ import annotations

import pytest
import torch

from hessiankit.engine.problem import fisher as labels
from hessiankit.engine.problem.fisher import sample_labels, sample_residuals, uniforms


def logits(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_uniforms_are_pinned():
    """They may not change with a version of torch or NumPy: Philox4x64-10 of Random123, by its recurrence in whole numbers."""
    assert uniforms(3, 2, [0, 5], 6)[1, 1].tolist() == [_philox(3, 1, 5, k) for k in range(6)]


def _philox(seed, draw, number, position):
    """Random123's philox4x64-10; NumPy adds one to the counter before the first block."""
    mask = 2**64 - 1
    counter, key = [position // 4 + 1, number, 0, 0], [seed, draw]
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return ((counter[position % 4] >> 12) + 0.5) / 2**52


def test_inverse_of_the_distribution_function():
    z = logits(4, 3, 6)
    found = sample_labels(z, [3, 1, 4, 9], 5, 2)
    cumulative = torch.softmax(z, -1).cumsum(-1)
    u = uniforms(2, 5, [3, 1, 4, 9], 3)
    for d, b, t in [(d, b, t) for d in range(5) for b in range(4) for t in range(3)]:
        c = int(found[d, b, t])
        below = 0.0 if c == 0 else float(cumulative[b, t, c - 1])
        assert below <= float(u[d, b, t]) <= float(cumulative[b, t, c])


@pytest.mark.parametrize("chunk", [1, 7, 24, 10**6])
def test_chunks_change_nothing(monkeypatch, chunk):
    z = logits(4, 3, 6)
    wanted = sample_labels(z, range(4), 5, 2)
    monkeypatch.setattr(labels, "CHUNK", chunk)
    assert torch.equal(sample_labels(z, range(4), 5, 2), wanted)


def test_a_sequence_alone_and_padded():
    z = logits(4, 5, 6)
    wanted = sample_labels(z, range(4), 3, 0)
    assert torch.equal(sample_labels(z[2:3], [2], 3, 0), wanted[:, 2:3])
    assert torch.equal(sample_labels(z[:, :3], range(4), 3, 0), wanted[:, :, :3])
    assert torch.equal(sample_labels(z[[3, 0]], [3, 0], 2, 0), wanted[:2, [3, 0]])


def test_a_class_of_probability_zero_is_never_drawn():
    z = logits(500, 4, 5)
    z[..., [0, 3, 4]] = -float("inf")
    assert set(sample_labels(z, range(500), 3, 0).unique().tolist()) == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_summed_in_double_precision(dtype):
    z = logits(2, 3, 50_000).to(dtype)
    assert torch.equal(sample_labels(z, [0, 1], 2, 0), sample_labels(z.double(), [0, 1], 2, 0))


def test_residuals_are_standard_normal():
    found = sample_residuals(torch.zeros(200, 3, 4), range(200), 8, 1)
    assert found.shape == (8, 200, 3, 4)
    assert abs(float(found.mean())) < 4 / found.numel() ** 0.5
    assert abs(float(found.square().mean()) - 1) < 4 * (2 / found.numel()) ** 0.5
    assert torch.equal(sample_residuals(torch.zeros(1, 3, 4), [7], 8, 1)[:, 0], found[:, 7])


def test_a_number_on_the_edge_of_two_classes_draws_the_second(monkeypatch):
    monkeypatch.setattr(labels, "uniforms", lambda *_: torch.full((1, 1, 1), 0.5, dtype=torch.float64))
    assert sample_labels(torch.zeros(1, 1, 2, dtype=torch.float64), [0], 1, 0).item() == 1
