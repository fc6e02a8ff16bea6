"""When a product becomes a graph: after trials in which the host took the time, if what it keeps fits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hessiankit.curvature import cuda_graph
from hessiankit.curvature.cuda_graph import Replayed
from hessiankit.curvature.operator import hessian_operator


class Event:
    """An event of a device that takes some seconds for each product, and may lag behind."""

    done, device_seconds = True, 0.0

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Event) -> float:
        return self.device_seconds * 1e3


class Graph:
    bytes = 1000 // cuda_graph.SHARE

    def __init__(self, product: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        self.product = product

    def replay(self, rows: Tensor) -> Tensor:
        return 10 * self.product(rows)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(Event, "done", True)
    monkeypatch.setattr(Event, "device_seconds", 0.0)
    cuda = SimpleNamespace(Event=lambda **_: Event(), is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(cuda_graph.torch, "cuda", cuda)
    monkeypatch.setattr(cuda_graph, "_Graph", Graph)
    monkeypatch.setattr(cuda_graph, "available_memory", lambda device: 1000)
    return Event


ROW = torch.ones(1, 2)


def results(product: Replayed, count: int, rows: Tensor = ROW) -> list[float]:
    return [float(product(rows)[0, 0]) for _ in range(count)]


def test_launches_that_take_the_time_become_a_graph_of_each_shape(device: type[Event]) -> None:
    product = Replayed(lambda rows: rows)
    assert results(product, 4) == [1, 1, 10, 10]
    assert results(product, 3, torch.ones(2, 2)) == [1, 1, 10]


def test_a_busy_device_is_no_reason_for_a_graph(device: type[Event]) -> None:
    device.device_seconds = 60.0
    assert results(Replayed(lambda rows: rows), 20) == [1] * 20


def test_a_device_that_lags_behind_is_timed_again(device: type[Event]) -> None:
    device.done = False
    product = Replayed(lambda rows: rows)
    assert results(product, 5) == [1] * 5
    device.done = True
    assert results(product, 1) == [10]
    device.done = False
    never = Replayed(lambda rows: rows)
    results(never, cuda_graph.TRIALS + 1)
    device.done = True
    assert results(never, 1) == [1]


def test_a_graph_that_keeps_much_is_not_kept(device: type[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "bytes", 1000 // cuda_graph.SHARE + 1)
    assert results(Replayed(lambda rows: rows), 5) == [1] * 5


def test_a_product_that_cannot_be_captured_is_launched_with_a_warning(
    device: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Graph):
        def __init__(self, *_: object) -> None:
            raise RuntimeError("it waits\nfor the device")

    monkeypatch.setattr(cuda_graph, "_Graph", Waiting)
    product = Replayed(lambda rows: rows)
    assert results(product, 2) == [1, 1]
    with pytest.warns(UserWarning, match=r"no CUDA graph \(it waits\)"):
        product(ROW)
    assert results(product, 2) == [1, 1]


def test_an_operator_is_freed_at_once() -> None:
    """Also where its products are replayed: a device's memory does not wait for a collection of garbage."""
    x = torch.ones(2, 3)
    H = hessian_operator(torch.nn.Linear(3, 1), x, x[:, :1])
    H._replayed = Replayed(H._block)
    batch = weakref.ref(H._batches[0])
    gc.disable()
    try:
        del H
        assert batch() is None
    finally:
        gc.enable()
