"""Products replayed as CUDA graphs, so that a GPU does not wait for launches by its host."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.support.memory import available_memory

Product: TypeAlias = Callable[[Tensor], Tensor]

SHARE = 8  # what a graph keeps may be this part of the free memory
LAUNCHING = 0.9  # part of a product's time on the device from which its host, which launches, is what takes the time
ALIGNED = 256  # bytes of which an allocation's address is a multiple
TRIALS = 8  # products that are timed until one had ended before the next began


class Replayed:
    """A function of rows on a device, replayed as a CUDA graph from about its third call on if launches dominate its time.

    The first call of a shape makes what is made once, the second one is timed by events of the device, without waiting for
    it. A graph keeps the memory that the function takes meanwhile, and gives the same numbers: the same kernels run, as rows
    begin at a multiple of ``ALIGNED`` bytes, which libraries choose kernels by. The function never waits for the device, and what
    it reads stays where it is.
    """

    def __init__(self, product: Product) -> None:
        self._product = product
        self._graphs: dict[Any, _Trials | _Graph | None] = {}
        self._lock = threading.Lock()

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product."""
        if torch.cuda.is_current_stream_capturing():
            return self._product(rows)
        if not rows.is_contiguous() or rows.data_ptr() % ALIGNED:
            rows = rows.clone(memory_format=torch.contiguous_format)
        with self._lock:
            key = (len(rows), torch.are_deterministic_algorithms_enabled())
            graph = self._graphs.setdefault(key, _Trials())
            if isinstance(graph, _Trials) and graph.launches_take_the_time is not None:
                graph = self._graphs[key] = self._captured(rows) if graph.launches_take_the_time else None
            if isinstance(graph, _Graph):
                return graph.replay(rows)
            return self._product(rows) if graph is None else graph.time(self._product, rows)

    def _captured(self, rows: Tensor) -> _Graph | None:
        """Return the graph of a product; None, with a warning, where it cannot be captured or is too large."""
        free = available_memory(rows.device)
        try:
            graph = _Graph(self._product, rows)
            return graph if SHARE * graph.bytes <= free else None
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"hessiankit: products are launched one operation at a time: no CUDA graph ({reason})", stacklevel=2)
            return None


@dataclass
class _Trials:
    """Times of the first calls."""

    count: int = 0
    seconds: float = 0.0  # that the host took for the last one
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # before and after it, on the device

    def time(self, product: Product, rows: Tensor) -> Tensor:
        """Return a product, timed from the second one on."""
        self.count += 1
        if self.count == 1:
            return product(rows)
        self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        self.events[0].record()
        out = product(rows)
        self.events[1].record()
        self.seconds = time.perf_counter() - start
        return out

    @property
    def launches_take_the_time(self) -> bool | None:
        """Whether the host took as long as the device; None if the device is still busy with the last call, for some calls."""
        if self.events is None:
            return None
        if not self.events[1].query():
            return None if self.count < TRIALS else False
        return self.seconds >= LAUNCHING * self.events[0].elapsed_time(self.events[1]) / 1e3


class _Graph:
    """A product captured, with the memory that it reads rows from and leaves its result in."""

    def __init__(self, product: Product, rows: Tensor) -> None:
        self._rows, self._graph, self._done = rows.clone(), torch.cuda.CUDAGraph(), torch.cuda.Event()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(rows.device)
        with torch.cuda.device(rows.device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._out = product(self._rows)
        self.bytes = torch.cuda.memory_reserved(rows.device) - reserved  # kept, beside the rows
        self._done.record()

    def replay(self, rows: Tensor) -> Tensor:
        """Return the product with other rows, after a replay on another stream has ended."""
        torch.cuda.current_stream(rows.device).wait_event(self._done)
        self._rows.copy_(rows)
        self._graph.replay()
        out = self._out.clone()
        self._done.record()
        return out
