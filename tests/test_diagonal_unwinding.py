"""The diagonal's way back from curvature between vertices: what it keeps, and when it gives up."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, draw

import hessiankit as hk
from hessiankit.engine import diagonal_accumulation
from hessiankit.engine.diagonal_accumulation import BoundedForwardSweep, Entries, Reach, TooLarge, accumulate_diagonal, overlap
from hessiankit.engine.jacobians import GainJacobian
from hessiankit.engine.problem.loss_trace import loss_trace
from hessiankit.engine.problem.own_call import make_task
from hessiankit.engine.tangents import StackedTangents, Vertex


def gain(name: str, at: list[int] | None = None) -> GainJacobian:
    return GainJacobian(name, None if at is None else torch.tensor(at), torch.ones(2, 3 if at is None else len(at)))


def vertex(*jacobians: GainJacobian, parents: tuple[int, ...] = ()) -> Vertex:
    stacks = {1: StackedTangents(torch.zeros(3 * len(parents), 2, 3), parents, (3,) * len(parents))} if parents else {}
    return Vertex(torch.Size((2, 3)), 1, 3, list(jacobians), stacks)


def test_what_meets() -> None:
    reach = Reach({
        0: vertex(gain("a", [0, 1])),
        1: vertex(gain("a", [2, 3])),
        2: vertex(gain("b"), parents=(0,)),
        3: vertex(parents=(1,)),
        4: vertex(parents=(2, 3)),
        5: vertex(gain("a", [1, 2])),
    })  # fmt: skip
    assert reach.meet(0, 5)
    assert reach.meet(0, 1)  # through the jacobian that has an entry of each
    assert not Reach({0: vertex(gain("a", [0, 1])), 1: vertex(gain("a", [2, 3]))}).meet(0, 1)
    assert reach.meet(4, 2)
    assert reach.own[4] == frozenset()


def test_positions_that_overlap() -> None:
    some = torch.tensor([1, 5])
    assert overlap(None, some)
    assert overlap(some, torch.tensor([5, 9]))
    assert not overlap(some, torch.tensor([2, 9]))
    assert not overlap(some, torch.tensor([6, 7]))


def test_entries_are_added() -> None:
    entries = Entries({"a": slice(0, 2), "b": slice(2, 5)}, torch.float64, torch.device("cpu"))
    entries.add("b", torch.tensor([2, 0]), torch.tensor([1.0, 2.0]))
    entries.add("b", None, torch.ones(3))
    assert entries.data.tolist() == [0.0, 0.0, 3.0, 1.0, 2.0]


def test_a_sweep_of_everything() -> None:
    """Also where each parameter could be taken alone: the two ways are independent."""
    module, x, target = (
        Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.A) @ s.B + s.b), A=(4, 5), B=(5, 2), b=(2,)),
        draw(2, 3, 4),
        draw(2, 3, 2),
    )
    task = make_task("test", module, x, target, "mse")
    entries = Entries(task.slices, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        sweep = BoundedForwardSweep(loss_trace(task, float(target.numel())).trace)
        sweep.run()
        accumulate_diagonal(sweep, entries)
    torch.testing.assert_close(entries.data, hk.hessian(module, x, target).matrix.diagonal(), rtol=0, atol=1e-14)


def test_a_sweep_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, target = Formula(lambda s, x: torch.tanh(x @ s.A.square()), A=(4, 5)), draw(2, 3, 4), draw(2, 3, 5)
    with torch.no_grad():
        traced = loss_trace(make_task("test", module, x, target, "mse"), 30.0)
        BoundedForwardSweep(traced.trace)
        monkeypatch.setattr(diagonal_accumulation, "WHOLE", 20 * 20 - 1)
        with pytest.raises(TooLarge):
            BoundedForwardSweep(traced.trace)
