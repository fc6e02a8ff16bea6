"""check() on the user's own module: whatever reaches a parameter is seen, and everything is put back bit for bit."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_cases import RIGHT, draw, relative
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.curvature.operator import HessianOperator
from hessiankit.verify import REFERENCES, Problem, Unsupported, run_references
from hessiankit.verify.health import examine
from hessiankit.verify.in_place import converted

X, T = draw(5, 3), draw(5, 3) + 0.5


class Reached(nn.Module):
    """tanh(x W^T) W, where the second factor is read by a closure, or whatever ``head`` makes of the module."""

    def __init__(self, head: Callable[[Any], Callable[[Tensor], Tensor]] = lambda m: lambda h: h @ m.l.weight) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(3, 3, bias=False)
        self.head = head(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.l(x)))


def listed(module: Any) -> Callable[[Tensor], Tensor]:
    module.extra = [module.l.weight]
    return lambda h: h @ module.extra[0]


def hooked(module: Any) -> nn.Module:
    weight, head = module.l.weight, nn.Identity()
    head.register_forward_hook(lambda module, args, output: output @ weight)
    return head


REACHED = {
    "closure": Reached,
    "list": lambda: Reached(listed),
    "hook": lambda: Reached(hooked),
}


def truth(loss: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the Hessian (9, 9) of an explicit function of the weight, of which no module is part."""
    return torch.autograd.functional.hessian(lambda w: loss(w.reshape(3, 3)), weight.detach().double().reshape(-1))


def explicit(W: Tensor) -> Tensor:
    return (torch.tanh(X @ W.T) @ W - T).square().mean()


def with_penalty(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, t: (z - t).square().mean() + 0.3 * sum(p.pow(2).sum() for p in module.parameters())


def penalised(W: Tensor) -> Tensor:
    return explicit(W) + 0.3 * W.square().sum()


@pytest.mark.parametrize(("kind", "penalty"), [*((kind, False) for kind in REACHED), ("closure", True)])
def test_a_parameter_is_seen_however_it_is_reached(kind: str, penalty: bool) -> None:
    """By the references, and check passes just where the closed form is right."""
    module = REACHED[kind]()
    loss, H = (with_penalty(module), truth(penalised, module.l.weight)) if penalty else ("mse", truth(explicit, module.l.weight))
    with converted([module], torch.float64):
        for name, outcome in run_references(Problem(module, X, T, loss), names=RIGHT).items():
            assert relative(outcome.value, H) < 1e-10, name
    report = hk.check(module, X, T, loss=loss)
    assert bool(report) == (report.hessian.matrix.shape == (9, 9) and relative(report.hessian.matrix, H) < 1e-10), report


def test_a_penalty_that_the_closed_form_misses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is given the loss without its penalty: every kind of row notices."""
    module = nn.Linear(3, 3, bias=False).double()
    complete = with_penalty(module)

    class Penalty:
        missing = False  # a variable of the closure would be put back by every call

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().mean() if Penalty.missing else complete(outputs, target)

    same, checking, noise = (sys.modules[f"hessiankit.verify.{name}"] for name in ("same_call", "check", "comparison"))
    for where, name in ((checking, "hessian_of"), (noise, "hessian_of"), (HessianOperator, "of"), (same, "diagonal_of")):
        right = getattr(where, name)

        def without(*args: Any, right: Any = right, **options: Any) -> Any:
            Penalty.missing = True
            try:
                return right(*args, **options)
            finally:
                Penalty.missing = False

        monkeypatch.setattr(where, name, without)
    report = hk.check(module, X, T, loss=loss)
    assert not report
    failed = {row.name.partition(":")[0] for row in report.rows if not row.passed}
    assert failed == {"weight x weight", "loss", "gradient", "operator", "diagonal"}


@pytest.mark.parametrize("name", ["torch.func.hessian", "curvlinops"])
def test_references_that_exchange_parameters_say_that_they_cannot_see_one(name: str) -> None:
    result = run_references(Problem(Reached(listed).double(), X, T), names=[name])[name]
    assert isinstance(result, Unsupported)
    assert "a parameter is reached past the module's attributes: a list, a closure, a hook, the loss" in result.reason


def test_forward_mode_exchanges_parameters_only_where_dual_numbers_do_not_pass_and_it_sees_them_all() -> None:
    """Torch has no forward mode of silu's backward outside torch.func."""
    plain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.SiLU(), nn.Linear(3, 3)).double()
    outcome = REFERENCES["jvp(grad)"].measure(Problem(plain, X, T))
    assert outcome.note.startswith("by torch.func, as dual numbers do not pass")
    assert relative(outcome.value, REFERENCES["reverse-over-reverse"].measure(Problem(plain, X, T)).value) < 1e-12

    class Silu(Reached):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.silu(self.l(x)))

    with pytest.raises(Unsupported, match=r"dual numbers do not pass .* a parameter is reached past the module's attributes"):
        REFERENCES["jvp(grad)"].measure(Problem(Silu(listed).double(), X, T))


