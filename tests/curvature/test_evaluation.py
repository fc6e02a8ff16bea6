"""Blocks computed one pair at a time, parameters without effect, what a name means; and ``hessian_function``, which is never stale."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, draw, largest_error, mse, randomised, reverse_over_reverse
from readings import READINGS
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import evaluation
from hessiankit.support import memory
from hessiankit.support.errors import InputError


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
    assert "no effect on the loss: 'idle', 'detached'" in hk.check(Partly(), draw(2, 3), loss=None).table()


def test_small_parts_of_large_parameters_never_make_the_block(
    monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[str, ...]]
) -> None:
    module, x, t = randomised(hk.TransformerBlock(d_model=8, d_ff=24)), draw(3, 4, 8), draw(3, 4, 8, seed=2)
    whole = hk.hessian(module, x, t)
    W, V = (whole.shapes[n] for n in ("feedforward.W_1", "attention.W_V"))
    full = whole.block("feedforward.W_1", "attention.W_V").reshape(*W, *V)
    own = whole.block("feedforward.W_1", "feedforward.W_1").reshape(*W, *W)
    sizes.clear()
    monkeypatch.setattr(memory, "available_memory", lambda device: 192 * 192 * 8)  # not even the block of W_1 and itself, twice
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
    module, x, t = nn.Linear(3, 2).double(), draw(4, 3), draw(4, 2)
    anchor = [p.detach().clone() for p in module.parameters()]

    def loss(z: Tensor, t: Tensor) -> Tensor:
        penalty = sum((p - a).square().sum() for p, a in zip(module.parameters(), anchor, strict=True))
        return (z - t).square().mean() + STRENGTH["of the penalty"] * penalty

    whole, lazy = (hk.hessian(module, x, t, loss=loss, lazy=lazy) for lazy in (False, True))
    outer = whole.outer()
    STRENGTH["of the penalty"] = 9.0
    for later in (whole.outer, whole.functional, lambda: lazy.matrix, lambda: lazy.block("weight", "bias")):
        with pytest.raises(hk.TraceError, match="something that the module or the loss reads has changed since"):
            later()
    STRENGTH["of the penalty"] = 1.0
    assert torch.equal(whole.outer(), outer)
    assert torch.equal(lazy.matrix, whole.matrix)


DOMAINS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of a factorisation": lambda s, x: torch.linalg.cholesky(-(s.W + s.W.mT) / 2).diagonal().log() * x,
    "of a loss that checks": lambda s, x: nn.functional.gaussian_nll_loss(x, x.sin(), -s.W.diagonal()),
}
"""Functions of -W that raise at generic parameters near -diag(1, 1e-4), and not there."""


@pytest.mark.first_order
@pytest.mark.parametrize("name", DOMAINS)
def test_a_point_at_the_edge_of_the_domain(name: str) -> None:
    module, x = Formula(lambda s, x: DOMAINS[name](s, x).square().sum(), W=(2, 2)), draw(2)
    module.W.data.copy_(-torch.diag(torch.tensor([1.0, 1e-4])))
    expected = reverse_over_reverse(module, x, None, lambda z, _: z)
    found = hk.hessian(module, x, loss=None)
    assert largest_error(found, expected) < 1e-10


def test_digits_that_an_operation_has_lost_are_not_reported() -> None:
    """In single precision, behind torch's derivatives of eigenvalues and of a Cholesky factor, where entries reach 4e11."""

    def run(s: nn.Module, x: Tensor) -> Tensor:
        z = x @ s.W + s.b
        z = z * torch.linalg.eigvalsh(z.T @ z + torch.diag(torch.arange(4.0)))
        z = z @ torch.linalg.cholesky(z.T @ z + torch.eye(4))
        z = nn.functional.interpolate(z.reshape(1, 1, 6, 4), scale_factor=2, mode="bilinear")[0, 0, :6, :4] * z
        return torch.logsumexp(z @ s.V, 0).sum()

    numbers = torch.Generator().manual_seed(223)
    W, b, V = (torch.randn(*shape, generator=numbers, dtype=torch.float64) for shape in ((3, 4), (4,), (4, 2)))
    module = Formula(run, W=(3, 4), b=(4,), V=(4, 2)).float()
    for p, values in zip((module.W, module.b, module.V), (W, 0.3 * b - 4 * torch.eye(4)[3], 0.7 * V), strict=True):
        p.data.copy_(values)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(224), dtype=torch.float64).float()
    wide = hk.hessian(copy.deepcopy(module).double(), x.double(), loss=None).matrix
    for name, reading in READINGS.items():
        told = "use a wider dtype"
        try:
            found = reading.call(module, x, loss=None)[1]
        except hk.InputError as refused:
            told = str(refused)
        else:
            expected = reading.of(wide, [12, 4, 8])
            assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), name
        assert "use a wider dtype" in told, name


DOUBLE = torch.float64


def classifier() -> tuple[nn.Module, Tensor, Tensor]:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)).double().eval()
    return randomised(module), draw(5, 4), torch.tensor([0, 2, 1, -100, 2])


def cross_entropy(z: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), t.reshape(-1))


def move(module: nn.Module, seed: int = 3) -> None:
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.add_(0.3 * draw(*p.shape, seed=seed + k))


def assert_current(found: hk.Hessian, module: nn.Module, x: Any, t: Any, loss: Callable[..., Tensor]) -> None:
    assert largest_error(found, reverse_over_reverse(module, x, t, loss, found.names)) <= 1e-11


