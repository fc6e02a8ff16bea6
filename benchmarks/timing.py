"""Clocks, medians and quartiles, and rounds in which methods take turns, so that disturbances of the machine reach all."""

from __future__ import annotations

import gc
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}
"""Clocks by name: ``"process"`` counts the processor's time of all threads, which other processes disturb less."""


def in_turn(calls: Mapping[str, Callable[[int], float]], rounds: int) -> Iterator[dict[str, list[float]]]:
    """Make every call once a round and yield, after each round, the seconds of all rounds so far.

    Args:
        calls: Name -> a function that takes the number of the round, does the work once and returns the seconds that count.
        rounds: How often. The order is rotated from round to round, so that none always follows the same one.

    >>> [seconds["b"] for seconds in in_turn({"a": float, "b": lambda k: 2.0 * k}, 2)]
    [[0.0], [0.0, 2.0]]
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    others = gc.get_freeze_count()
    gc.freeze()  # existing objects need no further collection
    try:
        for k in range(rounds):
            first = k % max(1, len(names))
            for name in names[first:] + names[:first]:
                gc.collect()  # the last one's garbage is not this one's
                seconds[name].append(calls[name](k))
            yield {name: list(values) for name, values in seconds.items()}
    finally:
        if not others:  # what was frozen before stays so
            gc.unfreeze()


def all_rounds(calls: Mapping[str, Callable[[int], float]], rounds: int, limit: float = math.inf) -> dict[str, list[float]]:
    """Return the seconds of all rounds of :func:`in_turn`, or of the first and those that end within so many seconds."""
    start = time.perf_counter()
    last: dict[str, list[float]] = {}
    for done, last in enumerate(in_turn(calls, rounds), 1):
        if (time.perf_counter() - start) * (done + 1) / done > limit:
            return last
    return last


def add_rounds(rows: Mapping[str, dict[str, Any]], seconds: Mapping[str, Sequence[float]], first: str | None) -> None:
    """Add to the row of each name its seconds, their median and quartiles, and the ratios to those of ``first``."""
    for name, own in seconds.items():
        rows[name].update(seconds=own, time=spread(own))
        if first in seconds and name != first:
            ratios = [a / b for a, b in zip(own, seconds[first], strict=True)]
            rows[name].update(ratios=ratios, ratio=spread(ratios))


def timed(device: str, work: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """Do some work once; return its result and its seconds by a clock, by CUDA events where the device is a GPU."""
    if torch.device(device).type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        result = work()
        end.record()
        torch.cuda.synchronize()
        return result, start.elapsed_time(end) / 1e3
    begin = clock()
    result = work()
    return result, clock() - begin


def several(device: str, work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call of short work, from so many calls that together they take 20 ms, at most 1000."""
    _, once = timed(device, work, clock)
    count = min(1000, max(1, int(0.02 / max(once, 1e-9))))
    if count == 1:
        return once

    def repeat() -> None:
        for _ in range(count):
            work()

    return timed(device, repeat, clock)[1] / count


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median and quartiles.

    >>> spread([1.0, 2.0, 3.0])
    {'median': 2.0, 'low': 1.5, 'high': 2.5}
    """
    if not values:
        return None
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def finite(value: float) -> float | None:
    """Return a number that JSON can hold: None where it is NaN or infinite."""
    return value if math.isfinite(value) else None


def rounds_within(budget: float, one: float, most: int) -> int:
    """Return how many rounds of so many seconds fit into a budget, at most ``most``; 0 where not even one does.

    >>> rounds_within(10.0, 3.0, 5), rounds_within(10.0, 0.1, 5), rounds_within(10.0, 11.0, 5)
    (3, 5, 0)
    """
    return min(most, int(budget / max(one, 1e-12)))


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the work inside after so many seconds, where the platform can interrupt it."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError(f"{what} took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
