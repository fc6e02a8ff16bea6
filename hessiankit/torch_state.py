"""What a call of this library changes in torch for the whole process, and how two calls keep out of each other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_TURN = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let threads take turns: a module's parameters are given other values for a time, and tracing modes are the process's."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TURN:
            return function(*args, **kwargs)

    return alone


@contextmanager
def one_turn() -> Iterator[None]:
    """Let threads take turns, as :func:`one_at_a_time` does, for a block of code."""
    with _TURN:
        yield


@contextmanager
def ordinary_path() -> Iterator[None]:
    """Keep torch's transformer layers off their fused path for inference, which has no derivative and shortens padded batches."""
    with _TURN:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
