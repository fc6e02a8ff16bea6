"""The plan of a Hessian: what is recorded, kept, run once, and the memory it takes."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hessiankit.engine.plan import make_plan
from hessiankit.engine.recorder import PlanError, recording
from hessiankit.engine.storage import MatrixMemory

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_memory_of_a_matrix_that_is_gone_is_used_again() -> None:
    memory = MatrixMemory(600, DOUBLE, torch.device("cpu"))
    assert memory.again() is None
    first = memory.new()
    at, part = first.data_ptr(), first[0]
    second = memory.new()
    assert second.data_ptr() != at
    del first
    assert memory.again() is None  # a part of it is still in use
    del part
    third = memory.again()
    assert third is not None
    assert third.data_ptr() == at


def test_a_plan_keeps_constants_and_uses_memory_again() -> None:
    x, total = torch.randn(64, 64), torch.zeros(64, 64)
    with recording([x, total]) as record:
        y = x
        for k in range(8):
            y = (y + torch.eye(64) * k) @ x
        total += y
    plan = make_plan(record, [x], total, [])
    assert plan.workspace_bytes <= 3 * x.numel() * 4
    assert plan.counts()["eye"] == 0
    x.copy_(torch.randn(64, 64))
    y = x
    for k in range(8):
        y = (y + torch.eye(64) * k) @ x
    found = torch.full((64, 64), torch.nan)
    plan.run(found)
    assert torch.equal(found, y)


def test_memory_is_released_while_recording() -> None:
    x, total = torch.randn(64, 64), torch.zeros(64, 64)
    size = x.numel() * 4
    with recording([x, total], bytes_allowed=size) as record:
        y = x @ x
        first = StorageWeakRef(y.untyped_storage())
        for _ in range(7):
            y = y @ x
        assert first.expired()
        total += y
    assert make_plan(record, [x], total, [], 2 * size).workspace_bytes == 2 * size
    with pytest.raises(PlanError, match="intermediates take"):
        make_plan(record, [x], total, [], size)
    with pytest.raises(PlanError, match="what depends on no input"), recording([x], bytes_allowed=size):
        _ = [torch.eye(64) for _ in range(2)]


def test_a_constant_that_is_written_into_later_is_made_anew_each_time() -> None:
    x, total = torch.tensor([2.0]), torch.zeros(1)
    with recording([x, total]) as record:
        step = torch.zeros(1)
        first = x + step
        step += 1.0
        total += first * step
    plan = make_plan(record, [x], total, [])
    for value in (2.0, 5.0):
        x.fill_(value)
        found = torch.zeros(1)
        plan.run(found)
        assert found.item() == value


def test_what_is_computed_twice_is_run_once() -> None:
    x, total = torch.randn(4, 4), torch.zeros(4, 4)

    def formula() -> Tensor:
        y, kept = x.exp() @ x.exp(), x + 1  # the same value
        before = kept * x
        kept.mul_(x)  # from here on, the same words mean another value
        moved = x.exp()
        moved[1] += x[1]
        return y + before + kept * x + moved + x.exp() + x.sum(0) + x.sum(1)

    with recording([x, total]) as record:
        total += formula()
    plan = make_plan(record, [x], total, [total[0, 0]])
    assert (plan.counts()["exp"], plan.counts()["sum"], plan.counts()["mm"]) == (2, 2, 1)
    x.copy_(torch.randn(4, 4))
    found = torch.empty(4, 4)
    plan.run(found)
    assert torch.equal(found, formula())
