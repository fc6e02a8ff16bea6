"""Blocks computed one pair at a time, parameters without effect, and which part of the matrix a name means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, largest_error, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import evaluation
from hessiankit.engine.problem import task


def block() -> nn.Module:
    return randomised(hk.TransformerBlock(d_model=4, d_ff=5, d_k=2, bias=True))


X, T = draw(2, 3, 4), draw(2, 3, 4, seed=2)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of the parameters of every matrix that is assembled."""
    seen: list[tuple[str, ...]] = []
    inner = evaluation.assemble

    def watched(task: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(task.parameters))
        return inner(task, *args, **options)

    monkeypatch.setattr(evaluation, "assemble", watched)
    return seen


def test_lazy_computes_one_pair_at_a_time_and_keeps_it(sizes: list[tuple[str, ...]]) -> None:
    module = block()
    expected = reverse_over_reverse(module, X, T, mse)
    found = hk.hessian(module, X, T, lazy=True)
    found.table()
    assert (sizes, found.fallbacks) == ([], ())
    assert found.loss == pytest.approx(float(mse(module(X), T).detach()), rel=1e-14)
    names = ("norm_1.weight", "attention.W_V")
    for i in names:
        for j in names:
            theirs = expected[found.slices[i], found.slices[j]]
            assert (found.block(i, j) - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert [set(s) for s in sizes] == [{names[0]}, set(names)]
    assert found.spectral_norm("norm_1.weight") > 0
    assert len(sizes) == 2
    assert largest_error(found, expected) <= 1e-12
    before = len(sizes)
    assert found.matrix is found.matrix
    assert sizes[before:] == [found.names]
    rows, columns = (found.slices[n] for n in names)
    assert torch.equal(found.block(*names), found.matrix[rows, columns])
    assert len(sizes) == before + 1


def test_lazy_checks_at_once_and_is_not_moved_by_training_or_modes() -> None:
    with pytest.raises(hk.InputError, match="target has shape"):
        hk.hessian(block(), X, T[:1], lazy=True)
    module = nn.Sequential(randomised(nn.Linear(4, 3)), nn.BatchNorm1d(3).double(), nn.Dropout(0.5)).eval()
    module[1].running_mean.copy_(draw(3, seed=5))
    x, t = draw(5, 4), draw(5, 3, seed=2)
    expected = reverse_over_reverse(module, x, t, mse)
    found = hk.hessian(module, x.clone(), t.clone(), lazy=True)
    module.train()
    module(x)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    assert largest_error(found, expected) <= 1e-12
    assert (found.matrix - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert module.training
    assert all(m.training for m in module.modules())


def test_part_of_a_parameter() -> None:
    module = block()
    whole = hk.hessian(module, X, T)
    W, g = whole.shapes["feedforward.W_1"], whole.shapes["norm_2.weight"]
    full = whole.block("feedforward.W_1", "norm_2.weight").reshape(*W, *g)
    expected = full[:, 1:3, -1].reshape(-1, 1)
    some = hk.hessian(module, X, T, params=["*.W_1[:, 1:3]", module.norm_2.weight])
    assert some.names == ("feedforward.W_1", "norm_2.weight")
    for found in (whole, some, hk.hessian(module, X, T, lazy=True)):
        part = found.block("feedforward.W_1[:, 1:3]", "norm_2.weight[-1]")
        assert (part - expected).abs().max() <= 1e-12 * expected.abs().max()
    part = whole.block("feedforward.W_1[:, 1:3]", "feedforward.W_1[:, 1:3]")
    assert whole.spectral_norm("feedforward.W_1[:, 1:3]") == pytest.approx(float(torch.linalg.matrix_norm(part, 2)), rel=1e-12)
    with pytest.raises(hk.InputError, match="has 5 entries, the slice reaches to 9"):
        whole.block("feedforward.W_1[:, 1:9]", "norm_2.weight")
    with pytest.raises(hk.InputError, match=r"Hessian\.block: no parameter 'W_1'"):
        whole.block("W_1", "norm_2.weight")


class Partly(nn.Module):
    """One parameter is used, one is not, one is detached, one enters linearly, one is multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("used", "idle", "detached", "straight", "gated"):
            setattr(self, name, nn.Parameter(draw(3, seed=len(name))))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(x * self.used) + 0.0 * self.gated + self.detached.detach()
        return z.square().sum() + self.straight.sum()


def test_parameters_without_effect_are_said() -> None:
    for lazy in (False, True):
        found = hk.hessian(Partly(), draw(2, 3), loss=None, lazy=lazy)
        assert found.unused == ("idle", "detached")
        assert found.block("idle", "idle").abs().max() == 0
        assert found.block("idle", "used").shape == (3, 3)
        assert found.to_dict()["unused"] == ["idle", "detached"]
        assert "no effect on the loss: 'idle', 'detached'" in found.table()
    assert hk.hessian(block(), X, T).unused == ()
    with pytest.raises(hk.InputError, match=r"none of the parameters \('idle', 'detached'\) has an effect on the loss"):
        hk.hessian(Partly(), draw(2, 3), loss=None, params=["idle", "detached"])
    report = hk.check(Partly(), draw(2, 3), loss=None)
    assert "no effect on the loss: 'idle', 'detached'" in report.table()


def test_small_parts_of_large_parameters_never_make_the_block(
    monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[str, ...]]
) -> None:
    module, x, t = randomised(hk.TransformerBlock(d_model=8, d_ff=24)), draw(3, 4, 8), draw(3, 4, 8, seed=2)
    whole = hk.hessian(module, x, t)
    W, V = (whole.shapes[n] for n in ("feedforward.W_1", "attention.W_V"))
    full = whole.block("feedforward.W_1", "attention.W_V").reshape(*W, *V)
    own = whole.block("feedforward.W_1", "feedforward.W_1").reshape(*W, *W)
    sizes.clear()
    monkeypatch.setattr(task, "available_memory", lambda device: 192 * 192 * 8)  # not even the block of W_1 and itself, twice
    pairs = [(x[:1], t[:1]), (x[1:], t[1:])]
    for found in (hk.hessian(module, x, t, lazy=True), hk.hessian(module, pairs, lazy=True)):
        for i, j, expected in (
            ("feedforward.W_1[:, 3]", "attention.W_V", full[:, 3]),
            ("feedforward.W_1", "attention.W_V[-1]", full[..., -1, :]),
            ("feedforward.W_1[2:4; 7]", "feedforward.W_1[0, 1:9:3]", own[[2, 3, 7]][..., 0, 1:9:3]),
        ):
            part = found.block(i, j)
            assert (part - expected.reshape(part.shape)).abs().max() <= 1e-12 * expected.abs().max()
            assert (found.block(j, i) - part.T).abs().max() <= 1e-12 * expected.abs().max()
        with pytest.raises(hk.OutOfMemoryError):
            found.block("feedforward.W_1", "attention.W_V")
    assert sizes == []
    assert hk.hessian(Partly(), draw(2, 3), loss=None, lazy=True).block("idle[0]", "detached[1:]").tolist() == [[0.0, 0.0]]


STRENGTH = {"of the penalty": 1.0}


def test_a_change_without_effect_on_loss_and_gradient_is_seen_later() -> None:
    """The strength of a penalty at its minimum: what is computed after it has changed is refused."""
    module, strength = nn.Linear(3, 2).double(), STRENGTH
    anchor = [p.detach().clone() for p in module.parameters()]

    def loss(z: Tensor, t: Tensor) -> Tensor:
        penalty = sum((p - a).square().sum() for p, a in zip(module.parameters(), anchor, strict=True))
        return (z - t).square().mean() + STRENGTH["of the penalty"] * penalty

    x, t = draw(4, 3), draw(4, 2)
    whole, lazy = (hk.hessian(module, x, t, loss=loss, lazy=lazy) for lazy in (False, True))
    outer = whole.outer()
    strength["of the penalty"] = 9.0
    for later in (whole.outer, whole.functional, lambda: lazy.matrix, lambda: lazy.block("weight", "bias")):
        with pytest.raises(hk.TraceError, match="something that the module or the loss reads has changed since"):
            later()
    strength["of the penalty"] = 1.0
    assert torch.equal(whole.outer(), outer)
    assert torch.equal(lazy.matrix, whole.matrix)


READINGS = {
    "matrix": lambda module, x: hk.hessian(module, x, loss=None).matrix,
    "diagonal": lambda module, x: hk.hessian_diagonal(module, x, loss=None).flat,
    "products": lambda module, x: hk.hessian_operator(module, x, loss=None).to_matrix(),
}


def test_digits_that_an_operation_has_lost_are_not_reported() -> None:
    """In single precision, behind torch's derivatives of eigenvalues and of a Cholesky factor, where entries reach 4e11."""
    numbers = torch.Generator().manual_seed(223)
    W, b, V = (torch.randn(*shape, generator=numbers, dtype=torch.float64) for shape in ((3, 4), (4,), (4, 2)))
    b = 0.3 * b
    b[223 % 4] -= 4

    def run(s: nn.Module, x: Tensor) -> Tensor:
        z = x @ s.W + s.b
        z = z * torch.linalg.eigvalsh(z.T @ z + torch.diag(torch.arange(4.0)))
        z = z @ torch.linalg.cholesky(z.T @ z + torch.eye(4))
        z = nn.functional.interpolate(z.reshape(1, 1, 6, 4), scale_factor=2, mode="bilinear")[0, 0, :6, :4] * z
        return torch.logsumexp(z @ s.V, 0).sum()

    module = Formula(run, W=(3, 4), b=(4,), V=(4, 2)).float()
    for p, values in zip((module.W, module.b, module.V), (W, b, 0.7 * V), strict=True):
        p.data.copy_(values)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(224), dtype=torch.float64).float()
    wide = hk.hessian(copy.deepcopy(module).double(), x.double(), loss=None).matrix
    for name, reading in READINGS.items():
        told = "use a wider dtype"
        try:
            found = reading(module, x)
        except hk.InputError as refused:
            told = str(refused)
        else:
            expected = wide if found.ndim == 2 else wide.diagonal()
            assert float((found - expected).abs().max()) <= 1e-5 * float(wide.abs().max()), name
        assert "use a wider dtype" in told, name


@pytest.mark.parametrize("norm", ["spectral_norm", "frobenius_norm"])
def test_norm_of_half_a_pair_is_refused(norm: str) -> None:
    found = hk.hessian(block(), X, T)
    with pytest.raises(hk.InputError, match=f"Hessian.{norm}: name_j='norm_1.weight' without name_i"):
        getattr(found, norm)(name_j="norm_1.weight")
