"""Curvature along an optimizer's next step: against the step that it takes afterwards, and losses that are quadratic or not."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

import hessiankit as hk
from hessiankit.landscape import critical_sharpness as called
from hessiankit.landscape.critical import bracket, next_step

DOUBLE = {"dtype": torch.float64}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    draw = torch.Generator().manual_seed(1)
    return module, torch.randn(5, 3, generator=draw, **DOUBLE), torch.randn(5, 2, generator=draw, **DOUBLE)


def train(module: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (module(x) - y).square().mean().backward()
        optimizer.step()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


class Signs(Optimizer):
    """An optimizer of a user's own, with numbers beside its state and without a rate."""

    def __init__(self, params) -> None:
        super().__init__(params, {"size": 0.01})
        self.calls = [0]

    def step(self, closure=None):
        self.calls[0] += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(0.01 * self.calls[0] * p.grad.sign())


OPTIMIZERS = {
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda m: AdamW([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 1e-2}], lr=1e-3),
    "fused": lambda m: Adam(m.parameters(), lr=1e-2, fused=True),
    "Muon": lambda m: Muon([m[0].weight, m[2].weight], lr=1e-2),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=1e-3),
    "Adagrad": lambda m: Adagrad(m.parameters(), lr=1e-2),
    "one's own": lambda m: Signs(m.parameters()),
    "blockwise": lambda m: AdamW(hk.blockwise_lr(m, 1e-3, {"FFN": 2.0}, overrides={"0.*": "FFN", "2.*": "VO"})),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_the_one_that_the_optimizer_takes_and_nothing_moves_before(name: str) -> None:
    module, x, y = problem()
    optimizer = OPTIMIZERS[name](module)
    if name == "momentum":
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # puts a step of its own in place
    train(module, optimizer, x, y, 3)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    before, state = flat(module), copy.deepcopy(optimizer.state_dict())
    calls = list(getattr(optimizer, "calls", []))
    gradients = [p.grad for p in module.parameters()]
    step = next_step("test", optimizer, dict(module.named_parameters()), hk.hessian_operator(module, x, y).gradient)
    found = hk.critical_sharpness(module, x, y, optimizer=optimizer)
    assert torch.equal(flat(module), before)
    assert all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
    now = optimizer.state_dict()
    assert torch.utils._pytree.tree_all(lambda a: a, torch.utils._pytree.tree_map(same, state, now))
    assert (seen, calls) == ([], list(getattr(optimizer, "calls", [])))
    train(module, optimizer, x, y, 1)
    taken = flat(module) - before
    assert torch.allclose(step, taken, rtol=1e-9, atol=1e-15)
    assert found.length == pytest.approx(float(taken.norm()), rel=1e-9)


def same(a: object, b: object) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) else a == b


def test_numbers_along_the_step_and_types_moved_alone() -> None:
    torch.manual_seed(0)
    model = hk.Transformer(5, 4, 4, 1, n_heads=2, placement="pre", max_len=4).double()
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randint(5, (4, 4), generator=draw) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    found = hk.critical_sharpness(model, x, y, loss="cross_entropy", optimizer=optimizer, by="type", passes=40)
    H = hk.hessian(model, x, y, loss="cross_entropy")
    g = hk.hessian_operator(model, x, y, loss="cross_entropy").gradient
    d = next_step("test", optimizer, dict(model.named_parameters()), g)
    types = hk.block_types(model)
    entries = {"whole": torch.arange(len(d))}
    for part in types.parts:
        rows = torch.arange(len(d))[H.slices[part.parameter]]
        entries[part.type] = torch.cat([entries.get(part.type, rows[:0]), rows])
    assert found.groups.keys() == types.entries.keys()

    def loss(moved: Tensor) -> float:
        parts = moved.split([p.numel() for p in model.parameters()])
        at = {name: p + part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}
        with torch.no_grad():
            return float(nn.functional.cross_entropy(torch.func.functional_call(model, at, (x,)).flatten(0, 1), y.flatten()))

    flat_types = {name for name, one in found.groups.items() if math.isinf(one.raising)}
    assert len(flat_types) <= 1  # what a norm follows cannot raise the loss for ever
    for name, one in {"whole": found, **found.groups}.items():
        alone = torch.zeros_like(d)
        alone[entries[name]] = d[entries[name]]
        assert one.curvature == pytest.approx(float(alone @ H.matrix @ alone / alone.square().sum()), rel=1e-8)
        assert one.slope == pytest.approx(float(g @ alone), rel=1e-10)
        assert loss(one.multiple * alone) <= found.loss
        if name not in flat_types:
            assert one.multiple < one.raising <= 1.01 * one.multiple
            assert loss(one.raising * alone) > found.loss
        assert one.interval == (2 / (1e-2 * one.raising), 2 / (1e-2 * one.multiple))
    assert found.loss == pytest.approx(loss(torch.zeros_like(d)), rel=1e-12)
    text = str(found)
    assert "next step of AdamW, lr 0.01" in text
    assert "critical sharpness" in text
    assert found.to_dict()["groups"]["FFN"]["sharpness"] == found.groups["FFN"].sharpness


