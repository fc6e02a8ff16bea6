"""Loss slices against copies of the module; curvature along an optimizer's next step against the step that it takes afterwards."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from curvature_reference import Formula
from operator_cases import T, X, block, classifier, tokens
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

import hessiankit as hk
from hessiankit.landscape.critical import bracket, next_step


def moved(module: nn.Module, d: torch.Tensor) -> nn.Module:
    other = copy.deepcopy(module)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()) + d, other.parameters())
    return other


def squared_error(module: nn.Module) -> float:
    with torch.no_grad():
        return float((module(X) - T).square().mean())


def vector(size: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_losses_are_those_of_a_moved_copy_and_the_module_stays() -> None:
    module = block()
    before = copy.deepcopy(module.state_dict())
    D = torch.stack([vector(88), vector(88, 6)], dim=1)
    found = hk.loss_slices(module, X, T, along=D, span=(-0.3, 0.5), points=5)
    for one, d in zip(found.slices, D.T, strict=True):
        expected = [squared_error(moved(module, t * d)) for t in one.t.tolist()]
        assert one.losses.tolist() == pytest.approx(expected, rel=1e-13)
        assert one.length == pytest.approx(float(d.norm()))
        H = hk.hessian(module, X, T)
        assert one.curvature == pytest.approx(float(d @ H.matrix @ d), rel=1e-12)
        assert one.slope == pytest.approx(float(hk.hessian_operator(module, X, T).gradient @ d), rel=1e-12)
        up, here, down = (squared_error(moved(module, t * d)) for t in (1e-4, 0.0, -1e-4))
        assert (up - 2 * here + down) / 1e-8 == pytest.approx(one.curvature, rel=1e-4)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_batches_and_labels_that_are_left_out() -> None:
    module, ids = classifier(), tokens(4, 3)
    labels = torch.tensor([[0, 2, 1], [-100, -100, 2], [-100, -100, -100], [1, -100, 0]])
    d = vector(sum(p.numel() for p in module.parameters()))
    one = hk.loss_slices(module, ids, labels, loss="cross_entropy", along=d, span=(0.0, 0.2), points=3)[0]
    pairs = zip(ids.split([1, 3]), labels.split([1, 3]), strict=True)
    two = hk.loss_slices(module, pairs, loss="cross_entropy", along=d, span=(0.0, 0.2), points=3)[0]
    assert two.losses.tolist() == pytest.approx(one.losses.tolist(), rel=1e-13)
    assert two.curvature == pytest.approx(one.curvature, rel=1e-11)


@pytest.mark.parametrize(("tolerance", "sign"), [(0.1, 1.0), (0.02, 1.0), (0.1, -1.0)])
def test_the_radius_is_that_of_a_known_function(tolerance: float, sign: float) -> None:
    """Of w^2 + w^3 at 0 the model w^2 is off by |w|^3 <= tolerance w^2 up to |w| = tolerance."""
    module = Formula(lambda m, x: m.w**2 + sign * m.w**3 + 0 * x.sum(), w=(1,))
    module.w.data.zero_()
    x = torch.ones(1, dtype=torch.float64)
    options = {"along": x, "loss": lambda out, target: out.sum(), "tolerance": tolerance}
    found = hk.loss_slices(module, x, x, **options)[0]
    assert (found.slope, found.curvature) == (0.0, 2.0)
    assert found.bounded
    assert found.radius == pytest.approx(tolerance, rel=1e-3)
    short = hk.loss_slices(module, x, x, **options, span=(-2 * tolerance, tolerance / 4))[0]
    assert not short.bounded  # the model fails at negative steps, which are longer
    assert short.radius == pytest.approx(tolerance / 4)


def test_a_model_that_comes_back_to_the_loss_at_the_centre_still_holds() -> None:
    """w^2 - 2 w is 0 again at w = 2, where the small cubic term is not."""
    module = Formula(lambda m, x: m.w**2 - 2 * m.w + 1e-3 * m.w**3 + 0 * x.sum(), w=(1,))
    module.w.data.zero_()
    x = torch.ones(1, dtype=torch.float64)
    found = hk.loss_slices(module, x, x, along=x, loss=lambda out, target: out.sum(), span=(0.0, 3.0), points=7)[0]
    assert (found.radius, found.bounded) == (3.0, False)


def test_a_quadratic_loss_is_its_own_model() -> None:
    layer = nn.Linear(3, 2).double()
    x, t = vector(12).reshape(4, 3), vector(8).reshape(4, 2)
    found = hk.loss_slices(layer, x, t, along=hk.spectrum(layer, x, t, k=2, bottom=1), span=(-5.0, 5.0))
    assert len(found) == 3
    for one in found.slices:
        assert (one.radius, one.bounded) == (5.0, False)
        assert one.quadratic.tolist() == pytest.approx(one.losses.tolist(), rel=1e-10)
    assert found[0].name.startswith("eigenvalue ")
    flat = Formula(lambda m, x: x + m.w - m.w, w=(1,))  # constant to rounding
    x = torch.full((1,), 0.1, dtype=torch.float64)
    one = hk.loss_slices(flat, x, x, along=x + 2, loss=lambda out, target: out.sum())[0]
    assert one.losses.unique().numel() > 1
    assert (one.radius, one.bounded) == (1.0, False)


def test_the_line_to_a_checkpoint_ends_there() -> None:
    module, other = block(), moved(block(), 0.1 * vector(88))
    found = hk.loss_slices(module, X, T, along=other.state_dict(), points=5)
    one = found[0]
    assert one.t.tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5]
    assert float(one.losses[3]) == pytest.approx(squared_error(other), rel=1e-12)
    assert found.notes == ()
    there = {**other.state_dict(), "norm_2.weight": module.norm_2.weight.detach()}
    part = hk.loss_slices(module, X, T, along=there, points=5, params="attention.*")
    assert "'norm_1.weight'" in part.notes[0]
    assert "'norm_2.weight'" not in part.notes[0]  # which is the same in both
    assert "not moved" in str(part)


def test_a_plane_is_the_loss_of_moved_copies_beside_its_quadratic_model() -> None:
    module, D = block(), torch.stack([vector(88), vector(88, 6)], dim=1)
    found = hk.loss_slices(module, X, T, along=D, span=(-0.2, 0.4), points=4, plane=True)
    H, g = hk.hessian(module, X, T).matrix, hk.hessian_operator(module, X, T).gradient
    for i, a in enumerate(found.plane.t.tolist()):
        for j, b in enumerate(found.plane.t.tolist()):
            step = D @ torch.tensor([a, b], dtype=torch.float64)
            assert float(found.plane.losses[i, j]) == pytest.approx(squared_error(moved(module, step)), rel=1e-12)
            model = squared_error(module) + g @ step + 0.5 * step @ H @ step
            assert float(found.plane.quadratic[i, j]) == pytest.approx(float(model), rel=1e-11)
    zero = found.plane.t.tolist().index(0.0)
    assert found.plane.losses[:, zero].tolist() == pytest.approx(found[0].losses.tolist(), rel=1e-13)
    assert found.plane.quadratic[zero].tolist() == pytest.approx(found[1].quadratic.tolist(), rel=1e-12)
    assert "2 slices of 4 steps, with their plane, through a loss of " in str(found)
    assert f"{float(found.plane.losses[1, 2]):.4g}" in str(found.plane).splitlines()[4]
    assert f"{float(found[0].quadratic[1]):.4g}" in str(found[0]).splitlines()[4]
    assert len(found.plot().axes) == 3
    assert json.loads(json.dumps(found.to_dict()))["plane"]["losses"] == found.plane.losses.tolist()


def test_filters_have_the_length_of_the_modules() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x, t = vector(12).reshape(4, 3), vector(4).reshape(4, 1)
    d, at, parts = vector(11), 0, []
    d[:3] = 0  # a filter that does not move
    one = hk.loss_slices(module, x, t, along=d, normalise="filter", span=(0.0, 1.0), points=2)[0]
    for p in module.parameters():
        rows = d[at : at + p.numel()].reshape(p.shape)
        scaled = (
            rows * p.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp(min=1e-300) if p.ndim == 2 else 0 * rows
        )
        parts.append(scaled.detach().reshape(-1))
        at += p.numel()
    assert one.length == pytest.approx(float(torch.cat(parts).norm()))
    expected = float((moved(module, torch.cat(parts))(x) - t).detach().square().mean())
    assert float(one.losses[-1]) == pytest.approx(expected, rel=1e-12)
    two = hk.loss_slices(module, x, t, along=torch.stack([d, 3 * vector(11)], dim=1), normalise="unit", points=3)
    assert [one.length for one in two.slices] == pytest.approx([1.0, 1.0])


def test_random_directions_are_drawn_with_the_filters_lengths() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x, t = vector(12).reshape(4, 3), vector(4).reshape(4, 1)
    length = sum(float(p.detach().square().sum()) for p in module.parameters() if p.ndim == 2) ** 0.5
    found, same, other = (hk.loss_slices(module, x, t, points=3, plane=True, seed=seed) for seed in (0, 0, 1))
    assert [one.length for one in found.slices] == pytest.approx([length, length])
    assert torch.equal(found.plane.losses, same.plane.losses)
    assert float((found.plane.losses - other.plane.losses).abs().max()) > 0.01
    assert [one.name for one in hk.loss_slices(module, x, t, points=3, along=3).slices][-1] == "random direction 3"


BAD = {
    "short": (
        lambda m: hk.loss_slices(m, X, T, along=vector(87)),
        r"along is torch.float64 of shape \(87,\); expected a number of random directions, a vector \(88,\)",
    ),
    "zero": (lambda m: hk.loss_slices(m, X, T, along=0 * vector(88)), "a direction is zero"),
    "NaN": (lambda m: hk.loss_slices(m, X, T, along=math.nan * vector(88)), "NaN or infinite"),
    "span": (lambda m: hk.loss_slices(m, X, T, along=vector(88), span=(0.5, 1.0)), r"span=\(0.5, 1.0\)"),
    "tolerance": (lambda m: hk.loss_slices(m, X, T, along=vector(88), tolerance=2.0), "tolerance=2.0"),
    "integers": (lambda m: hk.loss_slices(m, X, T, along=torch.ones(88).long()), "along is torch.int64"),
    "not a direction": (lambda m: hk.loss_slices(m, X, T, along=0), "along is int"),
    "points": (lambda m: hk.loss_slices(m, X, T, along=vector(88), points=1), "points=1"),
    "no such name": (lambda m: hk.loss_slices(m, X, T, along={"w": vector(1)}), "the checkpoint's 'w' is not known"),
    "missing": (lambda m: hk.loss_slices(m, X, T, along={}), "the checkpoint has no 'attention.W_Q'"),
    "no tolerance": (lambda m: hk.loss_slices(m, X, T, along=vector(88), tolerance=0.0), "tolerance=0.0"),
    "normalise": (lambda m: hk.loss_slices(m, X, T, along=vector(88), normalise="layer"), "normalise='layer' is not known"),
    "overflow": (
        lambda m: hk.loss_slices(m, X, T, along=1e300 * vector(88)),
        "the loss at t=.* is (nan|inf); pass a smaller span",
    ),
    "shape": (
        lambda m: hk.loss_slices(m, X, T, along={**m.state_dict(), "norm_1.weight": vector(1)}),
        r"'norm_1.weight' of the checkpoint is \(1,\)",
    ),
    "plane": (
        lambda m: hk.loss_slices(m, X, T, along=vector(88), plane=True),
        "plane=True needs two directions, and along has 1",
    ),
    "dropout": (lambda m: hk.loss_slices(nn.Sequential(m, nn.Dropout(0.1)), X, T, along=vector(88)), "dropout layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(hk.InputError, match=message) as seen:
        call(block())
    assert str(seen.value).startswith("loss_slices: ")
    assert "\n" not in str(seen.value)


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


def test_the_step_of_two_optimizers() -> None:
    """Muon moves the matrices and AdamW the rest: the step is that of both."""
    module, x, y = problem()
    matrices, vectors = ([p for p in module.parameters() if (p.ndim == 2) is flag] for flag in (True, False))
    pair = [torch.optim.Muon(matrices, lr=1e-2), AdamW(vectors, lr=1e-3)]
    for optimizer in pair:
        train(module, optimizer, x, y, 1)
    found, before = hk.critical_sharpness(module, x, y, optimizer=pair), flat(module)
    module.zero_grad()
    nn.functional.mse_loss(module(x), y).backward()
    for optimizer in pair:
        optimizer.step()
    assert found.length == pytest.approx(float((flat(module) - before).norm()), rel=1e-9)
    assert (found.optimizer, found.lr) == ("Muon and AdamW", 1e-2)


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


@pytest.mark.parametrize("passes", [2, 3, 30])
def test_descent_along_an_eigenvector_has_its_eigenvalue_twice(passes: int) -> None:
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 0.0)
    layer.weight.data[0, 1] = 1.0
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], **DOUBLE)  # H = diag(1, 4)
    optimizer = SGD(layer.parameters(), lr=0.3)
    found = hk.critical_sharpness(layer, x, torch.zeros(2, 1, **DOUBLE), optimizer=optimizer, passes=passes)
    assert found.curvature == pytest.approx(4.0)
    assert 2 <= found.passes <= passes
    truth = 2 / (0.3 * 4)
    assert found.multiple * (1 - 1e-12) <= truth <= found.raising * (1 + 1e-12)
    # the first step tried is where the quadratic model crosses, and the second is 1.3 times larger or smaller
    assert pytest.approx(truth) in (found.multiple, found.raising)
    if passes == 2:
        assert (found.multiple, found.raising) in ((0.0, pytest.approx(truth)), (pytest.approx(truth), math.inf))
    if passes == 30:
        assert found.interval[0] < 4.0 <= found.interval[1] * (1 + 1e-12)
        assert found.multiple == pytest.approx(truth, rel=0.01)


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


BAD_STEPS = {
    "closure": (lambda m: LBFGS(m.parameters()), {}, "the step of LBFGS needs a closure"),
    "another model's": (lambda m: SGD(nn.Linear(1, 1).parameters(), lr=0.1), {}, "the next step of SGD is zero"),
    "in two": (lambda m: [SGD(m.parameters(), lr=0.1), SGD([m[0].bias], lr=0.1)], {}, "2 optimizers hold the parameter '0.bias'"),
    "in none": (
        lambda m: [SGD([m[0].weight], lr=0.1), SGD(m[2].parameters(), lr=0.1)],
        {},
        "SGD does not hold the parameter '0.bias'",
    ),
    "passes": (lambda m: SGD(m.parameters(), lr=0.1), {"passes": 1}, "passes=1"),
    "infinite": (lambda m: SGD(m.parameters(), lr=math.inf), {}, "the next step of SGD is NaN or infinite"),
    "by": (lambda m: SGD(m.parameters(), lr=0.1), {"by": "class"}, "by='class' is not known"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_requests_of_steps(name: str) -> None:
    make, options, message = BAD_STEPS[name]
    module, x, y = problem()
    with pytest.raises(hk.InputError, match=f"^critical_sharpness: .*{message}"):
        hk.critical_sharpness(module, x, y, optimizer=make(module), **options)
