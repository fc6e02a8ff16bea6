"""Memory of this process: the amount in use, and the peak of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


class Memory:
    """Peak memory of work beyond the amount in use at construction: resident size, or the bytes of the allocator of a GPU.

    Attributes:
        before: The bytes held when this was made.
        how: The source of the numbers.
    """

    def __init__(self, device: str) -> None:
        gc.collect()
        self.cuda = torch.device(device).type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            self.how, self.before = "cuda allocator", torch.cuda.memory_allocated()
        else:
            give_back()
            self.how, self.before = reset_peak(), resident()

    def peak(self, work: Callable[[], T]) -> tuple[T, int]:
        """Do the work; return its result and the highest that was held meanwhile, less what was before."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            give_back()
            reset_peak()
        result = work()
        if self.cuda:
            torch.cuda.synchronize()
        return result, max(0, (torch.cuda.max_memory_allocated() if self.cuda else highest()) - self.before)


@contextmanager
def at_most(gib: float) -> Iterator[None]:
    """Let allocations fail that would take this process further than so many GiB beyond what it has (Linux)."""
    now, limits = _status("VmData:"), resource.getrlimit(resource.RLIMIT_DATA)
    if now is None:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (now + int(gib * 2**30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def give_back() -> None:
    """Hand freed memory back to the system, so that it does not hide later allocations (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak() -> str:
    """Forget the peak of the imports where the system can; where it cannot, a small rise hides below it. Return how."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return "VmHWM, reset after imports and inputs"
    return "ru_maxrss"


def highest() -> int:
    """Return the peak of the resident size in bytes; ru_maxrss alone also holds what the parent had when this process started."""
    known = _status("VmHWM:")
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) if known is None else known
    )


def resident() -> int:
    """Return the resident size in bytes, or the peak where the system does not tell it."""
    known = _status("VmRSS:")
    return highest() if known is None else known


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
