"""Frobenius norms without the matrix: those of reverse-over-reverse autograd's Hessian, block by block."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from curvature_reference import draw, mse, randomised, reverse_over_reverse
from meter import Meter
from torch import Tensor, nn

import hessiankit as hk
from hessiankit import frobenius_norms
from hessiankit.curvature import evaluation, frobenius, planning
from hessiankit.curvature import streaming as panel_sum
from hessiankit.curvature.frobenius import FrobeniusNorms
from hessiankit.engine import sections

X, T = draw(3, 4, 6), draw(3, 4, 6, seed=2)


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several panels, some of them a part of the rows of one parameter."""
    monkeypatch.setattr(frobenius, "PANEL", 30_000)
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 0)


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(6, 7, d_k=3, **options))


def assert_norms(found: FrobeniusNorms, expected: Tensor) -> None:
    """Compare every block, and all of them, with a dense matrix of the same parameters."""
    start, slices = 0, {}
    for name, shape in found.shapes.items():
        slices[name] = slice(start, start := start + torch.Size(shape).numel())
    assert expected.shape == (start, start)
    largest = float(expected.norm())
    for i, rows in slices.items():
        for j, columns in slices.items():
            norm = float(expected[rows, columns].norm())
            assert found.block(i, j) == pytest.approx(norm, rel=1e-12, abs=1e-14 * largest), (i, j)
        assert found.rows(i) == pytest.approx(float(expected[rows].norm()), rel=1e-12)
    assert found.whole == pytest.approx(largest, rel=1e-12)
    assert float(found.matrix.norm()) == pytest.approx(largest, rel=1e-12)


BLOCKS: dict[str, dict[str, Any]] = {"paper": {}, "pre-norm with biases": {"placement": "pre", "bias": True, "n_heads": 3}}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    module, steps = block(**BLOCKS[name]), []
    found = frobenius_norms(module, X, T, progress=lambda done, total: steps.append((done, total)))
    assert_norms(found, reverse_over_reverse(module, X, T, mse))
    assert found.loss == pytest.approx(float(mse(module(X), T).detach()), rel=1e-13)
    panels = steps[0][1] // 3
    assert panels > 5
    assert steps == [(3 * n, 3 * panels) for n in range(1, 1 + panels)]


def test_what_it_says_of_itself() -> None:
    module = randomised(nn.Linear(4, 2))
    found = frobenius_norms(module, draw(3, 4), draw(3, 2))
    assert found.block("bias", "bias") == pytest.approx(2**0.5)  # 2 / (rows * columns) for each of three rows
    assert found.block("weight", "bias") == found.block("bias", "weight")
    text = found.table()
    assert "Frobenius norm of the Hessian, 10 x 10:" in text
    assert "Gauss-Newton part" in frobenius_norms(module, draw(3, 4), draw(3, 2), kind="ggn").table()
    assert len(text.splitlines()) == 5  # title, headers, rule, two parameters
    assert "<caption>Frobenius norm" in found._repr_html_()
    said = found.to_dict()
    assert [(b["row"], b["column"]) for b in said["blocks"]] == [("weight", "weight"), ("weight", "bias"), ("bias", "bias")]
    assert said["frobenius_norm"] == found.whole
    assert said["parameters"] == 10
    with pytest.raises(FrozenInstanceError):
        found.loss = 0.0  # type: ignore[misc]
    with pytest.raises(hk.InputError, match=r"FrobeniusNorms.block: .*'wieght'.*weight"):
        found.block("wieght", "bias")
    with pytest.raises(hk.InputError, match=r"'weight\[0\]' is a part of a parameter, .* pass 'weight'"):
        found.block("bias", "weight[0]")


def test_memory_is_that_of_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "WORK_SPACE", 2**16)
    module, x = randomised(hk.TransformerBlock(12, 48)), draw(1, 12)
    size = sum(p.numel() for p in module.parameters())
    with Meter() as meter:
        frobenius_norms(module, x, x.flip(1), panel_bytes=2**21)
    assert meter.peak < 8 * size**2 / 2  # W_1 with itself takes an eighth of the matrix, and its derivatives as much


def test_norms_of_float32_are_added_in_float64() -> None:
    module = nn.Linear(700, 1, bias=False)
    norms = frobenius_norms(module, torch.full((1, 700), 1 / 3), torch.zeros(1, 1), panel_bytes=2**25)
    assert norms.whole == pytest.approx(2 * 700 / 9, rel=1e-7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 leaves no sample"),
        ({"panel_bytes": 0}, "panel_bytes=0 holds no entry; pass 1 or more, or None"),
        ({"params": "wieght"}, "weight"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.InputError, match=f"frobenius_norms: .*{said}"):
        frobenius_norms(nn.Linear(4, 2), torch.zeros(3, 4), torch.zeros(3, 2), **options)


def test_what_does_not_fit_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda device: 2**16)
    monkeypatch.setattr(panel_sum, "SymmetricStorage", None)
    with pytest.raises(hk.OutOfMemoryError, match=r"frobenius_norms: the derivatives of one chunk of samples take"):
        frobenius_norms(block(), X, T)


@pytest.mark.parametrize(("kind", "batch_size"), [("hessian", None), ("ggn", 1)])
def test_at_once_where_the_matrix_fits(kind: str, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batches, steps = block(), [(X, T), (X[:2], T[:2])], []
    panels = frobenius_norms(module, batches, kind=kind, weights=[3, 2])
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    monkeypatch.setattr(frobenius, "PanelSum", None)  # is not reached
    options: dict[str, Any] = {"kind": kind, "weights": [3, 2], "batch_size": batch_size}
    found = frobenius_norms(module, batches, progress=lambda *done: steps.append(done), **options)
    dense = hk.hessian(module, batches, weights=[3, 2])
    assert_norms(found, dense.matrix if kind == "hessian" else dense.outer())
    assert list(found.blocks) == list(panels.blocks)
    assert (found.shapes, found.kind, found.fallbacks) == (panels.shapes, panels.kind, panels.fallbacks)
    assert found.loss == pytest.approx(panels.loss, rel=1e-13)
    assert steps[-1] == (5, 5)


def test_by_panels_where_the_derivatives_do_not_fit_beside_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block()
    expected = hk.hessian(module, X, T).matrix
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    monkeypatch.setattr(evaluation, "available_memory", lambda device: expected.nbytes + 1000)
    panels: list[Any] = []
    monkeypatch.setattr(frobenius, "PanelSum", lambda *a, **k: panels.append(a) or panel_sum.PanelSum(*a, **k))
    monkeypatch.setattr(frobenius, "PANEL", 2**28)
    found = frobenius_norms(module, X, T)
    assert len(panels) == 1
    assert_norms(found, expected)


def test_interrupted_it_leaves_nothing_behind() -> None:
    module = block()
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        frobenius_norms(module, X, T, progress=stop)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert_norms(frobenius_norms(module, X, T), reverse_over_reverse(module, X, T, mse))