def test_descent_along_an_eigenvector_has_its_eigenvalue_twice() -> None:
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 0.0)
    layer.weight.data[0, 1] = 1.0
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], **DOUBLE)  # H = diag(1, 4)
    optimizer = SGD(layer.parameters(), lr=0.3)
    found = hk.critical_sharpness(layer, x, torch.zeros(2, 1, **DOUBLE), optimizer=optimizer, passes=30)
    assert found.curvature == pytest.approx(4.0)
    assert found.interval[0] < 4.0 <= found.interval[1] * (1 + 1e-12)
    assert found.multiple == pytest.approx(2 / (0.3 * 4), rel=0.01)


def test_a_step_uphill_has_no_multiple_and_a_loss_that_only_falls_has_no_end() -> None:
    module, x, y = problem()
    optimizer = SGD(module.parameters(), lr=0.1, maximize=True)
    found = hk.critical_sharpness(module, x, y, optimizer=optimizer, by={"first": "0.*"})
    assert (found.multiple, found.sharpness, found.passes) == (0.0, math.inf, 1)
    assert found.slope > 0
    line, one = nn.Linear(1, 1, bias=False, dtype=torch.float64), torch.ones(1, 1, **DOUBLE)
    descent = SGD(line.parameters(), lr=0.5)
    found = hk.critical_sharpness(line, one, one, loss=lambda z, _: z.exp().sum(), optimizer=descent)
    assert (found.raising, found.passes) == (math.inf, 10)
    assert "the largest tried" in str(found)


@pytest.mark.parametrize("truth", [1e-4, 0.3, 1.0, 7.0, 900.0])
def test_the_search_keeps_to_its_tests(truth: float) -> None:
    tested = []

    def holds(t: float) -> bool:
        tested.append(t)
        return t <= truth

    low, high, taken = bracket(holds, 1.0, 9)
    assert len(tested) == taken <= 9
    assert low <= truth < high
    low, high, taken = bracket(holds, 1.0, 60)
    assert low <= truth < high <= 1.01 * low
    assert bracket(lambda t: True, 1.0, 5) == (1.3 * 8, math.inf, 5)
    assert bracket(lambda t: False, 1.0, 5) == (0.0, 1 / (1.3 * 8), 5)


BAD = {
    "closure": (lambda m: LBFGS(m.parameters()), {}, "the step of LBFGS needs a closure"),
    "another model's": (lambda m: SGD(nn.Linear(1, 1).parameters(), lr=0.1), {}, "the next step of SGD is zero"),
    "passes": (lambda m: SGD(m.parameters(), lr=0.1), {"passes": 1}, "passes=1"),
    "infinite": (lambda m: SGD(m.parameters(), lr=math.inf), {}, "the next step of SGD is NaN or infinite"),
    "by": (lambda m: SGD(m.parameters(), lr=0.1), {"by": "head"}, "by='head' is not known"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    make, options, message = BAD[name]
    module, x, y = problem()
    with pytest.raises(hk.InputError, match=f"^critical_sharpness: .*{message}"):
        called(module, x, y, optimizer=make(module), **options)
