"""What a call of this library changes in torch for the whole process, and how two calls keep out of each other's way."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_TURN = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let threads take turns, outside inference mode: torch's tracing modes are the process's, and autograd has to follow."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TURN:
            if not torch.is_inference_mode_enabled():
                return function(*args, **kwargs)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)

    return alone


def hand_back_memory() -> None:
    """Hand freed memory back to the system, where the C library keeps much of it (glibc)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def computed_later(function: Callable[P, R]) -> Callable[P, R]:
    """Compute what a result has put off: one at a time, and without the autocast that may surround whoever reads it."""

    @wraps(function)
    def later(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_autocast():
            return one_at_a_time(function)(*args, **kwargs)

    return later


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the types that the tensors have, whatever surrounds the call."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


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
