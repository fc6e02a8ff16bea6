"""Frobenius norms without the matrix: those of reverse-over-reverse autograd's Hessian, block by block."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, mse, randomised, reverse_over_reverse
from operator_cases import LABELS, TOKENS, TiedBlock
from torch import Tensor, nn

import hessiankit as hk
from hessiankit import FrobeniusNorms, frobenius_norms
from hessiankit.curvature import evaluation, frobenius, planning
from hessiankit.curvature import streaming as panel_sum

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
    dense = hk.hessian(module, X, T)
    assert_norms(found, dense.matrix)
    assert found.loss == pytest.approx(dense.loss, rel=1e-13)
    panels = steps[0][1] // 3
    assert panels > 5
    assert steps == [(3 * n, 3 * panels) for n in range(1, 1 + panels)]


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "panel_bytes"), [(0, 2**18), (2**30, 2**14)])
def test_batches_of_unequal_lengths(monkeypatch: pytest.MonkeyPatch, kept: int, panel_bytes: int) -> None:
    """Curvature is kept from panel to panel or computed again; the panels are of any size."""
    monkeypatch.setattr(planning, "CACHE", kept)
    module = randomised(TiedBlock())
    expected = reverse_over_reverse(module, TOKENS, LABELS, cross_entropy)
    one = frobenius_norms(module, TOKENS, LABELS, loss="cross_entropy", batch_size=1, panel_bytes=panel_bytes)
    assert_norms(one, expected)
    batches = [(TOKENS[:1], LABELS[:1]), (TOKENS[1:], LABELS[1:])]
    assert_norms(frobenius_norms(module, batches, loss="cross_entropy", panel_bytes=panel_bytes), expected)
    batches = [(TOKENS[:1, :3], LABELS[:1, :3]), (TOKENS[1:], LABELS[1:])]
    several = frobenius_norms(module, batches, loss="cross_entropy", panel_bytes=panel_bytes)
    assert_norms(several, (2 * _of(module, batches[0]) + 4 * _of(module, batches[1])) / 6)
    total = frobenius_norms(module, batches, loss="cross_entropy", reduction="sum")
    assert total.whole == pytest.approx(6 * several.whole, rel=1e-12)


def _of(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return reverse_over_reverse(module, *batch, cross_entropy)


def test_gauss_newton_part_and_some_parameters() -> None:
    module, params = block(), ["*.W_1", "*.W_V"]
    found = frobenius_norms(module, X, T, kind="ggn", params=params)
    names = tuple(found.shapes)
    assert len(names) == 2
    chosen = {n: p.detach() for n, p in module.named_parameters() if n in names}

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(chosen, values, strict=True)), (X,)).reshape(-1)

    parts = torch.autograd.functional.jacobian(output, tuple(chosen.values()))
    J = torch.cat([part.flatten(1) for part in parts], 1)
    assert_norms(found, 2 / len(J) * J.T @ J)
    assert "Gauss-Newton part" in found.table()


def test_few_large_panels_where_each_repeats_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CACHE", 0)
    steps: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        steps.append((done, total))

    module = block()
    small = frobenius_norms(module, X, T, progress=tell)
    assert steps[-1][1] > 3
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    large = frobenius_norms(module, X, T, progress=tell)
    assert steps[-1] == (3, 3)
    assert large.whole == pytest.approx(small.whole, rel=1e-13)


def test_what_it_says_of_itself() -> None:
    module = randomised(nn.Linear(4, 2))
    found = frobenius_norms(module, draw(3, 4), draw(3, 2))
    assert found.block("bias", "bias") == pytest.approx(2**0.5)  # 2 / (rows * columns) for each of three rows
    assert found.block("weight", "bias") == found.block("bias", "weight")
    text = found.table()
    assert "Frobenius norm of the Hessian, 10 x 10:" in text
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


def test_norms_of_float32_are_added_in_float64() -> None:
    module = nn.Linear(1500, 1, bias=False)
    norms = frobenius_norms(module, torch.full((1, 1500), 1 / 3), torch.zeros(1, 1))
    assert norms.whole == pytest.approx(2 * 1500 / 9, rel=1e-7)


def test_parameters_without_effect() -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 2), unused=(3,))
    found = frobenius_norms(module, draw(3, 4), draw(3, 2))
    assert found.rows("unused") == 0
    assert found.whole == found.block("W", "W")
    with pytest.raises(hk.InputError, match=r"frobenius_norms: none of the parameters \('unused'\) has an effect"):
        frobenius_norms(module, draw(3, 4), draw(3, 2), params="unused")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "kfac"}, "kind='kfac' is not known; choose one of hessian, ggn, fisher"),
        ({"batch_size": 0}, "batch_size=0 leaves no sample"),
        ({"panel_bytes": 0}, "panel_bytes=0 holds no entry; pass 1 or more, or None"),
        ({"params": "wieght"}, "weight"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.InputError, match=f"frobenius_norms: .*{said}"):
        frobenius_norms(nn.Linear(4, 2), torch.zeros(3, 4), torch.zeros(3, 2), **options)


def test_a_block_that_is_not_finite_is_named() -> None:
    module = Formula(lambda s, x: torch.sqrt(x @ s.W), W=(4, 2), b=(3,))
    with pytest.raises(hk.InputError, match=r"frobenius_norms: the block \('W', 'W'\) is NaN or infinite"):
        frobenius_norms(module, torch.zeros(3, 4).double(), draw(3, 2), panel_bytes=1)


def test_what_does_not_fit_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda device: 2**16)
    monkeypatch.setattr(panel_sum, "Panel", None)
    with pytest.raises(hk.OutOfMemoryError, match=r"frobenius_norms: the derivatives of one chunk of samples take"):
        frobenius_norms(block(), X, T)


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


MEMORY = """
import torch, hessiankit as hk
torch.manual_seed(0)
module = hk.TransformerBlock(24, 96).double()
x, target = torch.randn(2, 1, 4, 24).double()
small = hk.TransformerBlock(4, 5).double(), x[..., :4], target[..., :4]
hk.frobenius_norms(*small)
hk.hessian(*small, dry_run=True)  # what a forecast imports of torch
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 2**10
before, size = peak(), sum(p.numel() for p in module.parameters())
hk.frobenius_norms(module, x, target, panel_bytes=2**25)
print(size**2 * 8 / 2**20, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, where the peak is the process's own and not its parent's")
def test_memory_is_that_of_a_panel() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    matrix, grown = map(float, done.stdout.split())
    assert matrix > 300
    assert grown < 110  # one block of W_1 or W_2 with itself takes 41 MiB, and its derivatives


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("batch_size", [None, 1])
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


def test_what_is_refused_at_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    test_parameters_without_effect()
    module = Formula(lambda s, x: torch.sqrt(x @ s.W), W=(4, 2), b=(3,))
    with pytest.raises(hk.InputError, match=r"frobenius_norms: the block \('W', 'W'\) is NaN or infinite"):
        frobenius_norms(module, torch.zeros(3, 4).double(), draw(3, 2))


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
