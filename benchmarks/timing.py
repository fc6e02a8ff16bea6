"""Timing calls in turn, so that whatever slows the machine down for a while slows all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping


def in_turn(calls: Mapping[str, Callable[[int], float]], rounds: int) -> Iterator[dict[str, list[float]]]:
    """Make every call once a round and yield, after each round, the seconds of all rounds so far.

    Args:
        calls: Name -> a function that takes the number of the round, does the work once and returns the seconds that count.
        rounds: How often. The order is rotated from round to round, so that nobody always follows the same one.

    >>> [seconds["b"] for seconds in in_turn({"a": float, "b": lambda k: 2.0 * k}, 2)]
    [[0.0], [0.0, 2.0]]
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds):
        first = k % max(1, len(names))
        for name in names[first:] + names[:first]:
            gc.collect()  # the last one's garbage is not this one's
            seconds[name].append(calls[name](k))
        yield {name: list(values) for name, values in seconds.items()}