@pytest.mark.parametrize("name", RIGHT)
def test_a_frozen_part_and_a_buffer_take_part(name: str) -> None:
    class Mixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x)) * self.scale

    module = Mixed().double()
    module.bias.requires_grad_(False)
    outcome = REFERENCES[name].measure(Problem(module, X, T))
    H = truth(lambda W: (torch.tanh(X @ W.T + module.bias) * module.scale - T).square().mean(), module.weight)
    assert relative(outcome.value, H) < 1e-10
    assert not module.bias.requires_grad


# Put back ----------------------------------------------------------------------------------------------------------------------


def everything(module: nn.Module) -> list[Any]:
    """Return the state that a user could compare: where tensors lie, their bits, gradients, modes, hooks, random numbers."""
    tensors = [*module.parameters(), *module.buffers(), *module.plain]
    return [
        [
            (id(x), x.data_ptr(), x.dtype, x._version, x.requires_grad, x.detach().clone().view(torch.uint8).tolist())
            for x in tensors
        ],
        [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in module.parameters()],
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()],
        [torch.get_rng_state().tolist(), random.getstate()],
    ]


def test_the_module_is_untouched() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), nn.Dropout(0.5))
    module.eval()
    module[2].train()
    module.register_buffer("counted", torch.ones(2))
    module.plain = [torch.ones(3), module[0].weight]
    module[0].weight.grad = torch.full((4, 3), 7.0)
    module[1].register_forward_hook(lambda *args: None)
    x, t = X.float(), T.float()
    later = F.mse_loss(module(x), t)  # its graph has to survive
    before = everything(module)
    report = hk.check(module, x, t, dtype=torch.float64, against=RIGHT)
    assert report, report
    assert everything(module) == before
    with pytest.raises(hk.InputError):
        hk.check(module, x, t[:, :2])
    assert everything(module) == before
    later.backward()
    assert bool(torch.isfinite(module[1].weight.grad).all())


def test_what_a_call_leaves_behind_does_not_stay() -> None:
    """A cache made in the dtype of the check would break the next call of the user."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.scale, self.seen = nn.Linear(3, 3), None, []

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.arange(1.0, 4.0, dtype=x.dtype)
            self.seen.append(x.dtype)
            return torch.tanh(self.l(x)) * self.scale

    module = Caching()
    with contextlib.suppress(hk.InputError):  # a forward that changes its own state may be refused
        assert hk.check(module, X, T)
    assert module.scale is None
    assert module.seen == []
    assert module(X.float()).dtype == torch.float32


def test_tensors_among_the_attributes_and_a_loss_of_torch_are_converted() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.scales = nn.Linear(3, 4), {"a": torch.tensor([0.1, 0.2, 0.3, 0.4])}

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.l(x)) * self.scales["a"]

    torch.manual_seed(0)
    module, loss = Scaled(), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.5, 1.0, 2.0]))
    report = hk.check(module, X, torch.tensor([0, 1, 2, 3, 1]), loss=loss)
    assert report, report
    assert report.rtol == 1e-10
    assert module.scales["a"].dtype == loss.weight.dtype == torch.float32


# What cannot be compared, in true words ------------------------------------------------------------------------------------------


class Detached(Reached):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.l(x))
        return y * y.detach().square()


class WithoutGradients(Reached):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.l(x).square()
        return self.l(x) * scale


class Targets(Reached):
    """A target network, moved in place under no_grad, and a number that is read out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.l(x))
        average = self.average.clone()
        with torch.no_grad():
            average.mul_(0.5).add_(y.mean(0))
        return y * average * y.square().sum().item()


@pytest.mark.parametrize("kind", [Detached, WithoutGradients, Targets])
def test_what_torch_holds_constant_is_held_by_every_reference(kind: type[nn.Module]) -> None:
    report = hk.check(kind(), X, T)
    assert report, report
    assert {h.reference for h in report.health if h.healthy} == set(RIGHT)
    assert all(row.passed for row in report.rows if row.name == "slope")


# Blocks below the rounding of the whole -----------------------------------------------------------------------------------------------


class TwoScales(nn.Module):
    """A large and a tiny term: the curvature of b is 1e-17 of that of a, and known to 1e-15 of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(draw(3)), nn.Parameter(draw(3) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).square().sum() + 1e-17 * (self.b**4).sum()


def test_a_tiny_block_that_is_wholly_wrong_is_no_rounding() -> None:
    problem = Problem(TwoScales().double(), X, loss=None)
    H = REFERENCES["reverse-over-reverse"].measure(problem).value
    wrong = H.clone()
    wrong[3:, 3:] *= 1.5
    found = examine({"reverse-over-reverse": H, "jvp(grad)": H.clone(), "right": H.clone(), "mine": wrong}, problem)
    assert found["right"].healthy
    assert not found["mine"].healthy
    assert found["mine"].worst_pair == ("b", "b")
    assert hk.check(TwoScales().double(), X, loss=None)
