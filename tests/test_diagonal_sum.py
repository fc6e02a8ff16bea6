"""The diagonal of a sum of losses: each parameter's own way, chunks of samples, and what happens where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine import diagonal_accumulation, diagonal_sum
from hessiankit.engine.diagonal_accumulation import TooLarge
from hessiankit.engine.diagonal_sum import DiagonalSum, _bytes, _each_once, _parts, _splits
from hessiankit.engine.jacobians import GainJacobian, IdentityJacobian
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import loss_trace, normalizer_of
from hessiankit.engine.problem.own_call import make_task
from hessiankit.engine.problem.task import Task
from hessiankit.support.errors import InputError

X, T = draw(5, 3, 4), draw(5, 3, 4, seed=7)
STEPS: list[tuple[int, int]] = []  # what the last total() said of its progress


def block() -> nn.Module:
    """Behind a layer, so that tokens that parameters move meet in the attention."""
    return randomised(nn.Sequential(nn.Linear(4, 4), hk.TransformerBlock(4, 5, d_k=2, bias=True)))


def tasks_of(module: nn.Module, *batches: tuple[Tensor, Tensor], loss: Any = "mse", params: Any = None) -> list[Task]:
    return [make_task("test", module, x, target, loss, params) for x, target in batches]


def total(
    tasks: Sequence[Task], parts: Sequence[float] = (1.0,), *, batch_size: int | None = None, gauss_newton: bool = False
) -> DiagonalSum:
    STEPS.clear()
    found = DiagonalSum("test", tasks, parts, batch_size, lambda done, of: STEPS.append((done, of)))
    found.run(gauss_newton=gauss_newton)
    return found


def assert_entries(found: DiagonalSum, expected: Tensor) -> None:
    """Compare with a diagonal, each parameter by its own largest entry."""
    assert set(found.entries.slices) == set(found.tasks[0].parameters)
    for name, rows in found.entries.slices.items():
        theirs = expected[rows]
        assert (found.entries.data[rows] - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name


@pytest.mark.parametrize("batch_size", [None, 1, 2, 9])
def test_shares_of_batches_of_unequal_sizes(batch_size: int | None) -> None:
    module, parts = block(), (0.25, 3.0)
    batches = [(X, T), (X[:2, :2], T[:2, :2])]
    found = total(tasks_of(module, *batches), parts, batch_size=batch_size)
    expected = [reverse_over_reverse(module, x, t, mse).diagonal() for x, t in batches]
    assert_entries(found, parts[0] * expected[0] + parts[1] * expected[1])
    values = [float(mse(module(x), t).detach()) for x, t in batches]
    assert found.loss == pytest.approx(parts[0] * values[0] + parts[1] * values[1], rel=1e-13)
    assert STEPS[-1] == (7, 7)
    assert [done for done, _ in STEPS] == sorted({done for done, _ in STEPS})
    assert found.fallbacks == []


def test_gauss_newton_part() -> None:
    module = block()
    found = total(tasks_of(module, (X, T)), gauss_newton=True)

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (X,)).reshape(-1)

    names = [name for name, _ in module.named_parameters()]
    J = torch.autograd.functional.jacobian(output, tuple(p.detach() for p in module.parameters()))
    assert_entries(found, 2 / X.numel() * torch.cat([part.flatten(1) for part in J], 1).square().sum(0))


def test_a_batch_that_nothing_chosen_has_an_effect_on() -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.A) if len(x) == 3 else torch.tanh(x @ s.B), A=(4, 2), B=(4, 2))
    batches = [(X[:3], T[:3, :, :2]), (X[3:], T[3:, :, :2])]
    found = total(tasks_of(module, *batches, params="A"), (2.0, 0.5))
    assert_entries(found, 2 * reverse_over_reverse(module, *batches[0], mse, ["A"]).diagonal())
    values = [float(mse(module(x), t).detach()) for x, t in batches]
    assert found.loss == pytest.approx(2 * values[0] + values[1] / 2, rel=1e-13)


def test_no_batch_depends_on_what_is_chosen() -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 2), u=(3,), v=(2,))
    with pytest.raises(InputError, match=r"test: none of the parameters \('u', 'v'\) has an effect on the loss"):
        total(tasks_of(module, (X, T[..., :2]), params=["u", "v"]))


def test_what_torch_cannot_trace_is_not_taken_for_no_effect() -> None:
    module = Formula(lambda s, x: (x @ s.W).unique(), W=(4, 2))
    with pytest.raises(InputError, match="_unique2"):
        total(tasks_of(module, (X, torch.zeros(())), loss=lambda z, t: z.square().sum()))


# Each parameter by its own way


def left_over(module: nn.Module, found: dict[str, Tensor] | None = None, **options: Any) -> dict[str, Tensor]:
    """Return what is left after the rows that are apart, and check that all else has been added."""
    task = tasks_of(module, (X, T), **options)[0]
    into = DiagonalSum("test", [task], [1.0], None, None)
    with torch.no_grad():
        left = into._rows_apart(loss_trace(task, normalizer_of(task)), 1.0, found, Handshake(task), gauss_newton=False)
    expected = reverse_over_reverse(module, X, T, mse, list(task.parameters)).diagonal()
    for name, rows in into.entries.slices.items():
        theirs = torch.zeros_like(expected[rows]) if name in left else expected[rows]
        assert (into.entries.data[rows] - theirs).abs().max() <= 1e-12 * expected[rows].abs().max(), name
    return left


def test_rows_that_stay_apart_are_taken_one_by_one() -> None:
    left = left_over(block())
    assert set(left) == {"0.weight", "0.bias", "1.attention.W_K", "1.attention.W_V"}  # by which a token reaches others


def test_what_an_earlier_part_has_left_is_left_again() -> None:
    module = block()
    before = dict(module.named_parameters())["1.feedforward.W_1"].detach()
    assert "1.feedforward.W_1" in left_over(module, {"1.feedforward.W_1": before})


def test_a_weight_used_twice_is_left() -> None:
    module = Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.W) @ s.W + s.b), W=(4, 4), b=(4,))
    assert set(left_over(module)) == {"W"}


def test_everything_is_left_where_a_sweep_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal_accumulation, "WHOLE", 0)
    module = Formula(lambda s, x: torch.tanh(x @ torch.tanh(s.A) @ s.B), A=(4, 5), B=(5, 4))
    assert set(left_over(module)) == {"A", "B"}


@pytest.mark.parametrize("gauss_newton", [False, True])
def test_sweep_and_products_agree(monkeypatch: pytest.MonkeyPatch, gauss_newton: bool) -> None:
    """Two ways that share neither the forward nor the backward part."""
    tasks = tasks_of(block(), (X, T))
    ways = []
    for way in ("_sweep", "_products"):
        into = DiagonalSum("test", tasks, [2.0], None, None)
        with torch.no_grad():
            args = (tasks[0], 2.0, normalizer_of(tasks[0])) if way == "_sweep" else (tasks[0], 2.0)
            getattr(into, way)(*args, gauss_newton=gauss_newton)
        ways.append(into.entries.data)
    assert (ways[0] - ways[1]).abs().max() <= 1e-12 * ways[1].abs().max()


def test_products_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal_sum, "CHUNK", 8 * 117 * 7)  # seven unit vectors at once
    module = block()
    tasks = tasks_of(module, (X, T))
    into = DiagonalSum("test", tasks, [0.5], None, None)
    with torch.no_grad():
        into._products(tasks[0], 0.5, gauss_newton=False)
    assert tasks[0].size == 117
    assert_entries(into, reverse_over_reverse(module, X, T, mse).diagonal() / 2)


def test_a_sweep_that_gives_up_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inner = [], diagonal_sum.accumulate_diagonal

    def second_fails(sweep: Any, into: Any) -> None:
        calls.append(sweep)
        if len(calls) == 2:
            raise TooLarge
        inner(sweep, into)

    monkeypatch.setattr(diagonal_sum, "accumulate_diagonal", second_fails)
    module = block()
    found = total(tasks_of(module, (X, T)), batch_size=2)
    assert len(calls) == 2
    assert_entries(found, reverse_over_reverse(module, X, T, mse).diagonal())
    assert STEPS[-1] == (5, 5)


# Chunks


def test_the_first_sample_tells_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    inner = diagonal_sum.accumulate_diagonal
    monkeypatch.setattr(diagonal_sum, "accumulate_diagonal", lambda s, into: (batches.append(s), inner(s, into)))
    total(tasks_of(block(), (X, T)))
    assert STEPS == [(1, 5), (5, 5)]
    assert len(batches) == 2
    monkeypatch.setattr(diagonal_sum, "CHUNK", 1)
    total(tasks_of(block(), (X, T)))
    assert [done for done, _ in STEPS] == [1, 2, 3, 4, 5]


def test_parts_cover_a_batch() -> None:
    (task,) = tasks_of(block(), (X, T))
    assert [part.batch for part in _parts(task, 2)] == [2, 2, 1]
    assert torch.equal(torch.cat([part.inputs[0] for part in _parts(task, 2)]), X)
    assert torch.equal(torch.cat([part.target for part in _parts(task, 2)]), T)
    assert next(iter(_parts(task, 5))) is task


def test_what_is_split() -> None:
    (task,) = tasks_of(block(), (X, T))
    assert _splits(task, 4)
    assert not _splits(task, 5)
    meet = Formula(lambda s, x: torch.tanh(x @ s.W - (x @ s.W).mean(0)), W=(4, 4))
    assert not _splits(tasks_of(meet, (X, T))[0], 4)
    assert not _splits(tasks_of(block(), (X, T), loss=lambda z, t: (z - t).square().mean())[0], 4)


def test_bytes_are_counted_a_sample() -> None:
    (task,) = tasks_of(block(), (X, T))
    one, two, five = (_bytes(task.part(slice(0, n))) for n in (1, 2, 5))
    assert five - two == pytest.approx(3 * (two - one))
    assert one > 8 * (X[0].numel() + T[0].numel())


def test_entries_reached_once() -> None:
    def gain(*at: int) -> GainJacobian:
        return GainJacobian("a", torch.tensor(at), torch.ones(2, len(at)))

    assert _each_once([gain(0, 1), gain(2, 3)])
    assert not _each_once([gain(0, 1), gain(1, 2)])
    assert not _each_once([gain(0, 1), IdentityJacobian("a", torch.tensor([1]), 0, 1)])
