"""hessian_function: the Hessian at the current parameters, buffers, constants and data, whatever changed since it was made."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import draw, largest_error, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support.errors import InputError

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


def assert_exact(found: hk.Hessian, module: nn.Module, x: Any, t: Any, loss: Callable[..., Tensor]) -> None:
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
        assert_exact(f(inputs, target), module, x, t, cross_entropy)
    assert_exact(f(), module, x, t, cross_entropy)  # the last data


def test_a_result_does_not_move_with_what_comes_later() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    found = f()
    before, outer = found.matrix.clone(), found.outer()
    move(module)
    f(draw(5, 4, seed=9))
    assert torch.equal(found.matrix, before)
    assert torch.equal(found.outer(), outer)


def test_the_matrix_is_written_into_a_tensor() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    n = sum(p.numel() for p in module.parameters())
    out = torch.full((n, n), torch.nan, dtype=DOUBLE)
    found = f(out=out)
    assert found.matrix is out
    assert_exact(found, module, x, t, cross_entropy)
    with pytest.raises(InputError, match=r"out has shape \(2, 2\).*pass a contiguous tensor of shape"):
        f(out=torch.zeros(2, 2, dtype=DOUBLE))
    assert hk.hessian(module, x, t, loss="cross_entropy", out=out).matrix is out


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
    assert_exact(found, module, x, None, lambda z, t: z)
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


def test_other_parameters_are_those_of_the_next_result() -> None:
    module, x, t = classifier()
    module[0].requires_grad_(False)
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    assert "0.weight" not in f().names
    module[0].requires_grad_(True)
    found = f()
    assert "0.weight" in found.names
    assert_exact(found, module, x, t, cross_entropy)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_is_of_a_copy_of_the_module(copied: Callable[[Any], Any]) -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy", params=iter(["0.weight", "4.*"]))  # names that are read once
    g, expected = copied(f), f().matrix
    move(module)
    assert torch.equal(g().matrix, expected)
    assert_exact(f(), module, x, t, cross_entropy)


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


def test_it_prints_its_parameters() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    assert "Hessian function of 75 parameters" in repr(f)
    assert "0.weight" in str(f)


def test_refused_data_are_not_the_last_ones() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    expected = f().matrix
    for wrong in (x.float(), x[:, :3], x * torch.nan):
        with pytest.raises(InputError):
            f(wrong)
        assert torch.equal(f().matrix, expected)
