"""Products that are replayed: CUDA graphs on a pretended device, tapes on a CPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from curvature_reference import draw, randomised
from operator_cases import EXACT, LABELS, TOKENS, T, X, block, classifier, error
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hessiankit as hk
from hessiankit.curvature import cuda_graph
from hessiankit.curvature.cuda_graph import Replayed
from hessiankit.curvature.operator import hessian_operator
from hessiankit.support.tape import Taped


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


def test_launches_that_take_the_time_become_a_graph_of_each_shape(device: type[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    product = Replayed(lambda rows: rows)
    assert results(product, 4) == [1, 1, 10, 10]
    assert results(product, 3, torch.ones(2, 2)) == [1, 1, 10]
    monkeypatch.setattr(Graph, "bytes", 1000 // cuda_graph.SHARE + 1)  # a graph that keeps much is not kept
    assert results(Replayed(lambda rows: rows), 5) == [1] * 5


def test_a_busy_device_is_no_reason_for_a_graph(device: type[Event]) -> None:
    device.device_seconds = 60.0
    assert results(Replayed(lambda rows: rows), 20) == [1] * 20


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


MANY = 12  # products of one shape, of which the last are replayed from a tape


class Tagger(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.rnn(x)[0]
        return self.head(states[:, -1])  # type: ignore[no-any-return]


REPEATED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "block": lambda: (block(), X, T),
    "classifier": lambda: (classifier(), TOKENS % 6, LABELS % 3),
    "several batches": lambda: (classifier(), [(TOKENS % 6, LABELS % 3), (TOKENS[:1, :2] % 6, LABELS[:1, :2] % 3)]),
    "recurrent": lambda: (randomised(Tagger()), X, LABELS[1:, 3] % 3),
}


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("options", [{}, {"recompute": "layers"}, {"micro_batch": 1}, {"snapshot": False}], ids=str)
@pytest.mark.parametrize("model", REPEATED)
def test_many_products_are_those_of_the_matrix(model: str, kind: str, options: dict[str, Any]) -> None:
    data, loss = REPEATED[model](), "mse" if model == "block" else "cross_entropy"
    operator = hessian_operator(*data, loss=loss, kind=kind, **options)
    dense = hk.hessian(*data, loss=loss)
    matrix = dense.matrix if kind == "hessian" else dense.outer()
    vectors = draw(operator.shape[0], 2 * MANY, seed=3)
    products = [(operator @ v).mul_(1.0) for v in vectors.T[:MANY]]  # what is written into one changes no other
    assert error(torch.stack(products, 1), matrix @ vectors[:, :MANY]) <= EXACT
    for pair in vectors.split(2, 1):
        assert error(operator @ pair, matrix @ pair) <= EXACT


def test_a_copy_of_an_operator_gives_its_products() -> None:
    operator = hessian_operator(block(), X, T)
    v = draw(operator.shape[0], seed=3)
    products = [operator @ v for _ in range(MANY)]
    for one in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator))):
        assert torch.equal(one @ v, products[-1])


def test_replayed_products_are_tensors_that_autograd_takes() -> None:
    operator = hessian_operator(block(), X, T)
    weights = torch.ones(operator.shape[0], dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        products = [operator @ weights for _ in range(MANY)]
    (products[-1] @ weights).backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, products[0])


def test_replays_in_several_threads_share_no_memory() -> None:
    operator = hessian_operator(block(), X, T)
    vectors = draw(operator.shape[0], 40, seed=4).T
    expected = [operator @ v for v in vectors]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(operator.__matmul__, vectors), expected))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number that is read": lambda rows: rows * float(rows.sum()),
    "more memory than a tape keeps": lambda rows: rows + rows.new_ones(2**23).sum(),
    "several results": lambda rows: torch.cat(torch.sort(rows * 2 + 1)[:1]) + torch.zeros_like(rows),
    "memory written in part": lambda rows: torch.empty_like(rows).fill_(3.0).index_add_(1, torch.tensor([1, 1]), rows[:, :2]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_taped_function_is_the_function(name: str) -> None:
    product = Taped(FUNCTIONS[name])
    for rows in draw(MANY, 3, 4, seed=5):
        assert torch.equal(product(rows), FUNCTIONS[name](rows))


def test_a_taped_function_is_called_where_operations_are_followed() -> None:
    product = Taped(FUNCTIONS["several results"])
    rows = draw(2, 3, seed=5)
    for _ in range(MANY):
        product(rows)
    with FlopCounterMode(display=False) as counter:
        Taped(lambda rows: rows @ rows.T)(rows)
    assert counter.get_total_flops() == 2 * 2 * 3 * 2
    assert torch.equal(torch.func.vmap(product)(rows.unsqueeze(0))[0], product(rows))


def test_an_operator_is_freed_at_once() -> None:
    """Also where its products are replayed: a device's memory does not wait for a collection of garbage."""
    x = torch.ones(2, 3)
    H = hessian_operator(torch.nn.Linear(3, 1), x, x[:, :1])
    H._replayed = Replayed(H._block)
    batch = weakref.ref(H._linearised[0])
    gc.disable()
    try:
        del H
        assert batch() is None
    finally:
        gc.enable()