def test_it_is_the_hessian_at_other_parameters_and_data() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    for inputs, target in (
        (None, None),
        (draw(5, 4, seed=9), None),
        (None, t.flip(0)),
        (draw(7, 4, seed=8), torch.arange(7) % 3),
    ):
        x, t = (x if inputs is None else inputs), (t if target is None else target)
        move(module)
        assert_current(f(inputs, target), module, x, t, cross_entropy)
    assert_current(f(), module, x, t, cross_entropy)  # the last data


def test_a_result_does_not_move_with_what_comes_later() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    found = f()
    before, outer = found.matrix.clone(), found.outer()
    move(module)
    f(draw(5, 4, seed=9))
    assert torch.equal(found.matrix, before)
    assert torch.equal(found.outer(), outer)


# What changes between calls: every kind of state that forward or the loss can read


class Anchored(nn.Module):
    """A power of x w, and penalties whose strength is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0, 1.0], dtype=DOUBLE))
        self.anchor, self.strength, self.held = 0.0, 0.0, [torch.tensor(0.0, dtype=DOUBLE)]
        self.register_buffer("scale", torch.tensor(1.0, dtype=DOUBLE))
        self.settings = SimpleNamespace(power=3, extra={"weight": 0.0}, array=np.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        s = self.settings
        penalty = self.strength * (self.w - self.anchor).square().sum() + s.extra["weight"] * self.w.prod() ** 2
        penalty = penalty + self.held[0] * self.w.square().sum() + (torch.from_numpy(s.array) * self.w**2).sum()
        return ((self.scale * (x @ self.w)) ** s.power).sum() + penalty


CHANGES: dict[str, Callable[[Anchored], Any]] = {
    "a number": lambda m: setattr(m, "strength", 9.0),
    "a number that moves a point": lambda m: (setattr(m, "strength", 2.0), setattr(m, "anchor", 0.5)),
    "an entry of a dict": lambda m: m.settings.extra.update(weight=3.0),
    "an exponent": lambda m: setattr(m.settings, "power", 4),
    "a tensor in a list": lambda m: m.held.__setitem__(0, torch.tensor(2.0, dtype=DOUBLE)),
    "a tensor in a list, in place": lambda m: m.held[0].fill_(2.0),
    "an array, in place": lambda m: m.settings.array.fill(5.0),
    "a buffer": lambda m: m.scale.fill_(3.0),
    "a parameter that is replaced": lambda m: setattr(m, "w", nn.Parameter(torch.tensor([2.0, -1.0], dtype=DOUBLE))),
    "forward": lambda m: setattr(m, "forward", lambda x: type(m).forward(m, x) + m.w.pow(4).sum()),
    "a hook": lambda m: m.register_forward_hook(lambda m, x, y: y * 2 + m.w.pow(3).sum()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls_is_seen(name: str) -> None:
    module, x = Anchored(), draw(3, 2)
    f = hk.hessian_function(module, x, loss=None)
    before = f().matrix
    CHANGES[name](module)
    found = f()
    assert_current(found, module, x, None, lambda z, t: z)
    assert not torch.allclose(found.matrix, before, rtol=1e-3)


def test_a_penalty_without_effect_on_value_and_gradient_is_seen() -> None:
    """Elastic weight consolidation at its anchor: the loss and the gradient do not depend on the strength, the Hessian does."""
    layer, strength = nn.Linear(3, 2).double(), {"of the penalty": 0.0}
    x, t = draw(4, 3), draw(4, 2)
    anchor = [p.detach().clone() for p in layer.parameters()]

    def loss(z: Tensor, t: Tensor) -> Tensor:
        penalty = sum((p - a).square().sum() for p, a in zip(layer.parameters(), anchor, strict=True))
        return (z - t).square().mean() + strength["of the penalty"] * penalty

    f = hk.hessian_function(layer, x, t, loss=loss)
    before = f().matrix.diagonal()
    strength["of the penalty"] = 9.0
    assert torch.allclose(f().matrix.diagonal() - before, torch.full((8,), 18.0, dtype=DOUBLE))


def test_the_matrix_is_written_into_a_tensor() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    n = sum(p.numel() for p in module.parameters())
    out = torch.full((n, n), torch.nan, dtype=DOUBLE)
    found = f(out=out)
    assert found.matrix is out
    assert_current(found, module, x, t, cross_entropy)
    with pytest.raises(InputError, match=r"out has shape \(2, 2\).*pass a contiguous tensor of shape"):
        f(out=torch.zeros(2, 2, dtype=DOUBLE))
    assert hk.hessian(module, x, t, loss="cross_entropy", out=out).matrix is out


def test_what_is_replaced_between_calls_is_seen() -> None:
    module, x, t = classifier()
    module[0].requires_grad_(False)
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    assert "0.weight" not in f().names
    assert "Hessian function of 45 parameters" in repr(f)
    module[0].requires_grad_(True)
    module[4].weight = nn.Parameter(2 * module[4].weight.detach())
    module.register_forward_hook(lambda m, x, y: y * 2 + module[0].bias.square().sum())
    found = f()
    assert "0.weight" in found.names
    assert_current(found, module, x, t, cross_entropy)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_is_of_a_copy_of_the_module(copied: Callable[[Any], Any]) -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy", params=iter(["0.weight", "4.*"]))  # names that are read once
    g, expected = copied(f), f().matrix
    move(module)
    assert torch.equal(g().matrix, expected)
    assert_current(f(), module, x, t, cross_entropy)


def test_errors_are_those_of_hessian() -> None:
    module, x, t = classifier()
    with pytest.raises(InputError, match="several batches; pass one"):
        hk.hessian_function(module, [(x, t), (x, t)], loss="cross_entropy")
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    with pytest.raises(InputError, match=r"hessian_function: labels lie in \[0, 7\], expected 0 to 2"):
        f(target=t.where(t != 2, 7))
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"hessian_function: '0.weight' contains NaN"):
        f()
