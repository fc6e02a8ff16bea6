"""Forecasts: bounds on memory, nothing computed, every field in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, randomised
from meter import Meter
from torch import nn

import hessiankit as hk
from hessiankit.curvature import evaluation, forecast, streaming
from hessiankit.engine import assembly
from hessiankit.support import memory
from hessiankit.support.kernels import plain

X, T = draw(5, 4, 6), draw(5, 4, 6, seed=2)


def block() -> nn.Module:
    return randomised(hk.TransformerBlock(6, 7, d_k=3))


def test_says_what_it_takes_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "assemble", None)
    found = hk.hessian(block(), X, T, dry_run=True)
    assert (found.parameters, found.matrix_bytes, found.disk_bytes) == (180, 180 * 180 * 8, 0)
    assert (found.samples, found.batches, found.chunks, found.panels, found.dtype) == (5, 1, 1, 1, "float64")
    assert found.fits
    assert found.memory_bytes == found.matrix_bytes + found.workspace_bytes
    assert 0 < found.seconds < 60  # of some hundred parameters
    assert "Forecast: it fits" in found.table()
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["fallbacks"] == []


def test_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "PANEL", 30_000)
    found = hk.hessian(block(), X, T, out=tmp_path / "h.npy", dry_run=True)
    assert found.panels > 5
    assert found.disk_bytes == 180 * 180 * 8 + 128
    assert found.memory_bytes < found.workspace_bytes + found.matrix_bytes
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(streaming, "PANEL", 30_000)
    hk.hessian(block(), X, T, out=tmp_path / "h.npy")
    assert (tmp_path / "h.npy").stat().st_size == found.disk_bytes


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_counts_what_runs(batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast is a bound on the bytes alive while the Hessian is computed, and knows its operations."""
    found = hk.hessian(block(), X, T, batch_size=batch_size, dry_run=True)
    sweeps: list[Any] = []
    inner = assembly.BlockRows.read
    monkeypatch.setattr(assembly.BlockRows, "read", lambda self, reader: (sweeps.append(self), inner(self, reader)))
    with plain(), Meter() as meter:
        hk.hessian(block(), X, T, batch_size=batch_size, handshake=False)
    assert len(sweeps) == found.chunks == {None: 1, 1: 5, 3: 2}[batch_size]
    assert meter.peak <= found.memory_bytes <= 4 * meter.peak + forecast.MARGIN
    assert found.flops / 3 <= meter.flops <= 3 * found.flops


def test_names_what_falls_back_and_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Formula(lambda m, x: torch.linalg.inv(x + m.w), w=(3, 3))
    found = hk.hessian(module, draw(2, 3, 3), draw(2, 3, 3), dry_run=True)
    assert found.fallbacks == hk.hessian(module, draw(2, 3, 3), draw(2, 3, 3)).fallbacks != ()
    assert found.fallbacks[0] in found.table()
    monkeypatch.setattr(forecast, "available_memory", lambda device: 1000)
    assert "it does not fit" in hk.hessian(block(), X, T, dry_run=True).table()
    with pytest.raises(hk.InputError, match="lazy=True"):
        hk.hessian(block(), X, T, dry_run=True, lazy=True)


def test_derivatives_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows meet in the second block, and what does not fit comes late in the sweep."""
    module, x = randomised(nn.Sequential(*(hk.TransformerBlock(6, 7, placement="pre") for _ in range(2)))), draw(1, 80, 6)
    found = hk.hessian(module, x, x, dry_run=True)
    room = 2 * found.matrix_bytes + 16 * 2**20
    assert found.workspace_bytes > 2 * room
    for where in (memory, evaluation):
        monkeypatch.setattr(where, "available_memory", lambda device: room)
    message = r"the derivatives of one chunk of samples, .*iB, and the matrix, .*iB, take"
    with Meter() as meter, pytest.raises(hk.OutOfMemoryError, match=message):
        hk.hessian(module, x, x)
    assert meter.peak < room


CASES = {
    "attention": lambda: (randomised(hk.TransformerBlock(4, 5, placement="pre", n_heads=2)), draw(1, 64, 4)),
    "coupled rows": lambda: (randomised(nn.Sequential(nn.LayerNorm(60), nn.Softmax(1), nn.LayerNorm(60))), draw(1, 30, 60)),
    "deep": lambda: (
        randomised(nn.Sequential(*(f() for _ in range(4) for f in (lambda: nn.Linear(6, 6), nn.Tanh)))),
        draw(900, 6),
    ),
    "fallback": lambda: (Formula(lambda m, x: torch.linalg.slogdet(x + m.w @ m.v)[1], w=(16, 16), v=(16, 16)), draw(9, 16, 16)),
    "wide columns": lambda: (Formula(lambda m, x: torch.fft.rfft(torch.tanh(x @ m.w)).abs(), w=(8, 8)), draw(1, 50, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_sweep_takes_is_known_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = CASES[name]()
    expected: list[int] = []
    monkeypatch.setattr(evaluation.Evaluation, "look", staticmethod(lambda first: expected.append))
    with Meter() as meter:
        found = hk.hessian(module, x, torch.zeros_like(module(x)), handshake=False)
    assert meter.peak <= 2 * max(expected) + 2 * found.matrix.nbytes
    assert max(expected) <= 4 * meter.peak  # and no more than that: memory enough is not taken for too little
